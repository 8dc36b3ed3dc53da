"""The end of an engine: everything it had goes, and nothing that others use; and its beginning.

vLLM leaves three things to be desired. An engine that ends takes torch.distributed with it, which
all in-process engines, and perhaps a trainer, use too. A worker process that is killed leaves its
shared memory in ``/dev/shm`` until the interpreter that started it ends. And before 0.32 the front
end could wait for ever for its own message queues, which were collected with their sockets open.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

if TYPE_CHECKING:
    from vllm import LLM

# Names that Python's multiprocessing gives; anything else in the folder, such as a checkpoint that
# a worker has mapped, belongs to somebody.
_NAMED_BY_PYTHON = {"psm_": "shared_memory", "sem.mp-": "semaphore"}
_SHM = Path("/dev/shm")
# Seconds for a worker to end after vLLM has killed it.
_REAP = 5.0

# Engines whose model is in this process, and whether the first of them started torch.distributed.
_in_process: weakref.WeakSet[LLM] = weakref.WeakSet()
_distributed_is_theirs = False
# Shared memory of the workers of engines with processes of their own.
_shared_memory: weakref.WeakKeyDictionary[LLM, set[Path]] = weakref.WeakKeyDictionary()
# What the front end uses to talk with them.
_sockets: weakref.WeakKeyDictionary[LLM, list[Any]] = weakref.WeakKeyDictionary()
_rings: weakref.WeakKeyDictionary[LLM, list[Any]] = weakref.WeakKeyDictionary()


@contextmanager
def starting() -> Iterator[None]:
    """While vLLM starts an engine: torch.distributed is the engines' if it was not there before."""
    global _distributed_is_theirs
    _keep_distributed()
    _meet_at_a_file()
    before = torch.distributed.is_initialized()
    try:
        with _only_plain_sampling_tried():
            yield
    finally:
        if not before:
            _distributed_is_theirs = torch.distributed.is_initialized()


@contextmanager
def _only_plain_sampling_tried() -> Iterator[None]:
    """Have a starting engine try the sampling of policies alone.

    On a GPU vLLM tries all that it has, top-p, penalties and more, and compiles kernels of which no
    rollout makes use: 15 s of a start. Somebody who asks for them later waits then.
    """
    from vllm import SamplingParams

    tried = SamplingParams.__dict__.get("for_sampler_warmup")
    if tried is None:  # this vLLM has another way to warm up
        yield
        return
    SamplingParams.for_sampler_warmup = staticmethod(
        lambda: SamplingParams(temperature=0.9, logprobs=0))
    try:
        yield
    finally:
        SamplingParams.for_sampler_warmup = tried


def end_compile_workers() -> None:
    """End the processes that have compiled for this one; PyTorch starts new ones if needed.

    Without it those of a worker that a signal ends, as Ray's, live on for up to a minute.
    """
    # Without the module there are none, and it takes long to import.
    if compiling := sys.modules.get("torch._inductor.async_compile"):
        compiling.shutdown_compile_workers()


def remember(engine: LLM) -> None:
    """What :func:`stop_engine` will have to clear, while the engine can still tell."""
    workers = _workers(engine)
    if not workers:
        _in_process.add(engine)
    _shared_memory[engine] = set().union(*(shared_memory_of(worker.pid) for worker in workers))
    _sockets[engine], _rings[engine] = _sockets_to_workers(engine), _rings_of(engine)


