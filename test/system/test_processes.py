"""What /proc says of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from grpo.system.processes import all_running, command_line, running

from ..support import wait_until


def test_a_process_is_found_while_it_runs_and_not_while_it_waits_for_its_parent():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert all_running()[child.pid] == running(child.pid)
        assert running(child.pid).parent == os.getpid()
        wait_until(lambda: command_line(child.pid).endswith("-c input()"))
        child.stdin.close()
        wait_until(lambda: running(child.pid) is None)
        assert Path(f"/proc/{child.pid}").exists() and child.pid not in all_running()
    assert command_line(child.pid) == ""


def test_processes_that_are_hidden_are_not_there(monkeypatch):
    """A stand-in for a /proc that shows other users' processes to nobody."""
    own, read = os.getpid(), Path.read_text

    def read_text(path: Path, *args, **options) -> str:
        if path.name == "stat" and path.parent.name != str(own):
            raise PermissionError(1, "hidden", str(path))
        return read(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert set(all_running()) == {own}


def test_a_name_that_is_cut_within_a_letter_hides_no_process():
    """A process may take any 15 bytes for a name; so does a thread that is named."""
    code = ("import ctypes; ctypes.CDLL(None).prctl(15, ('a' * 14 + 'é').encode(), 0, 0, 0); "
            "print(flush=True); input()")
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        try:
            assert running(process.pid).parent == os.getpid() and process.pid in all_running()
        finally:
            process.kill()
