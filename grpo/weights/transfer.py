"""New weights for an engine with memory of its own: another GPU, another process, many workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from grpo.policies.handle import PauseMode
from grpo.system.threads import in_background
from grpo.weights.channel import Deadline, TransferError
from grpo.weights.fingerprint import ALL, Part, fingerprints
from grpo.weights.gather import Tell, TrainerRanks, tell_nobody
from grpo.weights.layout import engine_layout
from grpo.weights.shared import WeightSync
from grpo.weights.transports import DirectPath, MappedPath, WrittenPath
from grpo.weights.worker.receiver import part_of, pieces_of

if TYPE_CHECKING:
    from grpo.policies.handle import EngineHandle

TransferBackend = Literal["nccl", "gloo", "ipc"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_CONNECT = ("nothing was sent and the engine runs on with its old weights; see that its workers "
            "can reach host, then publish again")
_RETRY = ("if it still runs, the engine stays paused because its weights may be partly new: "
          "publish again, or restart it from a checkpoint")


class WeightTransfer(WeightSync):
    """Send the trainer's parameters to an engine's workers.

    Each parameter is broadcast straight into its rows of vLLM's fused tensor, without a second copy
    on either side. A worker of a tensor-parallel engine receives whole parameters, a bucket at a
    time, and keeps its shard.

    A trainer sharded by FSDP2 calls every method on all ranks. Rank 0 sends a bucket while the next
    is gathered, so that no more than three exist beside the shards. The gathering's deadline is
    that of the trainer's own process group.

    An update: pause the engine, send, reset its prefix cache, count the version, resume. If sending
    fails the engine stays paused, because its weights may be partly new.

    No pickle crosses the network: the control messages are JSON, the rendezvous carries addresses,
    the data are the tensors' bytes.

    Args:
        model: the trainer's; parameters may be ``DTensor`` shards and of another float type than
            the engine's, to which they are then rounded.
        engine: where to send; None on every rank but 0.
        backend: ``nccl`` between GPUs; ``ipc`` where trainer and engine may map each other's
            memory (one host, also one GPU; ranks of a sharded trainer on the GPUs of the engine's
            workers); ``gloo`` for engines on a CPU.
        bucket_bytes: parameters in flight at a time.
        host: interface of the trainer that the workers connect to.
        pause_mode: what happens to running requests: ``keep`` lets them go on with the new weights,
            ``wait`` finishes them first, ``abort`` ends them.
        timeout: seconds for connecting or for one update.
        version: updates published before.
        tell: the other ranks of a sharded trainer to call the same method, where they follow.

    Raises:
        LayoutError: naming parameters that are missing, left over or of another shape on the other
            side; before anything is sent.
        ValueError: for options that exclude each other.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: EngineHandle | None,
        *,
        backend: TransferBackend = "nccl",
        bucket_bytes: int = 512 << 20,
        host: str = "127.0.0.1",
        pause_mode: PauseMode = "keep",
        timeout: float = 300.0,
        version: int = 0,
        tell: Tell = tell_nobody,
    ) -> None:
        check_option("backend", backend, TransferBackend)
        check_option("pause_mode", pause_mode, PauseMode)
        if bucket_bytes <= 0 or timeout <= 0:
            raise ValueError(f"bucket_bytes={bucket_bytes} and timeout={timeout} must be positive")
        self.model, self.engine, self.version = model, engine, version
        self.backend, self.bucket_bytes, self.host = backend, bucket_bytes, host
        self.pause_mode, self.timeout, self.tell = pause_mode, timeout, tell
        self.trainer = TrainerRanks(model)
        self.device = self.trainer.device
        if backend == "nccl" and self.device.type != "cuda":
            raise ValueError(f"backend='nccl' sends from GPU to GPU, but the model is on "
                             f"{self.device}; use backend='gloo'")
        # Ranks that share the engine's GPUs write into its memory, each on its own.
        self._all_ranks_send = backend == "ipc" and self.trainer.count > 1
        self._path: Any = None
        self.workers, self.plan = agreed_plan(model, self.trainer, engine, timeout=timeout)

    def publish(self, *, now: bool = False) -> int:
        """Give the engine the trainer's current weights and return the new version.

        Raises:
            TransferError: at the deadline, naming what was waited for, or with the engine's error.
        """
        deadline = Deadline(self.timeout, f"publishing weights {self.version + 1}", fix=_CONNECT)
        with (self.tell("publish", self.version), self.trainer.agreed(),
              ExitStack() as after_a_failure):
            after_a_failure.callback(self.close)
            if self._all_ranks_send:
                self._write(deadline)
            elif self.trainer.leads:
                self._publish(deadline)
            else:
                list(self._gathered())  # empty; takes part in the gathering
            after_a_failure.pop_all()
            self.version += 1
        return self.version

    def differing(self, part: Part = ALL) -> list[str]:
        """See :meth:`WeightSync.differing`; by fingerprint, on rank 0."""
        return self.begin_differing(part)()

    def begin_differing(self, part: Part = ALL) -> Callable[[], list[str]]:
        """See :meth:`WeightSync.begin_differing`.

        What the trainer has is hashed as it lies in its own memory, not as it was sent.
        """
        with self.tell("differing", part):
            if not self.trainer.leads:
                none = list(self._gathered(part=part))  # takes part in the gathering
                return lambda: none
            plan = part.choose(self.plan)
            return begin_comparison(self._gathered(plan, part), self.engine, plan, self.workers,
                                    timeout=self.timeout)

    def close(self) -> None:
        """Leave the connection; the next :meth:`publish` makes a new one."""
        if self._path is not None:
            self._path.close()
        self._path = None

    # -- one update --------------------------------------------------------------------------------

    def _publish(self, deadline: Deadline) -> None:
        wholes = self._gathered()
        try:
            self._connect(deadline)
            deadline.fix = _RETRY
            self._pause(deadline)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # the optimizer's writes
            self._path.send(wholes, deadline)
        finally:
            if self.trainer.count > 1:
                for _ in wholes:  # the other ranks gather all parameters, whatever happens here
                    pass
        go_on(self.engine, self.version + 1, deadline)

    def _write(self, deadline: Deadline) -> None:
        """As :meth:`_publish`, by all ranks together."""
        self._connect(deadline)
        deadline.fix = _RETRY
        with self.trainer.agreed():
            if self.trainer.leads:
                self._pause(deadline)
        self._path.send()
        if self.trainer.leads:
            go_on(self.engine, self.version + 1, deadline)

    def _pause(self, deadline: Deadline) -> None:
        start = time.perf_counter()
        self.engine.pause(self.pause_mode, timeout=deadline.left("the engine to pause"))
        if self.pause_mode == "wait":
            self.waited = time.perf_counter() - start

    def _connect(self, deadline: Deadline) -> None:
        if self._path is not None:
            return
        if self._all_ranks_send:
            self._path = WrittenPath(self.model, self.trainer, self.engine, plan=self.plan,
                                     workers=self.workers, deadline=deadline)
        elif self.backend == "ipc":
            self._path = MappedPath(self.model, self.engine, self.plan, workers=len(self.workers),
                                    deadline=deadline)
        else:
            self._path = DirectPath(self.model, self.engine, self.plan, transport=self.backend,
                                    host=self.host, workers=len(self.workers),
                                    bucket_bytes=self.bucket_bytes, deadline=deadline)

    @torch.no_grad()
    def _gathered(self, plan: list[dict[str, Any]] | None = None, part: Part = ALL
                  ) -> Iterator[Tensor]:
        """Whole parameters, on every rank, one at a time; on rank 0 in the types of ``plan``."""
        named = part.choose(self.model.named_parameters())
        for number, (_, whole) in enumerate(self.trainer.whole(named)):
            if self.trainer.leads:
                dtype = getattr(torch, (plan or self.plan)[number]["dtype"])
                yield whole.to(dtype).contiguous()


