"""Child processes: started on a free port, watched, and ended with everything they started."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import orjson
import pytest

from grpo.policies.client import EngineClient, EngineTimeoutError, EngineUnreachableError
from grpo.server.engine_process import EngineProcess, EngineStartError, bind, server_command

from ..support import REPO, runs, wait_until

# A server that answers every GET, on the socket it inherited.
SERVER = """
    import http.server, os, socket, subprocess, sys, time
    sock = socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = ('{"token": "%s"}' % os.environ.get("GRPO_SERVER_TOKEN")).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
    def serve():
        server = http.server.HTTPServer(sock.getsockname(), Handler, bind_and_activate=False)
        server.socket = sock
        server.server_activate()
        server.serve_forever()
"""


def child(script, **options):
    code = textwrap.dedent(SERVER) + textwrap.dedent(script)
    return EngineProcess([sys.executable, "-c", code], **{"start_timeout": 20.0, **options})


def ended(*pids):
    wait_until(lambda: not any(map(runs, pids)), seconds=5.0)


def line_of(process, marker):
    """What follows a word in the process's output, as soon as it is there."""
    return wait_until(lambda: [line.removeprefix(marker).strip() for line in process.last_lines()
                               if line.startswith(marker)])[0]


def test_server_is_ready_on_a_free_port_with_its_token_and_ends_on_exit(tmp_path):
    with child("serve()", token="secret", log_path=tmp_path / "deep" / "log") as server:
        assert server.port > 0 and server.alive()
        assert server.client().call("GET", "/") == {"token": "secret"}
        pid = server.pid
        with pytest.raises(RuntimeError, match="started already"):
            server.start()
    ended(pid)
    assert not server.alive()
    server.stop()  # a second time: nothing to do
    with pytest.raises(RuntimeError, match="not running"):
        _ = server.pid


def test_two_servers_get_different_ports():
    with child("serve()") as one, child("serve()") as two:
        assert one.port != two.port


def test_a_stopped_server_can_be_started_again(tmp_path):
    server = child("serve()", log_path=tmp_path / "log")
    for _ in range(2):
        with server:
            assert server.client().alive()


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} of 127.0.0.1.*choose another"):
            child("serve()", port=port).start()
        with pytest.raises(OSError, match=str(port)):
            bind("127.0.0.1", port)


def test_a_crash_shows_the_last_lines():
    server = child("""
        for i in range(100): print("line", i)
        raise SystemExit("no such model")
    """)
    with pytest.raises(EngineStartError) as info, server:
        pass
    assert "exit code 1" in str(info.value) and "| no such model" in str(info.value)
    assert "| line 99" in str(info.value) and "| line 5\n" not in str(info.value)
    assert not server.alive()


def test_a_signal_is_named():
    with pytest.raises(EngineStartError, match="signal SIGSEGV"), child(
            "os.kill(os.getpid(), 11)"):
        pass


@pytest.mark.slow
def test_a_server_that_never_gets_ready_is_ended_at_the_deadline():
    server = child("print('loading', os.getpid(), flush=True); time.sleep(600)", start_timeout=3.0)
    started = time.monotonic()
    with pytest.raises(EngineStartError, match="waited 3 s for http://127.0.0.1.*/health") as info:
        with server:
            pass
    assert time.monotonic() - started < 8
    pid = int(str(info.value).split("loading ")[1].split()[0])
    ended(pid)


@pytest.mark.slow
def test_a_server_that_accepts_and_says_nothing_is_not_ready():
    with pytest.raises(EngineStartError, match="waited 3 s"), child(
            "sock.listen(); time.sleep(600)", start_timeout=3.0):
        pass


def test_a_crash_later_is_reported_with_its_log():
    with child("print('fine so far', flush=True); serve()") as server:
        os.kill(server.pid, signal.SIGKILL)
        ended(server.pid)
        with pytest.raises(RuntimeError, match="signal SIGKILL") as info:
            server.check()
        assert "fine so far" in str(info.value)


def test_stop_kills_what_ignores_the_request_to_end():
    server = child("""
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        serve()
    """)
    with server:
        pid = server.pid
        started = time.monotonic()
        server.stop(timeout=0.3)
    ended(pid)
    assert time.monotonic() - started < 5


WORKER = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid"


def test_stop_ends_workers_too_even_if_the_server_is_dead_already():
    for kill_first in (False, True):
        with child(f"print('worker', {WORKER}, flush=True); serve()") as server:
            worker = int(line_of(server, "worker"))
            if kill_first:
                os.kill(server.pid, signal.SIGKILL)
                ended(server.pid)
                time.sleep(0.1)
                assert runs(worker)
        ended(worker)


@pytest.mark.parametrize("end", ["server killed", "server and worker ignore the request"])
def test_shared_memory_of_a_killed_group_is_removed(end):
    """Python's resource tracker, a member of the group, removes it, so it must end last."""
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" if (
        "ignore" in end) else "pass"
    with child(f"""
        def work(lock):
            {ignore}
            memory = SharedMemory(create=True, size=64)
            print("memory", memory.name, flush=True)
            time.sleep(600)

        from multiprocessing import get_context
        from multiprocessing.shared_memory import SharedMemory
        {ignore}
        context = get_context("fork")
        mine = SharedMemory(create=True, size=64)
        worker = context.Process(target=work, args=(context.Lock(),))
        worker.start()
        print("mine", mine.name, flush=True)
        print("worker", worker.pid, flush=True)
        serve()
    """) as server:
        names = [line_of(server, "memory"), line_of(server, "mine")]
        worker = int(line_of(server, "worker"))
        assert all(os.path.exists(f"/dev/shm/{name}") for name in names)
        if end == "server killed":
            os.kill(server.pid, signal.SIGKILL)
            ended(server.pid)
        server.stop(timeout=0.3)
        assert not any(os.path.exists(f"/dev/shm/{name}") for name in names)
        ended(worker)


