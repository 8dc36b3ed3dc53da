"""Who listens at a port."""

from __future__ import annotations

import os
import socket

from grpo.system.ports import holder_of


def test_a_process_is_found_though_others_of_its_files_are_closed_meanwhile():
    # The list of a process's files has itself in it, here before the server's socket.
    lower = os.open("/dev/null", os.O_RDONLY)
    with socket.create_server(("127.0.0.1", 0)) as server:
        os.close(lower)
        assert f"process {os.getpid()} (" in holder_of(server.getsockname()[1])
