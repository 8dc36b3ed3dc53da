"""New weights for an engine with memory of its own: another GPU, another process, many workers.

:class:`WeightTransfer` copies the trainer's parameters into the engine's tensors. Where trainer and
engine can share memory, :class:`~grpo.weights.shared.SingleCopy` needs no copy at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from grpo.weights.channel import Channel, Deadline, TransferError, buckets, in_background
from grpo.weights.fingerprint import fingerprint
from grpo.weights.gather import TrainerRanks
from grpo.weights.layout import LayoutError, engine_layout
from grpo.weights.receiver import Piece, pieces_of, plan_bytes

if TYPE_CHECKING:
    from grpo.engines.handle import EngineHandle

Backend = Literal["nccl", "gloo", "ipc"]
Loader = Literal["direct", "vllm"]
PauseMode = Literal["keep", "wait", "abort"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_CONNECT = ("nothing was sent and the engine runs on with its old weights; see that its workers "
            "can reach host, then publish again")
_RETRY = ("the engine stays paused because its weights may be partly new: publish again, or "
          "restart it from a checkpoint")


class WeightTransfer:
    """Send the trainer's parameters to an engine's workers.

    With ``loader="direct"`` each parameter is broadcast straight into the rows of vLLM's fused
    tensor that it makes up: no packing, no staging, no second copy on either side. A worker of a
    tensor-parallel engine receives whole parameters, a bucket at a time, and keeps its shard. With
    ``loader="vllm"`` the parameters go through vLLM's own weight-transfer engine, which loads them
    as it loads a checkpoint; slower, and right for every architecture, quantised ones included.

    A trainer sharded by FSDP2 calls every method on all ranks. Parameters are gathered one by one;
    rank 0 holds the engine and sends while the next bucket is gathered, so that no more than three
    buckets exist beside the shards. The gathering's deadline is that of the trainer's own process
    group.

    An update: pause the engine, send, reset its prefix cache, count the version, resume. If sending
    fails the engine stays paused, because its weights may be partly new.

    No pickle crosses the network with ``loader="direct"``: the control messages are JSON, the
    rendezvous carries addresses, the data are the tensors' bytes. vLLM's own rendezvous
    (``loader="vllm"``) unpickles NCCL's id from a store that it opens on ``host``; keep that on
    loopback or a trusted network.

    Args:
        model: the trainer's; parameters may be ``DTensor`` shards and of another float type than
            the engine's, to which they are then rounded.
        engine: where to send; None on every rank but 0.
        backend: ``nccl`` between GPUs; ``ipc`` where the engine may map the trainer's memory (one
            host, also one GPU); ``gloo`` for engines on a CPU.
        loader: what stores the parameters, see above.
        bucket_bytes: parameters in flight at a time.
        host: interface of the trainer that the workers connect to.
        pause_mode: what happens to running requests: ``keep`` lets them go on with the new weights,
            ``wait`` finishes them first, ``abort`` ends them.
        timeout: seconds for connecting or for one update.
        version: updates published before.

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
        backend: Backend = "nccl",
        loader: Loader = "direct",
        bucket_bytes: int = 512 << 20,
        host: str = "127.0.0.1",
        pause_mode: PauseMode = "keep",
        timeout: float = 300.0,
        version: int = 0,
    ) -> None:
        check_option("backend", backend, Backend)
        check_option("loader", loader, Loader)
        check_option("pause_mode", pause_mode, PauseMode)
        if loader == "vllm" and backend != "nccl":
            raise ValueError(f"loader='vllm' sends with NCCL, but backend={backend!r}; use "
                             "loader='direct' or backend='nccl'")
        if bucket_bytes <= 0 or timeout <= 0:
            raise ValueError(f"bucket_bytes={bucket_bytes} and timeout={timeout} must be positive")
        self.model, self.engine, self.version = model, engine, version
        self.backend, self.loader, self.bucket_bytes = backend, loader, bucket_bytes
        self.host, self.pause_mode, self.timeout = host, pause_mode, timeout
        params = dict(model.named_parameters())
        self.device = next(iter(params.values())).device
        self.trainer = TrainerRanks(model)
        if self.trainer.leads != (engine is not None):
            raise ValueError("rank 0 of the trainer, and no other, needs the engine's handle")
        if backend == "nccl" and self.device.type != "cuda":
            raise ValueError(f"backend='nccl' sends from GPU to GPU, but the model is on "
                             f"{self.device}; use backend='gloo'")
        if backend == "ipc" and self.trainer.count > 1:
            raise ValueError("backend='ipc' maps whole parameters, but these are sharded; use "
                             "backend='nccl'")
        self._path: Any = None
        matches = False
        try:
            if self.trainer.leads:
                self.workers = describe_workers(engine, timeout=timeout)
                self.plan = make_plan(params, self.workers, loader=loader)
            matches = True
        finally:
            self.trainer.agree(matches)

    def publish(self) -> int:
        """Give the engine the trainer's current weights.

        Returns:
            The new version.

        Raises:
            TransferError: at the deadline, naming what was waited for, or with the engine's error.
        """
        succeeded = False
        try:
            if self.trainer.leads:
                self._publish(Deadline(
                    self.timeout, f"publishing weights {self.version + 1}", fix=_CONNECT))
            else:
                list(self._gathered())  # empty; takes part in the gathering
            succeeded = True
        finally:
            if not succeeded:
                self.close()
            self.trainer.agree(succeeded)
        self.version += 1
        return self.version

    def differing(self) -> list[str]:
        """Names of parameters whose values differ in the engine, by fingerprint (on rank 0).

        Raises:
            LayoutError: with ``loader="vllm"``, for an architecture whose fused tensors have no
                rule here, so that it is not known where its parameters lie.
        """
        if not self.trainer.leads:
            return list(self._gathered())  # empty; takes part in the gathering
        plan = make_plan(dict(self.model.named_parameters()), self.workers)
        return compare(self._gathered(plan), self.engine, plan, self.workers, timeout=self.timeout)

    def unshared(self) -> list[str]:
        """Nothing is shared, and nothing has to be: :meth:`publish` copies every parameter."""
        return []

    def close(self) -> None:
        """Leave the connection; the next :meth:`publish` makes a new one."""
        if self._path is not None:
            self._path.close()
        self._path = None

    # -- one update --------------------------------------------------------------------------------

    def _publish(self, deadline: Deadline) -> None:
        wholes = self._gathered()
        try:
            if self._path is None:
                self._path = self._connect(deadline)
            deadline.fix = _RETRY
            self.engine.pause(self.pause_mode, timeout=deadline.left("the engine to pause"))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # the optimizer's writes
            self._path.send(wholes, deadline)
        finally:
            if self.trainer.count > 1:
                for _ in wholes:  # the other ranks gather all parameters, whatever happens here
                    pass
        if not self.engine.reset_prefix_cache(
                timeout=deadline.left("the engine to reset its prefix cache")):
            raise TransferError(
                f"{deadline.doing}: the weights are there, but the engine refused to reset its "
                "prefix cache because requests still run; use pause_mode='wait' or 'abort'")
        self.engine.set_version(self.version + 1)
        self.engine.resume(timeout=deadline.left("the engine to resume"))

    def _connect(self, deadline: Deadline) -> Any:
        if self.backend == "ipc":
            return _Mapped(self.model, self.engine, self.plan, workers=len(self.workers),
                           deadline=deadline)
        if self.loader == "vllm":
            from grpo.weights.vllm_transfer import VLLMTransfer

            return VLLMTransfer(self.engine, self.plan, device=self.device, host=self.host,
                                workers=len(self.workers), bucket_bytes=self.bucket_bytes,
                                deadline=deadline)
        return _Direct(self.engine, self.plan, transport=self.backend, device=self.device,
                       host=self.host, workers=len(self.workers), bucket_bytes=self.bucket_bytes,
                       deadline=deadline)

    @torch.no_grad()
    def _gathered(self, plan: list[dict[str, Any]] | None = None) -> Iterator[Tensor]:
        """Whole parameters, on every rank, one at a time; on rank 0 in the types of ``plan``."""
        for number, (_, whole) in enumerate(self.trainer.whole(self.model.named_parameters())):
            if self.trainer.leads:
                dtype = getattr(torch, (plan or self.plan)[number]["dtype"])
                yield whole.to(dtype).contiguous()


