"""A child process: its log, how it ended, and that all of its group ends, whoever dies first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from grpo.system.child_process import Child, last_lines

from ..support import runs, wait_until

# Starts a process that ignores SIGTERM and prints its id, then waits.
FAMILY = """
import subprocess, sys, time
code = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
subprocess.Popen([sys.executable, "-c", code + "print(os.getpid(), flush=True); time.sleep(60)"])
time.sleep(60)
"""


@pytest.fixture
def run(tmp_path):
    children = []

    def run(code: str, **options) -> Child:
        children.append(Child([sys.executable, "-c", code], log_path=tmp_path / "new" / "log",
                              **options))
        return children[-1]

    yield run
    for child in children:
        child.stop(timeout=0.0)


def group(pid: int) -> list[int]:
    """Ids of the running processes in a group."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == pid and fields[0] != "Z":
            found.append(int(folder.name))
    return found


@pytest.mark.parametrize(("code", "number", "words"), [
    ("pass", 0, "exit code 0"), ("raise SystemExit(3)", 3, "exit code 3"),
    ("import os; os.kill(os.getpid(), 9)", -9, "signal SIGKILL")])
def test_how_it_ended_is_known_before_and_after_the_stop(run, code, number, words):
    child = run(code)
    assert child.wait(timeout=20)
    for _ in range(2):
        assert (child.alive(), child.exit_code(), child.ending()) == (False, number, words)
        child.stop()


def test_while_it_runs_it_has_no_exit_code(run):
    child = run("import time; time.sleep(60)")
    assert child.alive() and child.exit_code() is None
    assert not child.wait(timeout=0.05)


def test_output_and_errors_are_appended_to_the_log_and_the_variables_arrive(run):
    for name in ("first", "second"):
        child = run("import os, sys; print(os.environ['NAME']); sys.exit('failed')",
                    env={"NAME": name})
        assert child.wait(timeout=20)
    assert child.last_lines() == ["first", "failed", "second", "failed"]
    assert child.last_lines(1) == ["failed"]
    assert last_lines(child.log_path.with_name("other")) == []


def test_a_command_that_is_not_there_says_so_in_the_log(tmp_path):
    child = Child(["/no/such/program"], log_path=tmp_path / "log")
    assert child.wait(timeout=20)
    assert child.exit_code() == 127 and "/no/such/program" in child.last_lines()[-1]
    child.stop()


def test_its_standard_input_is_empty(run):
    child = run("import sys; print(repr(sys.stdin.read()))")
    assert child.wait(timeout=20) and child.last_lines() == ["''"]


def test_stop_ends_the_whole_group_also_what_ignores_the_request(run):
    child = run(FAMILY)
    grandchild = int(wait_until(child.last_lines)[0])
    child.stop()
    wait_until(lambda: not runs(grandchild))
    assert not group(child.pid) and child.ending() == "signal SIGTERM"


def test_stop_ends_what_a_dead_command_left_behind(run):
    child = run(FAMILY)
    grandchild = int(wait_until(child.last_lines)[0])
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait(timeout=20)
    assert runs(grandchild)
    child.stop()
    wait_until(lambda: not runs(grandchild))


def test_when_the_parent_is_killed_the_group_ends(tmp_path):
    code = f"""
import pathlib, sys, time
import grpo.system.child_process as processes
processes.GRACE = 0.5
child = processes.Child([sys.executable, "-c", {FAMILY!r}],
                        log_path=pathlib.Path({str(tmp_path / "log")!r}))
print(child.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    leader = int(parent.stdout.readline())
    wait_until(lambda: last_lines(tmp_path / "log"))
    assert len(group(leader)) >= 3  # the command, what it started, the shell that watches
    parent.kill()
    parent.communicate()
    wait_until(lambda: not group(leader))
