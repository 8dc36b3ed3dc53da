"""Two processes never write to one run's folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from grpo.config.schema import ConfigError
from grpo.training.run_lock import LOCK_FILE, locked

CONFIG = Path(__file__).resolve().parents[2] / "config"



@pytest.fixture
def holder(tmp_path):
    """Another process that has the folder."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with locked(tmp_path):
            os.write(write, b"1")
            time.sleep(60)
        os._exit(0)
    assert os.read(read, 1) == b"1"
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with locked(tmp_path):  # the system has given it back
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    os.close(read)
    os.close(write)


def test_a_folder_in_use_is_refused_with_host_process_and_start_until_that_is_killed(
        holder, tmp_path):
    with pytest.raises(ConfigError, match=f"is in use by process {holder} on "
                                          f"{re.escape(socket.gethostname())} since 20"):
        with locked(tmp_path):
            pass


def without_locks(*_):
    raise OSError(errno.ENOLCK, "No locks available")


def test_without_locks_in_the_file_system_the_file_itself_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", without_locks)
    lock = tmp_path / LOCK_FILE
    with locked(tmp_path):
        with pytest.raises(ConfigError, match=f"since .*remove {lock}"), locked(tmp_path):
            pass
    lock.write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": "2026"}))
    with pytest.raises(ConfigError, match="process 1 on elsewhere since 2026"), locked(tmp_path):
        pass
    lock.write_text(json.dumps({"host": socket.gethostname(), "pid": 2**22 + 1, "started": "x"}))
    with locked(tmp_path):  # that process is gone
        pass


def test_runs_of_the_same_second_have_folders_of_their_own():
    import grpo.run.resume  # noqa: F401 (it knows `unique`)

    found = set()
    for _ in range(3):
        with initialize_config_dir(str(CONFIG), version_base=None):
            config = compose("grpo", return_hydra_config=True)
        for section in ("run", "sweep"):
            folder = OmegaConf.select(config, f"hydra.{section}.dir")
            assert folder == OmegaConf.select(config, f"hydra.{section}.dir")
            found.add((section, folder.rpartition("-")[2]))
    assert len(found) == 6