class _Direct:
    """Broadcast into the engine's memory."""

    def __init__(self, engine: EngineHandle, plan: list[dict], *, transport: str,
                 device: torch.device, host: str, workers: int, bucket_bytes: int,
                 deadline: Deadline) -> None:
        self.engine, self.device = engine, device
        self.counts = list(buckets((plan_bytes(item) for item in plan), bucket_bytes))
        patience = deadline.left("the connection")
        config, store = Channel.host(transport, 1 + workers, host=host, seconds=patience)
        config["bucket_bytes"] = bucket_bytes
        joining = in_background(engine.collective_rpc, "transfer_connect", config, plan,
                                timeout=patience)
        opening = in_background(Channel, config, rank=0, device=device, store=store)
        deadline.result(joining, f"the engine's {workers} workers to join through "
                                 f"{host}:{config['port']}")
        self.channel: Channel = deadline.result(opening, "the trainer's end of the connection")

    def send(self, tensors: Iterator[Tensor], deadline: Deadline) -> None:
        left = deadline.left("the first bucket")
        # The workers give up first, so that their engine still answers afterwards.
        receiving = in_background(self.engine.collective_rpc, "transfer_receive", 0.9 * left,
                                  timeout=left)
        flying: tuple[int, list, list] | None = None
        for number, count in enumerate(self.counts):
            bucket = list(islice(tensors, count))
            works = self.channel.broadcast(bucket)
            if flying:
                self._land(flying, deadline, receiving)
            flying = (number, works, bucket)  # keeps gathered parameters alive until they are sent
        if flying:
            self._land(flying, deadline, receiving)
        deadline.result(receiving, "the engine's workers to store the weights")

    def _land(self, flying: tuple[int, list, list], deadline: Deadline, receiving: Any) -> None:
        number, works, _ = flying
        self.channel.wait(works, deadline, f"bucket {number + 1} of {len(self.counts)} to be sent",
                          until=receiving)

    def close(self) -> None:
        self.channel.close()