def go_on(engine: EngineHandle, version: int, deadline: Deadline) -> None:
    """Let a paused engine generate with the weights that it has been given."""
    if not engine.go_on(version, timeout=deadline.left("the engine to go on")):
        raise TransferError(
            f"{deadline.doing}: the weights are there, but the engine refused to reset its "
            "prefix cache because requests still run; use pause_mode='wait' or 'abort'")


def begin_comparison(
    wholes: Iterator[Tensor], engine: EngineHandle, plan: list[dict[str, Any]],
    workers: list[dict[str, Any]], *, timeout: float,
) -> Callable[[], list[str]]:
    """Names of the parameters of which a worker holds other bytes than the trainer, from the
    function that is returned. Trainer and engine compute their hashes at the same time.

    Args:
        wholes: the trainer's parameters in the order and types of ``plan``; taken at once.
        engine: asked for its fingerprints.
        plan: from :func:`make_plan`.
        workers: from :func:`describe_workers`.
        timeout: seconds.
    """
    held = [[pieces_of(worker["tensors"].get(item["tensor"]), item) for worker in workers]
            for item in plan]
    # Workers that hold the same piece are compared with one hash of it.
    distinct = [list(dict.fromkeys(piece for pieces in of_workers for piece in pieces))
                for of_workers in held]
    theirs = in_background(engine.collective_rpc, "transfer_fingerprints", plan,
                           timeout=timeout) if plan else None
    hashes = iter(fingerprints(part_of(whole, piece)
                               for whole, pieces in zip(wholes, distinct, strict=True)
                               for piece in pieces))
    ours = [{piece: next(hashes) for piece in pieces} for pieces in distinct]

    def differing() -> list[str]:
        of_workers = theirs.result() if theirs else []
        return [item["name"] for number, item in enumerate(plan)
                if any([ours[number][piece] for piece in pieces] != found[number]
                       for pieces, found in zip(held[number], of_workers, strict=True))]

    return differing


