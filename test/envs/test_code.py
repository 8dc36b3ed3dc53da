"""The reward for programs: tests, limits, and what programs are kept from."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from pathlib import Path

import pytest

from grpo import data
from grpo.envs.rewards import RewardScorer, get_reward
from grpo.envs.rewards.code import code, program_in
from grpo.envs.rewards.registry import with_options
from grpo.envs.tasks import Problem
from grpo.system import sandbox
from grpo.system.sandbox import Finished, missing_isolation, run_python

from ..support import with_variable

SUM = [{"input": "2 3\n", "output": "5\n"}, {"input": "1 1", "output": "2"}]


def problem(tests=SUM):
    return Problem(prompt="Add.", answer=json.dumps(tests), id="p0")


def block(program: str) -> str:
    return f"So:\n```python\n{program}\n```\nDone."


def run(program: str, given: str = "", *, seconds: float = 4.0, memory: int = 1 << 29):
    return run_python(program, given, seconds=seconds, memory=memory, file_size=1 << 20,
                      without=tuple(missing_isolation()))


needs = {name: pytest.mark.skipif(name in missing_isolation(), reason=f"no isolation of {name} "
                                  f"here: {missing_isolation().get(name)}")
         for name in sandbox.ISOLATIONS}


@pytest.mark.parametrize(("completion", "reward"), [
    (block("print(sum(map(int, input().split())))"), 1.0), (block("print('5  ')\nprint()"), 0.5),
    (block("print(5); raise SystemExit(1)"), 0.0), (block("this is no Python"), 0.0),
    ("print(5)", 0.0), ("```python\nprint(5)", 0.0), ("", 0.0)])
def test_the_reward_is_the_share_of_tests_that_pass(completion, reward):
    found = code(completion, problem(), unsafe=True)
    assert found == (reward, reward == 1)


@pytest.mark.parametrize("tests", [[], [{"input": "1"}], [{"input": 1, "output": "1"}], 7, "x"])
def test_problems_without_tests_are_named(tests):
    with pytest.raises(ValueError, match="'p0' has no tests: its answer must be a JSON list"):
        code(block("print(1)"), problem(tests))


def test_the_last_whole_block_is_the_program():
    assert program_in("```python\na\n``` ```python\nb") == "a\n"
    assert program_in("```python\n" + "``" * 400_000) == ""
    assert program_in("```python\n" * 100_000) == ""
    assert program_in("```python\n" + "` " * 9) is None


@pytest.mark.slow
@pytest.mark.parametrize("program", [
    "while True: pass", "import time; time.sleep(60)", "9**9**9", "print('x' * (1 << 29))",
    "bytearray(20 << 30)",
    "import os\nwith open('big', 'wb') as file:\n    while True: file.write(b'0' * (1 << 20))",
    "import os; os.abort()", "import ctypes; ctypes.string_at(0)", "def f(): f()\nf()",
    "import sys; sys.setrecursionlimit(1 << 30)\ndef f(): f()\nf()"])
def test_a_program_ends_within_its_limits(program):
    started = time.monotonic()
    done = run(program, seconds=1)
    assert done.code != 0 and time.monotonic() - started < 20
    assert len(done.output) <= 1 << 20


def test_a_program_sees_neither_variables_nor_modules_of_the_run(monkeypatch):
    monkeypatch.setenv("A_SECRET_KEY", "7")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    done = run("import os, sys; print('A_SECRET_KEY' in os.environ, sys.flags.isolated)")
    assert done.output == "False 1\n"


@needs["network"]
def test_a_program_reaches_no_server(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5); print('in')"
        assert run(program).code == 1
        assert run_python(program, "", seconds=4, memory=1 << 29, file_size=1 << 20,
                          without=sandbox.ISOLATIONS).output == "in\n"


@needs["files"]
def test_a_program_reads_and_writes_in_its_folder_alone(tmp_path):
    for path in (tmp_path / "new", Path("/tmp/grpo-test-of-code"), Path("/dev/shm/grpo-test")):
        assert run(f"open({str(path)!r}, 'w').write('x')").code == 1
        assert not path.exists()
    (tmp_path / "secret").write_text("7")
    for program in (f"print(open({str(tmp_path / 'secret')!r}).read())",
                    f"import os; os.remove({str(tmp_path / 'secret')!r})",
                    f"import os; os.truncate({str(tmp_path / 'secret')!r}, 0)",
                    f"import os; os.rename({str(tmp_path / 'secret')!r}, 'mine')"):
        assert run(program).code == 1
    assert (tmp_path / "secret").read_text() == "7"
    assert run("open('own', 'w').write('x'); print(open('own').read())").output == "x\n"


@needs["processes"]
def test_a_program_reaches_no_socket_by_its_path(tmp_path):
    path = tempfile.mktemp(dir="/tmp", prefix="grpo-test-")  # short, as such paths must be
    with socket.socket(socket.AF_UNIX) as server, socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM) as box:
        server.bind(path)
        server.listen()
        box.bind(path + "d")
        for program in (f"s = socket.socket(socket.AF_UNIX); s.connect({path!r})",
                        "a, b = socket.socketpair(type=socket.SOCK_DGRAM); "
                        f"a.sendto(b'x', {path + 'd'!r})"):
            assert run_python(f"import socket; {program}; print('in')", "", seconds=4,
                              memory=1 << 29, file_size=1 << 20,
                              without=sandbox.ISOLATIONS).output == "in\n"
            assert run(f"import socket; {program}").code == 1, program
    os.unlink(path)
    os.unlink(path + "d")
    assert run("import asyncio; asyncio.run(asyncio.sleep(0)); print('ran')").output == "ran\n"


@needs["processes"]
def test_a_program_changes_nothing_about_files_outside(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("7")
    libc = "done = ctypes.CDLL(None).syscall"
    changes = ["os.chmod(path, 0o644)", "os.chown(path, -1, -1)", "os.utime(path)",
               "os.listxattr(path)", "os.chmod(f'/proc/self/fd/{opened}', 0o644)",
               f"{libc}(452, -100, path.encode(), 0o644, 0)", f"{libc}(425, 8, bytes(120))"]
    program = ("import ctypes, os\n"
               f"path = {str(secret)!r}\nopened, done = os.open(path, os.O_PATH), 0\n"
               f"for number, change in enumerate({changes!r}):\n"
               "    try:\n        exec(change)\n        assert done >= 0\n"
               "        print(number)\n    except (OSError, AssertionError): pass\n")
    free = run_python(program, "", seconds=4, memory=1 << 29, file_size=1 << 20,
                      without=sandbox.ISOLATIONS)
    assert {"0", "1", "2", "3", "4"} <= set(free.output.split())  # the rest are of new systems
    assert run(program) == Finished("", 0)


@needs["processes"]
def test_a_program_starts_threads_but_no_processes():
    for program in ("import os; os.fork()", "import subprocess; subprocess.run(['/bin/true'])",
                    "import multiprocessing as m; p = m.Process(target=print); p.start()"):
        assert run(program).code == 1, program
    done = run("import threading\nthread = threading.Thread(target=lambda: print('thread'))\n"
               "thread.start(); thread.join()")
    assert done.output == "thread\n"


def test_what_an_allowed_process_leaves_is_ended(monkeypatch):
    if "network" in missing_isolation():
        pytest.skip("no process namespaces here")
    mark = f"GRPO_CODE_TEST_{os.getpid()}"
    done = run_python(
        f"import os, time; os.environ[{mark!r}] = '1'\n"
        "os.fork() or os.setsid() or os.fork() or (os.execv('/bin/sleep', ['sleep', '60']))\n"
        "time.sleep(0.2)", "", seconds=4, memory=1 << 29, file_size=1 << 20,
        without=("processes", "files"))
    assert done.code == 0 and not with_variable(mark, "1")


def test_a_late_program_is_ended_wherever_it_went():
    mark = f"GRPO_CODE_TEST_{os.getpid()}"
    done = run("import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 0, 0, 0, 0); os.setsid()\n"
               f"os.environ[{mark!r}] = '1'; os.execv(sys.executable, "
               "[sys.executable, '-c', 'import time; time.sleep(60)'])", seconds=0.5)
    left = with_variable(mark, "1")
    assert done.code is None and not left


def test_without_isolation_it_is_refused(monkeypatch):
    monkeypatch.setattr("grpo.envs.rewards.code.missing_isolation",
                        lambda: {"network": "not permitted"})
    with pytest.raises(ValueError, match=r"cannot keep it from: network \(not permitted\)"):
        with_options(get_reward("code"), {})
    with_options(get_reward("code"), {"unsafe": True})


@pytest.mark.parametrize("name", ["seconds", "total_seconds", "memory", "file_size"])
@pytest.mark.parametrize("value", [0, -1.0, 1e-6, float("nan"), float("inf"), "20", None, True])
def test_limits_within_which_no_program_is_right_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r}.*(at least|valid number)"):
        with_options(get_reward("code"), {"unsafe": True, name: value})


def test_the_least_limits_are_enough_for_a_program_that_is_right():
    least = {"memory": 0.0625, "file_size": 0.001}
    fn = with_options(get_reward("code"), {"unsafe": True, **least})
    assert fn(block("print(sum(map(int, input().split())))"), problem()).success


@pytest.mark.slow
def test_programs_are_scored_in_processes():
    texts = [block("print(sum(map(int, input().split())))"), block("while True: pass"), ""]
    fn = with_options(get_reward("code"), {"unsafe": True, "seconds": 1.0, "total_seconds": 4.0})
    scorer = RewardScorer([(fn, 1.0)], workers=2)
    batch = scorer(texts, [problem()] * 3)
    assert batch.reward.tolist() == [1.0, 0.0, 0.0] and not batch.error.any(), batch.messages
    broken = scorer([texts[0]], [Problem(prompt="", answer="", id="p1")])
    assert broken.fault.tolist() == [data.FAULT_FAILED] and "has no tests" in broken.messages[0]