class _Mapped:
    """The workers copy out of the trainer's memory, which they map once."""

    def __init__(self, model: nn.Module, engine: EngineHandle, plan: list[dict], *,
                 workers: int, deadline: Deadline) -> None:
        self.model, self.engine, self.plan, self.workers = model, engine, plan, workers
        self.handovers: list[Any] = []
        self._export(deadline)

    def _export(self, deadline: Deadline) -> None:
        from grpo.weights.handover import export_tensors

        params = dict(self.model.named_parameters())
        # Torch counts the users of GPU memory: each process needs an export of its own.
        copies = self.workers if next(iter(params.values())).is_cuda else 1
        self.close()
        self.handovers = [
            export_tensors(params, model=type(self.model).__name__, owner="trainer")
            for _ in range(copies)]
        self.addresses = [param.data_ptr() for param in self.model.parameters()]
        described = [handover.to_dict() for handover in self.handovers]
        self._call("transfer_map", described, self.plan, deadline=deadline,
                   waiting_for="the engine's workers to map the trainer's memory")

    def send(self, tensors: Iterator[Tensor], deadline: Deadline) -> None:
        if self.addresses != [param.data_ptr() for param in self.model.parameters()]:
            self._export(deadline)
        self._call("transfer_copy", deadline=deadline,
                   waiting_for="the engine's workers to copy the weights")

    def _call(self, method: str, *args: Any, deadline: Deadline, waiting_for: str) -> None:
        deadline.result(in_background(self.engine.collective_rpc, method, *args,
                                      timeout=deadline.left(waiting_for)), waiting_for)

    def close(self) -> None:
        """Mappings end with the workers' next one, or with their process."""
        from grpo.weights.handover import release

        for handover in self.handovers:
            release(handover)
        self.handovers = []