def test_processes_that_we_did_not_start_live_on():
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with child("serve()"):
            pass
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "exit"])
def test_the_server_and_its_workers_end_with_the_parent(tmp_path, end):
    """Killed, the parent can do nothing: its child sees standard input close."""
    server = textwrap.dedent(SERVER) + textwrap.dedent(f"""
        from grpo.system.lifeline import exit_with_parent
        exit_with_parent(grace=0.5)
        print('worker', {WORKER}, flush=True)
        serve()
    """)
    parent = tmp_path / "parent.py"
    parent.write_text(textwrap.dedent(f"""
        import os, sys, time
        from grpo.server.engine_process import EngineProcess
        server = EngineProcess([sys.executable, "-c", {server!r}],
                               log_path={str(tmp_path / 'log')!r}, start_timeout=20)
        server.start()
        server.wait_ready()
        print(server.pid, flush=True)
        {"time.sleep(600)" if end == "kill" else "sys.exit()"}
    """))
    with subprocess.Popen([sys.executable, str(parent)], stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "PYTHONPATH": os.getcwd()}) as process:
        pid = int(process.stdout.readline())
        worker = int((tmp_path / "log").read_text().split("worker ")[1].split()[0])
        if end == "kill":
            time.sleep(0.2)
            assert runs(pid)
            process.kill()
    ended(pid, worker)


def test_client_says_who_is_not_there_and_keeps_its_deadline():
    with bind("127.0.0.1", 0) as sock:
        client = EngineClient(f"http://127.0.0.1:{sock.getsockname()[1]}")
        assert not client.alive()
        with pytest.raises(EngineUnreachableError, match="is the server running"):
            client.info()
        sock.listen()
        started = time.monotonic()
        with pytest.raises(EngineTimeoutError, match="GET http.*no answer in 0.2 s"):
            client.call("GET", "/bridge/info", timeout=0.2)
        assert time.monotonic() - started < 2


def test_client_deadline_holds_for_an_answer_that_drips():
    script = """
        class Drip(Handler):
            def do_GET(self):
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                while True:
                    self.wfile.write(b" ")
                    self.wfile.flush()
                    time.sleep(0.05)
        Handler = Drip
        serve()
    """
    server = child(script)
    server.start()
    try:
        client = server.client(timeout=0.5)
        wait = time.monotonic() + 20
        while time.monotonic() < wait:  # until it listens
            started = time.monotonic()
            try:
                client.info()
            except EngineTimeoutError:
                break
            except EngineUnreachableError:
                time.sleep(0.05)
        assert 0.4 < time.monotonic() - started < 2
    finally:
        server.stop()


@pytest.mark.parametrize("size", [0, 5, 300_000])
def test_client_reads_answers_that_pythons_since_3_12_3_close_early(monkeypatch, size):
    """They close the socket with the last piece; here any Python does."""
    read1 = http.client.HTTPResponse.read1

    def closing_read1(response, n=-1):
        piece = read1(response, n)
        if response.length == 0:
            response.close()
        return piece

    monkeypatch.setattr(http.client.HTTPResponse, "read1", closing_read1)
    answer = orjson.dumps({"padding": "x" * size})
    server = child(f"""
        class Answer(Handler):
            def do_GET(self):
                self.send_response(200)
                self.send_header("Content-Length", {len(answer)})
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write({answer[:12]!r} + b"x" * {size} + {answer[-2:]!r})
        Handler = Answer
        serve()
    """)
    with server:
        assert server.client(timeout=10).info() == {"padding": "x" * size}


@pytest.mark.parametrize("url", ["127.0.0.1:80", "https://a:1", "http://a", "http://a:1/v1"])
def test_client_refuses_other_addresses(url):
    with pytest.raises(ValueError, match="http://host:port"):
        EngineClient(url)


def test_server_command_leaves_out_what_is_not_set():
    command = server_command("m", dtype="float32", enforce_eager=False, max_loras=None)
    assert command[3:] == ["--model", "m", "--dtype", "float32"]


def test_workers_go_on_when_a_terminal_interrupts_all_processes_of_a_command(tmp_path):
    script = tmp_path / "command.py"
    script.write_text(textwrap.dedent("""
        import multiprocessing, os, signal
        from grpo.system.lifeline import leave_interrupts_to_parent

        def work():
            leave_interrupts_to_parent()
            os.kill(os.getpid(), signal.SIGINT)
            print("went on", flush=True)

        if __name__ == "__main__":
            # Jobs that a shell has put into the background begin without it.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            worker = multiprocessing.get_context("spawn").Process(target=work)
            worker.start()
            worker.join(60)
            leave_interrupts_to_parent()  # the main program's are its own
            os.kill(os.getpid(), signal.SIGINT)
        """))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(REPO)}, timeout=120)
    assert done.stdout == "went on\n" and done.stderr.endswith("KeyboardInterrupt\n")
