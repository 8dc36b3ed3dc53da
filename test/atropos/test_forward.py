"""Forwarded ports: answers stream through them, they hold little, and they end with the run."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading

import pytest

from grpo.atropos.forward import PortForwarder
from grpo.policies.client import EngineClient

from ..server.serving import server
from ..support import free_port, wait_until


@pytest.fixture(scope="module")
def served():
    with server() as (engine, client):
        yield engine, client


@pytest.fixture
def forwarded(served):
    """The engine behind two more ports."""
    engine, client = served
    with PortForwarder([0, 0], client.url) as forwarder:
        yield engine, forwarder


def ask(port, body, path="/generate"):
    connection = http.client.HTTPConnection("localhost", port, timeout=10)
    connection.request("POST", path, json.dumps(body))
    return connection


def test_every_port_leads_to_the_engine(forwarded):
    _, forwarder = forwarded
    for port in forwarder.ports:
        client = EngineClient(f"http://localhost:{port}", timeout=10)
        assert client.alive() and client.generate([[5, 6]], max_tokens=3)[0].tokens
    assert forwarder.connections == 4


def test_pieces_come_as_the_engine_sends_them_and_a_client_that_leaves_frees_it(forwarded):
    engine, forwarder = forwarded
    before = len(engine.aborted)
    connection = ask(forwarder.ports[0], {"prompt": [5], "max_tokens": 10_000, "stream": True})
    answer = connection.getresponse()
    assert json.loads(answer.readline())["token_ids"]  # long before the last of them
    assert engine.running
    answer.close()
    connection.close()
    wait_until(lambda: not engine.running)
    assert len(engine.aborted) == before + 1


def test_one_that_does_not_read_holds_up_the_sender():
    """What is on the way is what sockets and two small buffers hold, not the answer."""
    sent, piece, most = [0], b"x" * (1 << 16), 2048
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def send_much():
            connection, _ = listener.accept()
            connection.settimeout(1.0)
            with connection:
                try:
                    for _ in range(most):
                        connection.sendall(piece)
                        sent[0] += len(piece)
                except TimeoutError:
                    pass

        thread = threading.Thread(target=send_much)
        thread.start()
        with PortForwarder([0], f"http://127.0.0.1:{listener.getsockname()[1]}") as forwarder, \
                socket.create_connection(("127.0.0.1", forwarder.ports[0])) as client:
            client.sendall(b"GET / HTTP/1.1\r\n\r\n")
            thread.join(30)
    assert 0 < sent[0] < most * len(piece) // 4


def test_more_connections_than_are_allowed_are_told_so(served):
    _, client = served
    with PortForwarder([0], client.url, max_connections=2) as forwarder:
        (port,) = forwarder.ports
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
        wait_until(lambda: forwarder.connections == 2)
        answer = ask(port, {"prompt": [5]}).getresponse()
        assert answer.status == 503
        assert "2 connections are open" in json.loads(answer.read())["error"]["message"]
        for connection in held:
            connection.close()
        wait_until(EngineClient(f"http://127.0.0.1:{port}").alive)


def test_an_engine_that_is_not_there_yet_is_waited_for_by_asking_again():
    port = free_port()
    with PortForwarder([0], f"http://127.0.0.1:{port}") as forwarder:
        answer = ask(forwarder.ports[0], {"prompt": [5]}).getresponse()
        assert answer.status == 503
        assert f"the engine at http://127.0.0.1:{port} does not answer" in json.loads(
            answer.read())["error"]["message"]


def test_all_of_it_ends_with_the_run(served):
    _, client = served
    with PortForwarder([0], client.url) as forwarder:
        (port,) = forwarder.ports
        held = ask(port, {"prompt": [5], "max_tokens": 10_000_000, "stream": True})
        answer = held.getresponse()
        answer.readline()
    with pytest.raises(http.client.HTTPException):
        answer.read()
    with socket.create_server(("127.0.0.1", port)):
        pass  # it is free again
    forwarder.stop()
    assert not any(thread.name == "port-forwarder" for thread in threading.enumerate())


def test_ports_that_cannot_be_are_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} of 127.0.0.1 cannot be forwarded: Address"):
            PortForwarder([0, port], "http://127.0.0.1:9001")
    with pytest.raises(ValueError, match="port 9001 is that of the engine itself"):
        PortForwarder([9001], "http://localhost:9001")
    with pytest.raises(ValueError, match="port 7 is named twice"):
        PortForwarder([7, 7], "http://localhost:9001")
    with pytest.raises(ValueError, match="max_connections=0"):
        PortForwarder([0], "http://localhost:9001", max_connections=0)


def test_the_command_forwards_until_it_is_told_to_end(served):
    _, client = served
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "grpo.atropos.forward", "--to", client.url, str(port)],
        stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == f"the ports {port} lead to {client.url}\n"
        assert EngineClient(f"http://127.0.0.1:{port}").alive()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
