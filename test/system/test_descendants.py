"""All that a process has started ends, also what its children start meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from grpo.system.descendants import end_descendants, gone_after
from grpo.system.processes import children

from ..support import REPO, wait_until, with_variable

MARK = "GRPO_TEST_DESCENDANTS"
# A child that starts a process of another session every few milliseconds, each with a child.
SPAWNING = """
import subprocess, sys, time
for _ in range(200):
    subprocess.Popen(["/bin/sh", "-c", "sleep 300 & sleep 300"], start_new_session=True)
    time.sleep(0.005)
time.sleep(300)
"""
ENDING = f"""
import os, subprocess, sys, time
from grpo.system.descendants import end_descendants
subprocess.Popen([sys.executable, "-c", {SPAWNING!r}])
sys.stdin.readline()
end_descendants()
os._exit(7)
"""


def test_everything_below_ends_while_it_grows_and_nothing_beside(tmp_path):
    beside = subprocess.Popen(["sleep", "300"])
    with subprocess.Popen([sys.executable, "-c", ENDING], stdin=subprocess.PIPE, text=True,
                          env=os.environ | {"PYTHONPATH": str(REPO), MARK: str(tmp_path)}
                          ) as process:
        wait_until(lambda: len(with_variable(MARK, tmp_path)) > 20, every=0.05, alive=process)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(timeout=30) == 7
        assert with_variable(MARK, tmp_path) == []
    assert beside.poll() is None
    beside.kill()
    beside.wait()


def test_shared_memory_of_what_is_killed_is_removed(tmp_path):
    """Python's resource tracker is left to do that."""
    code = ("from multiprocessing.shared_memory import SharedMemory; import time;"
            "print(SharedMemory(create=True, size=64).name, flush=True); time.sleep(300)")
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    name = child.stdout.readline().strip()
    assert Path("/dev/shm", name).exists()
    end_descendants()
    assert not Path("/dev/shm", name).exists()
    child.communicate()


def test_some_children_have_time_to_end_and_are_killed_with_all_below_after_it(tmp_path):
    """Of three, one ends when it is asked, one ignores that, and one is not meant."""
    variables = os.environ | {MARK: str(tmp_path)}
    before = children()
    asked = subprocess.Popen(["sh", "-c", "sleep 300 & wait"], env=variables)
    deaf = subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 300 & (sleep 300); sleep 300"],
                            env=variables)
    assert children() - before == {asked.pid, deaf.pid}
    beside = subprocess.Popen(["sleep", "300"])
    wait_until(lambda: len(with_variable(MARK, tmp_path)) == 5, every=0.05)
    begun = time.monotonic()
    with gone_after({asked.pid, deaf.pid}, timeout=0.5):
        asked.terminate()
        deaf.terminate()
    assert 0.5 <= time.monotonic() - begun < 5
    assert with_variable(MARK, tmp_path) == []
    assert beside.poll() is None
    beside.kill()
    for process in (asked, deaf, beside):
        process.wait()


def test_nothing_is_waited_for_when_all_end_as_they_are_asked():
    child = subprocess.Popen(["sleep", "300"])
    begun = time.monotonic()
    with gone_after({child.pid}):
        child.terminate()
    assert time.monotonic() - begun < 5
    assert child.wait() == -15
