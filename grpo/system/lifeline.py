"""What a server that may be a child process needs: a socket, and to end when its parent does."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import socket
import subprocess
import threading

from grpo.system.ports import holder_of

TOKEN_VARIABLE = "GRPO_SERVER_TOKEN"
# Seconds between asking a process to end and ending it; vLLM takes up to ten.
GRACE = 20.0


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; port 0 takes a free one.

    Raises:
        OSError: naming the port, if it is taken or not ours to use.

    Examples:
        >>> with bind("127.0.0.1", 0) as sock:
        ...     sock.getsockname()[1] > 0
        True
    """
    if not 0 <= port < 1 << 16:
        raise OSError(errno.EINVAL, f"port {port} is none; choose one from 1 to 65535, or 0 for "
                      "any that is free")
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        holder = holder_of(port) if error.errno == errno.EADDRINUSE else None
        raise OSError(error.errno, f"port {port} of {host} cannot be used: {error.strerror}"
                      f"{f' by {holder}' if holder else ''}; choose another, or 0 for any that is "
                      "free") from error
    return sock


def leave_interrupts_to_parent() -> None:
    """Go on at Ctrl-C, which a terminal sends to all processes of a command.

    The parent decides what becomes of them: it may have a step to finish, and needs its engine for
    that. Without effect where the main program is, and outside of the main thread.
    """
    if (multiprocessing.parent_process() is not None
            and threading.current_thread() is threading.main_thread()):
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def exit_with_parent(*, grace: float = GRACE) -> None:
    """End this process and its group when standard input is closed: the parent has died. Between
    SIGTERM and SIGKILL they have ``grace`` seconds."""
    # Nobody else may read the pipe or hold it open.
    lifeline = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=_end_with, args=(lifeline, grace), daemon=True).start()


def _end_with(lifeline: int, grace: float) -> None:
    while os.read(lifeline, 4096):
        pass
    if os.getpgrp() == os.getpid():
        # SIGTERM may end this process, and with it this thread, before the workers have ended; so
        # somebody outside the group looks after them.
        arguments = [str(os.getpid()), str(int(10 * grace))]
        subprocess.Popen(["/bin/sh", "-c", _END_GROUP, "sh", *arguments], start_new_session=True)
    os.kill(os.getpid(), signal.SIGTERM)


# $1: the group, $2: tenths of a second that it may take to end.
_END_GROUP = """
while kill -s 0 -- -$1 2>/dev/null && [ $2 -gt 0 ]; do sleep 0.1; set -- $1 $(($2 - 1)); done
kill -s KILL -- -$1 2>/dev/null
"""
