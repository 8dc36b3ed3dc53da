"""The environment launcher, with small scripts in the place of environments."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from grpo.atropos import launcher
from grpo.atropos.launcher import (
    EnvironmentProcess,
    EnvironmentProcessError,
    environment_python,
    serve_command,
    serve_flags,
)
from grpo.run.beside import all_finished
from grpo.server.engine_process import bind

from ..support import wait_until
from .inference import JsonHandler, running

RUNS = "import time; print('up', flush=True); time.sleep(60)"
FAILS = "print('about to fail'); raise SystemExit('no such data set')"


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(launcher, "_POLL", 0.02)
    monkeypatch.setattr(launcher, "_ASK", 0.02)


@contextmanager
def api(port: int = 0, *, status: int = 200, environments=None, batch_size: int = 8):
    """An API that answers, and its address; with ``environments``, names, it is a hub."""

    class Handler(JsonHandler):
        def do_GET(self):
            answer = {"batch_size": batch_size, "max_token_len": 64}
            if self.path == "/status":
                answer = {"current_step": 0, "queue_size": 0}
                if environments is not None:
                    answer["hub"] = {"environments": [{"name": name, "connected": True}
                                                      for name in environments]}
            self.reply(answer, status=status)

    with running(Handler, port) as url:
        yield url


@pytest.fixture
def url():
    with api() as url:
        yield url


@pytest.fixture
def environment(tmp_path):
    made = []

    def make(code: str, url: str, **options) -> EnvironmentProcess:
        script = tmp_path / "some_env.py"
        script.write_text(code)
        made.append(EnvironmentProcess(script, **{
            "python": sys.executable, "api_url": url, "log_path": tmp_path / "env.log",
            "backoff": 0.02, **options}))
        made[-1].start()
        return made[-1]

    yield make
    for process in made:
        process.stop(timeout=0.5)


def given_up(process: EnvironmentProcess) -> str:
    """Wait until it is given up; the message."""
    wait_until(lambda: process.state == "failed")
    with pytest.raises(EnvironmentProcessError) as caught:
        process.check()
    return str(caught.value)


def test_it_is_served_with_its_flags_and_name(environment, url):
    process = environment("import sys; print(*sys.argv[1:])", url + "/", name="mine",
                          flags={"env.total_steps": -1, "env.group_size": None})
    wait_until(lambda: process.state == "finished")
    assert process.last_lines() == [f"serve --env.total_steps=-1 --env.rollout_server_url={url} "
                                    "--env.wandb_name=mine"]
    process.check()
    assert process.restarts == 0 and process.pid is None


def test_a_name_among_the_flags_is_the_one_it_registers_under(environment, url, tmp_path):
    process = environment("", url, flags={"env.wandb_name": "of the flags"})
    assert process.name == "of the flags" and "--env.wandb_name=of the flags" in process.command
    for flag in ("env.rollout_server_url", "env.wandb_name"):
        with pytest.raises(ValueError, match=f"flags has {flag}=other, which .* leave the first"):
            EnvironmentProcess(process.script, python=sys.executable, api_url=url, name="mine",
                               flags={flag: "other"})


def test_it_waits_for_an_api_that_comes_up_later(environment):
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    process = environment(RUNS, f"http://127.0.0.1:{port}")
    time.sleep(0.2)
    assert process.state == "waiting for the API" and process.pid is None
    with api(port):
        wait_until(lambda: process.last_lines() == ["up"])
        assert process.state == "running"


def test_an_api_that_wants_a_token_is_up(environment):
    with api(status=401) as url:
        process = environment(RUNS, url)
        wait_until(lambda: process.state == "running")


def test_one_that_is_killed_is_started_again(environment, url):
    process = environment(RUNS, url)
    wait_until(lambda: process.last_lines() == ["up"])
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: process.last_lines() == ["up", "up"])
    assert (process.state, process.restarts) == ("running", 1)
    process.check()


def test_one_that_keeps_failing_is_given_up_with_its_last_lines(environment, url):
    process = environment(FAILS, url, max_restarts=2)
    message = given_up(process)
    assert "'some_env' ended with exit code 1, 3 times in a row" in message
    assert message.endswith("  | about to fail\n  | no such data set")
    assert process.last_lines().count("no such data set") == 3


def test_one_that_raises_is_quoted_whatever_it_says_after_that(environment, url):
    code = ("import atexit\natexit.register(lambda: print(*map(str, range(50)), sep='\\n'))\n"
            "def collect():\n    raise ValueError('the answer\\nhas no number')\ncollect()")
    message = given_up(environment(code, url, max_restarts=0))
    assert "ended with exit code 1, 1 times in a row, and is given up" in message
    assert "  | Traceback (most recent call last)" in message and "in collect" in message
    assert "  | ValueError: the answer\n  | has no number" in message and "| 49" not in message


def test_one_that_lacks_a_module_is_not_tried_again(environment, url):
    process = environment("import no_such_module.part", url, backoff=60.0)
    message = given_up(process)
    assert process.restarts == 0 and process.last_lines().count("") == 0
    assert (f"'some_env' needs the module 'no_such_module'; install it there: {sys.executable} -m "
            "pip install no_such_module;") in message
    assert "  | ModuleNotFoundError: No module named 'no_such_module'" in message


def test_a_module_that_lies_near_is_not_to_be_installed(environment, url, tmp_path):
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "near.py").touch()
    (tmp_path / "near").mkdir()
    process = environment("import sys; sys.path.clear(); import near", url)
    assert f"PYTHONPATH={tmp_path}" in given_up(process)


def test_a_name_that_a_module_has_not_is_no_reason_to_try_again_either(environment, url):
    process = environment("from json import no_such_name", url, backoff=60.0)
    assert re.search("cannot be imported .*no_such_name.*the version of that package",
                     given_up(process))
    assert process.restarts == 0


def test_an_import_error_that_was_survived_does_not_end_it(environment, url):
    code = ("import traceback\ntry:\n    import no_such_module\nexcept ImportError:\n"
            "    traceback.print_exc()\n" + RUNS)
    process = environment(code, url)
    wait_until(lambda: "up" in process.last_lines())
    assert process.state == "running"


def test_what_one_that_goes_on_says_of_errors_can_be_asked_for(environment, url):
    process = environment(
        "print('ERROR:root:Error in collect_trajectories: no key')\n" + RUNS, url)
    wait_until(lambda: "up" in process.last_lines())
    said = process.troubles()
    assert "'some_env' (running); the last error in" in said and "no key" in said
    assert "| up" not in said


def test_one_that_has_finished_says_so_when_groups_are_missing(environment, url):
    process = environment("print('env_manager: 1000 steps are done')", url)
    wait_until(lambda: process.state == "finished")
    assert re.search(r"'some_env' has finished(.|\n)*\| env_manager: 1000 steps are done$",
                     process.troubles())
    assert all_finished([process]) and not all_finished([])


def test_a_steady_run_ends_a_row_of_failures(environment, url):
    process = environment(FAILS, url, max_restarts=1, steady=0.0)
    wait_until(lambda: process.restarts >= 3)
    process.check()


def test_failing_while_the_api_is_away_costs_nothing(environment, tmp_path):
    dies = (f"import pathlib, time\nprint('up', flush=True)\n"
            f"while not pathlib.Path({str(tmp_path / 'die')!r}).exists(): time.sleep(0.01)\n"
            f"raise SystemExit(1)")
    with api() as url:
        process = environment(dies, url, max_restarts=0)
        wait_until(lambda: process.last_lines() == ["up"])
    (tmp_path / "die").touch()
    wait_until(lambda: process.state == "waiting for the API")
    (tmp_path / "die").unlink()
    with api(int(url.rsplit(":", 1)[1])):
        wait_until(lambda: process.last_lines() == ["up", "up"])
        process.check()


def test_one_that_never_registers_is_started_again_and_then_given_up(environment):
    with api(environments=["other_0", "some_env_old_0"]) as url:
        process = environment(RUNS, url, register_timeout=0.3, max_restarts=1)
        with pytest.raises(EnvironmentProcessError, match="was not registered within 0.3 s"):
            process.wait_registered(timeout=20)
        assert process.restarts == 1


@pytest.mark.parametrize(("hub", "registered"), [
    ({"environments": ["some_env_0"]}, True), ({"environments": [], "batch_size": -1}, False),
    ({"environments": None}, None)], ids=["registered", "no trainer yet", "run-api"])
def test_it_is_left_alone_when_it_is_there_or_nobody_waits_or_nobody_can_tell(
        environment, hub, registered):
    with api(**hub) as url:
        process = environment(RUNS, url, register_timeout=0.05, max_restarts=0)
        wait_until(process.last_lines)
        time.sleep(0.4)
        assert process.state == "running" and process.restarts == 0
        assert process.registered() is registered


def test_waiting_for_the_registration_has_a_deadline(environment):
    names = []
    with api(environments=names) as url:
        process = environment(RUNS, url)
        wait_until(process.last_lines)
        with pytest.raises(EnvironmentProcessError, match=r"\(running\)(.|\n)*0.1 s(.|\n)*\| up"):
            process.wait_registered(timeout=0.1)
        names.append("some_env_3")
        process.wait_registered(timeout=0.1)


def test_the_token_of_a_hub_goes_along_in_its_address_and_not_into_messages(environment):
    with api(status=401) as url:
        process = environment(FAILS, url, api_token="secret", max_restarts=0)
        assert "secret" not in given_up(process)
        assert any(f"http://:secret@{url.removeprefix('http://')}" in part
                   for part in process.command)


def test_an_error_of_the_watching_thread_reaches_the_caller(environment, url, tmp_path):
    (tmp_path / "file").touch()
    process = environment(RUNS, url, log_path=tmp_path / "file" / "env.log")
    wait_until(lambda: process.state == "failed")
    with pytest.raises(EnvironmentProcessError, match="cannot be run ") as info:
        process.check()
    assert isinstance(info.value.__cause__, OSError) and process.pid is None


def test_stop_ends_it_for_good(environment, url):
    process = environment(RUNS, url)
    wait_until(lambda: process.last_lines() == ["up"])
    pid = process.pid
    process.stop()
    assert process.state == "stopped" and process.last_lines() == ["up"]
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(RuntimeError, match="was started already"):
        process.start()


@pytest.mark.parametrize("field", ["register_timeout", "max_restarts", "backoff", "steady"])
def test_negative_numbers_are_refused_by_name(tmp_path, field):
    (tmp_path / "env.py").touch()
    with pytest.raises(ValueError, match=f"{field}=-1 must be 0 or more"):
        EnvironmentProcess(tmp_path / "env.py", python=sys.executable,
                           api_url="http://127.0.0.1:1", **{field: -1})


def test_a_script_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no_env.py is not there"):
        EnvironmentProcess(tmp_path / "no_env.py", python=sys.executable,
                           api_url="http://127.0.0.1:1")


def test_flags_of_an_engine_can_be_overridden_by_fields_of_the_environment(tmp_path):
    flags = serve_flags(engine_url="http://h:1/", model="m", tokenizer="t", token="secret",
                        use_wandb=True)
    assert flags["env.use_wandb"] is True and flags["openai.api_key"] == "secret"
    command = serve_command(tmp_path / "e.py", python="p", flags=flags)
    assert "--openai.base_url=http://h:1/v1" in command and command[3] == "serve"
    assert f"--env.total_steps={10**9}" in command  # neither 1000 nor the trainer's number
    assert serve_flags(engine_url="u", model="m", tokenizer="t", total_steps=5)[
        "env.total_steps"] == 5


def fake_python(folder: Path, output: str, status: int = 0) -> Path:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho '{output}'; echo '{output}' >&2; exit {status}\n")
    path.chmod(0o755)
    return path


def test_the_interpreter_is_checked(tmp_path, monkeypatch):
    python = fake_python(tmp_path, "0.4.0 4.57.6")
    assert environment_python(python) == python
    monkeypatch.setenv("GRPO_ATROPOS_PYTHON", str(python))
    assert environment_python() == python
    fake_python(tmp_path, "0.4.0 5.1.0")
    with pytest.raises(ValueError, match="transformers 5.1.0.*make atropos-env"):
        environment_python()
    fake_python(tmp_path, "PackageNotFoundError: atroposlib", 1)
    with pytest.raises(ValueError, match="PackageNotFoundError: atroposlib; run `make"):
        environment_python()
    monkeypatch.delenv("GRPO_ATROPOS_PYTHON")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="make atropos-env"):
        environment_python()
