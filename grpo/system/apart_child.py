"""The other side of :mod:`grpo.system.apart`: a process that has imported what calls need, and
forks one that makes them, and a keeper beside it, wherever a call is to be made.

The keeper ends all that the maker of calls has started, groups and sessions of their own included:
who loses its parent below the keeper becomes its child. It does so when the maker of calls ends,
and when the socket to the caller is closed, which the system does for a caller that is gone.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import pickle
import random
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, reduce
from pathlib import Path
from typing import Any

from grpo.system.processes import children

#: First bytes of packets: the maker of calls is there; more follows; the end of a message; the
#: process has ended, with its exit code. Packets arrive whole or not at all.
HELLO, MORE, END, ENDED = b"h", b"+", b".", b"!"
CHUNK = 1 << 16
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ASKED_TO_END = (signal.SIGTERM, signal.SIGHUP)
_ENDING = 10.0  # seconds that processes may take to be gone after SIGKILL


def packets(message: bytes) -> Iterator[bytes]:
    """A message in packets."""
    last = max(len(message) - 1, 0) // CHUNK
    for i in range(last + 1):
        yield (END if i == last else MORE) + message[i * CHUNK:(i + 1) * CHUNK]


def _main() -> None:
    control, options = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what becomes of a Ctrl-C
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers leave nothing to wait for
    os.dup2(2, 1)
    sys.path[:] = options["path"]
    for name in options["imports"]:
        with suppress(Exception):  # the call that needs it says so
            resolved(name)() if ":" in name else importlib.import_module(name)
    while True:
        message, (*connections,), *_ = socket.recv_fds(control, 1, 1)
        if not message:
            break
        if os.fork() == 0:
            control.close()
            _keep(socket.socket(fileno=connections[0]), options["memory"])
        os.close(connections[0])


def _keep(connection: socket.socket, memory: int | None) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Out of the caller's group: what ends that whole must leave somebody to end what calls started.
    os.setsid()
    for number in _ASKED_TO_END:
        signal.signal(number, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    maker = os.fork()
    if maker == 0:
        for number in _ASKED_TO_END:
            signal.signal(number, signal.SIG_DFL)
        try:
            _make_calls(connection, memory)
        finally:
            os._exit(0)
    watch = select.poll()
    watch.register(connection, select.POLLRDHUP)
    watch.register(os.pidfd_open(maker), select.POLLIN)
    watch.poll()
    ended = end_children()
    code = os.waitstatus_to_exitcode(ended.get(maker, 0))
    with suppress(OSError):
        connection.send(ENDED + str(code).encode())
    os._exit(0)


def _make_calls(connection: socket.socket, memory: int | None) -> None:
    os.setsid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(OSError):  # the first to go where the machine's memory ends
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory is not None:
        limit = _data_size() + memory
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    me = os.getpid()
    connection.send(HELLO)
    while request := _receive(connection):
        answer = _answer(request, memory)
        if os.getpid() != me:  # the function forked, and this is the copy
            os._exit(0)
        end_children()
        for packet in packets(answer):
            connection.send(packet)


def _receive(connection: socket.socket) -> bytes:
    message = b""
    while packet := connection.recv(CHUNK + 1):
        message += packet[1:]
        if packet[:1] == END:
            return message
    return b""


def _answer(request: bytes, memory: int | None) -> bytes:
    """Whether the call returned, what, and whether this process is of further use."""
    try:
        target, args, options, seconds, seed = pickle.loads(request)
        fn = resolved(target) if isinstance(target, str) else target
        if seed is not None:
            _seed(seed)
        # The system ends the process then, whatever holds the interpreter.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = pickle.dumps((True, fn(*args, **options), False))
    except BaseException as error:  # the caller is told of it
        answer = pickle.dumps((False, _told(error, memory), isinstance(error, MemoryError)))
    signal.setitimer(signal.ITIMER_PROF, 0)
    return answer


def _told(error: BaseException, memory: int | None) -> tuple[str, str, list[tuple]]:
    """Kind of an exception, its text, and where it was raised."""
    text = ""
    with suppress(Exception):  # somebody's own exception
        text = str(error)[:10_000]
    if isinstance(error, MemoryError) and memory is not None:
        text = f"{text or 'no more memory'}; its process may take {memory / 2**30:g} GiB"
    frames = [(frame.filename, frame.lineno, frame.name, frame.line)
              for frame in traceback.extract_tb(error.__traceback__)]
    return type(error).__name__, text, [frame for frame in frames if frame[0] != __file__]


@cache
def resolved(path: str) -> Callable[..., Any]:
    """What is at ``"package.module:name"``.

    Examples:
        >>> resolved("math:sqrt")(9)
        3.0
    """
    module, _, name = path.partition(":")
    return reduce(getattr, name.split("."), importlib.import_module(module))


def _seed(seed: int) -> None:
    """Of the generators that all code of a process shares."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


def end_children(*, timeout: float = _ENDING) -> dict[int, int]:
    """Kill all children of this process, and theirs as they come to it; their wait status."""
    ended, deadline = {}, time.monotonic() + timeout
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid:
            ended[pid] = status
            continue
        for child in children():
            with suppress(ProcessLookupError):
                if os.getpgid(child) == child:  # a group at once, before it forks again
                    os.killpg(child, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        if time.monotonic() > deadline:  # the system holds them
            return ended
        time.sleep(0.001)


def _data_size() -> int:
    """Bytes that count for RLIMIT_DATA."""
    line, = (line for line in Path("/proc/self/status").read_text().splitlines()
             if line.startswith("VmData"))
    return int(line.split()[1]) << 10


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    # As the module of its name, so that its functions are found there and not imported twice.
    importlib.import_module("grpo.system.apart_child")._main()
