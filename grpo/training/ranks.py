"""The processes that train one model together, and what they tell each other."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from grpo import data
from grpo.weights.fingerprint import fingerprints
from grpo.weights.shared import some_names


@dataclass(frozen=True)
class Ranks:
    """One process a device, each with a number.

    All methods but the properties are collective: every rank calls them in the same order, and a
    rank that waits longer than the ``timeout`` of :meth:`join` for another raises.

    Attributes:
        rank: number of this process, from 0.
        count: how many there are.
        device: what this rank computes on.
        mesh: the same as PyTorch wants it, one dimension of ``count`` devices.

    Examples:
        >>> import tempfile
        >>> ranks = Ranks.join("cpu", rank=0, count=1, address=f"file://{tempfile.mkdtemp()}/meet")
        >>> ranks.leads, ranks.greatest(3), ranks.sum(torch.tensor([1.0, 2.0])).tolist()
        (True, 3, [1.0, 2.0])
        >>> ranks.leave()
    """

    rank: int
    count: int
    device: torch.device
    mesh: DeviceMesh

    @classmethod
    def join(
        cls, device_type: str, *, rank: int | None = None, count: int | None = None,
        device_index: int | None = None, address: str = "env://", timeout: float = 600.0,
    ) -> Ranks:
        """Meet the other ranks; returns when all are there.

        Args:
            device_type: ``"cuda"`` or ``"cpu"``.
            rank: number of this process; None: ``$RANK``, as ``torchrun`` sets it.
            count: number of processes; None: ``$WORLD_SIZE``.
            device_index: which of the GPUs that this process sees is its own; None:
                ``$LOCAL_RANK``, or 0 where that is not set.
            address: where they meet: ``tcp://HOST:PORT``, ``file:///PATH`` of a file that does not
                exist yet, or ``env://`` for ``$MASTER_ADDR`` and ``$MASTER_PORT``.
            timeout: seconds that a rank waits for the others, here and in every later exchange.

        Raises:
            ValueError: for a rank or count that is neither given nor in the environment, or that
                is out of range.
            RuntimeError: if not all ranks come before the deadline.
        """
        rank = _from_environment("RANK") if rank is None else rank
        count = _from_environment("WORLD_SIZE") if count is None else count
        if not 0 <= rank < count:
            raise ValueError(f"rank={rank} must be between 0 and count - 1 = {count - 1}")
        if timeout <= 0:
            raise ValueError(f"timeout={timeout} must be positive")
        backend, device = "gloo", torch.device("cpu")
        if device_type == "cuda":
            index = int(os.environ.get("LOCAL_RANK", 0)) if device_index is None else device_index
            # Gloo beside NCCL, so that small things need not travel through the GPU.
            backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", index)
            torch.cuda.set_device(device)
        try:
            dist.init_process_group(backend, init_method=address, rank=rank, world_size=count,
                                    timeout=timedelta(seconds=timeout))
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {rank} of {count} could not meet the others at {address}: {error}; see that "
                f"all {count} are started within timeout={timeout:g} seconds") from error
        return cls(rank, count, device, init_device_mesh(device_type, (count,)))

    def leave(self) -> None:
        """Close the connections."""
        dist.destroy_process_group()

    @property
    def leads(self) -> bool:
        """True on rank 0, which speaks for all: it logs, saves, and holds the engine."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks of a tensor of any one shape, in a new tensor."""
        values = values.detach().to(self.device, copy=True)
        dist.all_reduce(values)
        return values

    def greatest(self, number: int) -> int:
        """The greatest of the ranks' numbers."""
        value = torch.tensor(number)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return int(value)

    def share(self, batch: TensorDictBase | None) -> TensorDict:
        """Rank 0's batch of dense tensors, on every rank's device; that of others is ignored."""
        header = [None]
        if self.leads:
            header = [([(key, tuple(value.shape), value.dtype)
                        for key, value in batch.items(True, True)], tuple(batch.batch_size))]
        dist.broadcast_object_list(header, src=0, device=torch.device("cpu"))
        entries, batch_size = header[0]
        out = TensorDict({}, batch_size=batch_size, device=self.device)
        for key, shape, dtype in entries:
            value = (batch[key].to(self.device).contiguous() if self.leads
                     else torch.empty(shape, dtype=dtype, device=self.device))
            dist.broadcast(value, src=0)
            out[key] = value
        return out

    def concatenate(self, batch: TensorDictBase) -> TensorDict:
        """The rows of all ranks, those of rank 0 first.

        Ranks may have any number of rows, also none, with entries of the same names, dtypes and
        further dimensions.
        """
        rows = torch.zeros(self.count, dtype=torch.int64)
        rows[self.rank] = batch.batch_size[0]
        dist.all_reduce(rows)
        rows_R, most = rows.tolist(), int(rows.max())
        out = TensorDict({}, batch_size=[sum(rows_R)], device=self.device)
        for key, value in sorted(batch.items(True, True), key=lambda entry: str(entry[0])):
            padded = value.new_zeros(most, *value.shape[1:], device=self.device)
            padded[: len(value)] = value
            parts = [torch.empty_like(padded) for _ in rows_R]
            dist.all_gather(parts, padded)
            out[key] = torch.cat([part[:n] for part, n in zip(parts, rows_R, strict=True)])
        return out

    def check_same(self, batch: TensorDictBase) -> None:
        """Refuse tensors that are not the same, to the bit, on every rank.

        Raises:
            ValueError: on every rank, if one has others.
        """
        keys, values = zip(*batch.items(True, True), strict=True)
        hashes = sorted(f"{key} {hash}" for key, hash in zip(keys, fingerprints(values),
                                                              strict=True))
        found: list = [None] * self.count
        dist.all_gather_object(found, hashes)
        differing = sorted({line.rsplit(" ", 1)[0] for lines in found
                            for line in set(lines) ^ set(found[0])})
        if differing:
            raise ValueError(f"the ranks have different tensors, in {some_names(differing)}; give "
                             "every rank those of rank 0, a batch with Ranks.share()")