def stop_engine(engine: LLM) -> None:
    """Stop an engine, whether or not its worker processes still live.

    Afterwards its processes are gone and so is their shared memory. The last engine without a
    process of its own also leaves torch.distributed, if such an engine had initialised it; until
    then the other engines of this process run on. Weights live on while somebody holds a view or a
    mapping of them.
    """
    _in_process.discard(engine)
    workers, left = _workers(engine), _shared_memory.pop(engine, set())
    engine.llm_engine.engine_core.shutdown()
    for worker in workers:
        worker.join(_REAP)
    for socket in _sockets.pop(engine, []):
        socket.close(linger=0)
    for ring in _rings.pop(engine, []):
        _remove_ring(ring)
    gc.collect()  # vLLM removes what this process made when the last reference goes
    for path in left:
        _unlink(path, tracked=workers[0]._start_method == "spawn")
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def shared_memory_of(pid: int) -> set[Path]:
    """Named shared memory that a process has mapped and that Python's multiprocessing made.

    Examples:
        >>> from multiprocessing.shared_memory import SharedMemory
        >>> import os
        >>> memory = SharedMemory(create=True, size=64)
        >>> Path("/dev/shm", memory.name) in shared_memory_of(os.getpid())
        True
        >>> memory.close(), memory.unlink()
        (None, None)
    """
    mapped = {Path(line.split(maxsplit=5)[5]) for line in
              Path(f"/proc/{pid}/maps").read_text().splitlines() if f" {_SHM}/" in line}
    # A file that was removed is shown with "(deleted)" behind its name.
    return {path for path in mapped if path.parent == _SHM and path.exists()
            and path.name.startswith(tuple(_NAMED_BY_PYTHON))}


def _keep_distributed() -> None:
    """Let vLLM destroy torch.distributed only when its last engine here ends, if it made it."""
    from vllm import envs
    from vllm.v1.engine import core

    clean_up = core.cleanup_dist_env_and_memory
    if clean_up.__name__ == "clean_up_after_the_last":
        return

    def clean_up_after_the_last() -> None:
        global _distributed_is_theirs
        if _distributed_is_theirs and not list(_in_process):
            clean_up()
            _distributed_is_theirs = False
        else:
            envs.disable_envs_cache()  # the rest of it that is not about distribution

    core.cleanup_dist_env_and_memory = clean_up_after_the_last


def _meet_at_a_file() -> None:
    """Let an engine's processes find each other by a file, as newer releases of vLLM do.

    Others choose a free port and open it a moment later, when another run may have it.
    """
    from vllm.utils import network_utils
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    if not hasattr(network_utils, "get_file_store_init_method"):
        for module in (multiproc_executor, uniproc_executor):
            module.get_distributed_init_method = lambda *_: (
                f"file://{tempfile.gettempdir()}/vllm_{uuid4().hex}")


def _workers(engine: LLM) -> list:
    """The processes of an engine's workers; none if its model is in this process."""
    executor = getattr(engine.llm_engine, "model_executor", None)
    return [worker.proc for worker in getattr(executor, "workers", ())]


def _queues(engine: LLM) -> list[Any]:
    """Between the front end and its workers."""
    executor = getattr(engine.llm_engine, "model_executor", None)
    queues = [getattr(executor, "rpc_broadcast_mq", None), *getattr(executor, "response_mqs", ())]
    return [queue for queue in queues if queue is not None]


def _rings_of(engine: LLM) -> list[Any]:
    """Shared memory of the queues that the front end has made."""
    rings = [getattr(queue, "buffer", None) for queue in _queues(engine)]
    return [ring for ring in rings if ring is not None and ring.is_creator]


def _remove_ring(ring: Any) -> None:
    """Remove a queue's shared memory now, and not when the last reference goes: an exception that
    is on its way holds one, and vLLM would complain of the missing file with a traceback."""
    ring.is_creator = False
    with suppress(FileNotFoundError):
        ring.shared_memory.unlink()


def _sockets_to_workers(engine: LLM) -> list[Any]:
    """ZeroMQ sockets of the queues."""
    owners = _queues(engine)
    owners += [queue._spin_condition for queue in owners if queue._spin_condition is not None]
    found = [getattr(owner, name, None) for owner in owners for name in (
        "local_socket", "remote_socket", "local_notify_socket", "read_cancel_socket",
        "write_cancel_socket")]
    return [socket for socket in found if socket is not None]


def _unlink(path: Path, *, tracked: bool) -> None:
    if not path.exists():
        return
    path.unlink()
    if tracked:  # else the tracker would warn of a leak when this interpreter ends
        prefix = next(prefix for prefix in _NAMED_BY_PYTHON if path.name.startswith(prefix))
        resource_tracker.unregister(f"/{path.name.removeprefix('sem.')}", _NAMED_BY_PYTHON[prefix])