def agreed_plan(
    model: nn.Module, trainer: TrainerRanks, engine: EngineHandle | None, *, timeout: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The workers' descriptions and the plan on the leading rank; every rank calls it.

    Raises:
        ValueError: if another rank than the leading one has an engine, or that one has none.
        LayoutError: if the models do not match.
    """
    if trainer.leads != (engine is not None):
        raise ValueError("rank 0 of the trainer, and no other, needs the engine's handle")
    with trainer.agreed():
        if engine is None:
            return [], []
        workers = describe_workers(engine, timeout=timeout)
        return workers, make_plan(dict(model.named_parameters()), workers)


def describe_workers(engine: EngineHandle, *, timeout: float) -> list[dict[str, Any]]:
    """``transfer_describe`` of every worker, in the order of ``collective_rpc``'s results."""
    return engine.collective_rpc("transfer_describe", timeout=timeout)


def make_plan(params: dict[str, Tensor], workers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is sent, in order: name, engine tensor, first row, shape and type of each parameter.

    Raises:
        LayoutError: if the models do not match.
    """
    described = {name: tensor for worker in workers for name, tensor in worker["tensors"].items()}
    places = engine_layout(
        {name: _stand_in(param.shape, param.dtype) for name, param in params.items()},
        {name: _stand_in(tensor["shape"], getattr(torch, tensor["dtype"]))
         for name, tensor in described.items()})
    return [{"name": name, "tensor": places[name].name, "start": places[name].start,
             "shape": list(param.shape), "dtype": described[places[name].name]["dtype"]}
            for name, param in params.items()]


def _stand_in(shape: Any, dtype: torch.dtype) -> Tensor:
    """A tensor without memory; float types are converted on the way, hence count as one."""
    return torch.empty(tuple(shape), device="meta",
                       dtype=torch.float32 if dtype in _FLOATS else dtype)


def check_option(name: str, value: str, options: Any) -> None:
    """Raise ValueError unless ``value`` is one of the ``Literal`` type ``options``."""
    known = get_args(options)
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}")