def compare(wholes: Iterator[Tensor], engine: EngineHandle, plan: list[dict[str, Any]],
            workers: list[dict[str, Any]], *, timeout: float) -> list[str]:
    """Names of the parameters of which a worker holds other bytes than the trainer.

    Args:
        wholes: the trainer's parameters in the order and types of ``plan``.
        engine: asked for its fingerprints.
        plan: from :func:`make_plan`.
        workers: from the workers' ``transfer_describe``.
        timeout: seconds.
    """
    theirs = engine.collective_rpc("transfer_fingerprints", plan, timeout=timeout)
    different = []
    for number, (item, whole) in enumerate(zip(plan, wholes, strict=True)):
        for worker, fingerprints in zip(workers, theirs, strict=True):
            pieces = pieces_of(worker["tensors"].get(item["tensor"]), item)
            ours = [fingerprint(_piece(whole, piece)) for piece in pieces]
            # The sums beside the hashes are for people; those of broken weights are NaN.
            if [f[0] for f in ours] != [f[0] for f in fingerprints[number]]:
                different.append(item["name"])
                break
    return different


def describe_workers(engine: EngineHandle, *, timeout: float) -> list[dict[str, Any]]:
    """``transfer_describe`` of every worker, in the order of ``collective_rpc``'s results."""
    return engine.collective_rpc("transfer_describe", timeout=timeout)


def make_plan(params: dict[str, Tensor], workers: list[dict[str, Any]], *,
              loader: Loader = "direct") -> list[dict[str, Any]]:
    """What is sent, in order: name, engine tensor, first row, shape and type of each parameter.

    Args:
        params: the trainer's, by Hugging Face name.
        workers: from the workers' ``transfer_describe``.
        loader: vLLM's loader needs no rule for the layout, only the names' agreement.

    Raises:
        LayoutError: if the models do not match.
    """
    described = {name: tensor for worker in workers for name, tensor in worker["tensors"].items()}
    if loader == "vllm":
        _check_totals(params, described)
        return [{"name": name, "tensor": name, "start": 0, "shape": list(param.shape),
                 "dtype": str(param.dtype).removeprefix("torch.")}
                for name, param in params.items()]
    places = engine_layout(
        {name: _stand_in(param.shape, param.dtype) for name, param in params.items()},
        {name: _stand_in(tensor["shape"], getattr(torch, tensor["dtype"]))
         for name, tensor in described.items()})
    return [{"name": name, "tensor": places[name].name, "start": places[name].start,
             "shape": list(param.shape), "dtype": described[places[name].name]["dtype"]}
            for name, param in params.items()]


def _check_totals(params: dict[str, Tensor], described: dict[str, dict[str, Any]]) -> None:
    """Without a rule for the layout: equal names have equal shapes, and nothing is left over."""
    problems = [f"{name}: shape {tuple(params[name].shape)} here, "
                f"{tuple(described[name]['shape'])} in the engine"
                for name in params.keys() & described.keys()
                if list(params[name].shape) != described[name]["shape"]]
    ours = sum(param.numel() for param in params.values())
    theirs = sum(torch.Size(tensor["shape"]).numel() for tensor in described.values())
    if ours != theirs:
        alone = sorted(params.keys() ^ described.keys())
        problems.append(f"{ours} values here, {theirs} in the engine; names of one side only: "
                        f"{', '.join(alone[:12])}")
    if problems:
        raise LayoutError("the trainer's and the engine's parameters do not match:\n  "
                          + "\n  ".join(sorted(problems)))


def _stand_in(shape: Any, dtype: torch.dtype) -> Tensor:
    """A tensor without memory; float types are converted on the way, hence count as one."""
    return torch.empty(tuple(shape), device="meta",
                       dtype=torch.float32 if dtype in _FLOATS else dtype)


def _piece(whole: Tensor, piece: Piece) -> Tensor:
    return whole.narrow(piece.dim, piece.offset, piece.length) if whole.dim() else whole


def check_option(name: str, value: str, options: Any) -> None:
    """Raise ValueError unless ``value`` is one of the ``Literal`` type ``options``."""
    known = get_args(options)
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}")