def _from_environment(name: str) -> int:
    if name in os.environ:
        return int(os.environ[name])
    raise ValueError(f"${name} is not set; start the ranks with torchrun, or pass rank and count")


def divide_rows(batch: TensorDictBase, parts: int, *, whole_groups: bool) -> list[Tensor]:
    """Give rows to ranks so that each has about as many tokens to compute.

    The longest rows are dealt first, each to the rank with the fewest tokens so far.

    Args:
        batch: dense batch with ``batch_size [B]``.
        parts: number of ranks.
        whole_groups: keep the rows of a ``group_id`` on one rank, for objectives that compare them.

    Returns:
        Row numbers of each rank, ascending; some ranks get none where there are too few.

    Examples:
        >>> lengths = torch.tensor([[9], [2], [4], [4]])
        >>> batch = TensorDict({
        ...     "masks": {"all_attention_mask": torch.arange(9) < lengths}}, [4])
        >>> [rows.tolist() for rows in divide_rows(batch, 2, whole_groups=False)]
        [[0], [1, 2, 3]]
    """
    lengths_B = data.lengths(batch).tolist()
    units = [unit.tolist() for unit in data.row_units(batch, whole_groups=whole_groups)]
    sizes = [sum(lengths_B[row] for row in unit) for unit in units]
    shares: list[list[int]] = [[] for _ in range(parts)]
    tokens = [0] * parts
    for unit, size in sorted(zip(units, sizes, strict=True), key=lambda pair: -pair[1]):
        least = min(range(parts), key=lambda part: (tokens[part], len(shares[part])))
        shares[least] += unit
        tokens[least] += size
    return [torch.tensor(sorted(share), dtype=torch.int64) for share in shares]
