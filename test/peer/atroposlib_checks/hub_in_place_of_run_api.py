"""A pytest plugin: what atroposlib's tests start as ``run-api`` on port 8000 is our hub elsewhere.

``GRPO_PEER_PYTHON`` is the Python that has the hub, ``GRPO_PEER_REPO`` the folder it is found in.
"""

from __future__ import annotations

import os
import socket
import subprocess

import requests

THEIRS = "http://localhost:8000"
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    PORT = free.getsockname()[1]
started, asked = [], []
Popen, request = subprocess.Popen, requests.Session.request


class HubInPlaceOfRunApi(Popen):
    """Starts the hub with the options that were meant for ``run-api``, but for the port."""

    def __init__(self, command, *args, **options):
        if "atroposlib.cli.run_api" in command:
            place = command.index("atroposlib.cli.run_api")
            command = [os.environ["GRPO_PEER_PYTHON"], "-m", "grpo.atropos.hub_server",
                       *command[place + 1:]]
            command[command.index("8000")] = str(PORT)
            options["cwd"] = os.environ["GRPO_PEER_REPO"]
            started.append(command)
        super().__init__(command, *args, **options)


def elsewhere(session, method, url, *args, **options):
    assert url.startswith(THEIRS), url
    response = request(session, method, url.replace(THEIRS, f"http://localhost:{PORT}"),
                       *args, **options)
    asked.append(url)
    return response


subprocess.Popen = HubInPlaceOfRunApi
requests.Session.request = elsewhere


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"hubs started: {len(started)}, requests: {len(asked)}")
