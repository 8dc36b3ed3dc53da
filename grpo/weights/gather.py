"""A trainer's ranks while one of them hands weights on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

#: Tells the other ranks of a sharded trainer to take part in what this one does in the context
#: that is returned; see :meth:`grpo.training.team.Leader.together`.
Tell: TypeAlias = Callable[..., AbstractContextManager[None]]


# PyTorch 2.13 has a new name for it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

#: Small tensors are gathered together up to so many bytes.
TOGETHER_BYTES = 64 << 20


def tell_nobody(what: str, *details: Any) -> AbstractContextManager[None]:
    """The :data:`Tell` of a trainer whose other ranks, if any, call the same methods themselves."""
    return nullcontext()


def _by_rows(tensor: DTensor) -> bool:
    """Whether each rank has consecutive rows of it, as FSDP2 divides parameters."""
    return tensor.device_mesh.ndim == 1 and tensor.placements == (Shard(0),)


def trained_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Those of a model's named parameters that are not frozen."""
    return (entry for entry in model.named_parameters() if entry[1].requires_grad)


class TrainerRanks:
    """Gather a model that FSDP2 has sharded; without shards there is one rank, this process.

    Args:
        model: whose parameters are whole tensors or ``DTensor`` shards over the default group. If
            it has a ``trained_dtype`` (see :func:`~grpo.training.parallel.shard_model`), that is
            what its trained parameters are rounded to, before they are gathered.

    Attributes:
        count: number of ranks.
        leads: whether this is the rank that hands the weights on.
        device: of this rank's shards.

    Examples:
        >>> trainer = TrainerRanks(nn.Linear(2, 1))
        >>> trainer.count, trainer.leads
        (1, True)
        >>> [(name, tuple(t.shape)) for name, t in
        ...  trainer.whole(nn.Linear(2, 1).named_parameters())]
        [('weight', (1, 2)), ('bias', (1,))]
    """

    def __init__(self, model: nn.Module) -> None:
        shards = [param for param in model.parameters() if isinstance(param, DTensor)]
        self.count = dist.get_world_size() if shards else 1
        self.leads = not shards or dist.get_rank() == 0
        self.device = next(model.parameters()).device
        self._dtype = getattr(model, "trained_dtype", None)
        self._trained = {name for name, param in model.named_parameters(remove_duplicate=False)
                         if param.requires_grad}

    @torch.no_grad()
    def whole(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors one after another; every rank must take them all, in the same order.

        Slices of small ones travel together: to gather a tensor takes the processor some tenths of
        a millisecond, however small it is, and a model has hundreds of them.
        """
        batch: list[tuple[str, DTensor]] = []
        nbytes = 0
        for name, tensor in named:
            size = tensor.numel() * self._dtype_of(name, tensor).itemsize
            if batch and (nbytes + size > TOGETHER_BYTES
                          or not self._alike(batch[0], (name, tensor))):
                yield from self._gathered(batch)
                batch, nbytes = [], 0
            if isinstance(tensor, DTensor):
                batch.append((name, tensor))
                nbytes += size
            else:
                yield name, tensor.detach()
        if batch:
            yield from self._gathered(batch)

    def _alike(self, *named: tuple[str, Tensor]) -> bool:
        """Whether named tensors may be gathered together."""
        return (all(isinstance(tensor, DTensor) and _by_rows(tensor) for _, tensor in named)
                and len({self._dtype_of(name, tensor) for name, tensor in named}) == 1)

    def _dtype_of(self, name: str, tensor: Tensor) -> torch.dtype:
        """What a tensor is gathered as: half the bytes where it is rounded before."""
        return self._dtype if self._dtype is not None and name in self._trained else tensor.dtype

    def _gathered(self, batch: list[tuple[str, DTensor]]) -> Iterator[tuple[str, Tensor]]:
        first, dtype = batch[0][1], self._dtype_of(*batch[0])
        if not _by_rows(first):
            for name, tensor in batch:
                yield name, tensor.to(dtype).full_tensor()
            return
        # The first ranks have this many rows of a tensor, the last ones what is left.
        rows = [-(-len(tensor) // self.count) for _, tensor in batch]
        sizes = [count * tensor.shape[1:].numel()
                 for count, (_, tensor) in zip(rows, batch, strict=True)]
        own = torch.empty(sum(sizes), dtype=dtype, device=self.device)
        slices = [tensor.to_local().reshape(-1) for _, tensor in batch]
        torch._foreach_copy_([part[:len(values)] for part, values in
                              zip(own.split(sizes), slices, strict=True)], slices)
        of_all = torch.empty(self.count, len(own), dtype=dtype, device=self.device)
        _all_gather(of_all.view(-1), own, group=first.device_mesh.get_group())
        for (name, tensor), part in zip(batch, of_all.split(sizes, dim=1), strict=True):
            yield name, part.reshape(-1, *tensor.shape[1:])[:len(tensor)]

    def whole_state(self, model: nn.Module) -> dict[str, Tensor]:
        """What is saved of a model, on the leading rank's CPU; empty on the others.

        A tied head is left out, so that it can never be loaded as something else. All are copies,
        because safetensors refuses views that share a storage.
        """
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        named = ((name, tensor) for name, tensor in model.state_dict().items() if name not in tied)
        return {name: whole.to("cpu", copy=True).contiguous() for name, whole in self.whole(named)
                if self.leads}

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """At its end every rank knows whether the leading one got there.

        What ends the process, as a second Ctrl-C does, tells them nothing: they may be in the
        middle of something else, where it would wait for them.

        Raises:
            RuntimeError: on the other ranks, if it did not.
        """
        try:
            yield
        except Exception:
            self._conclude(failed=True)
            raise
        self._conclude(failed=False)

    def _conclude(self, *, failed: bool) -> None:
        if self.count > 1:
            of_leader = torch.tensor([failed], dtype=torch.uint8, device=self.device)
            dist.broadcast(of_leader, 0)
            if of_leader and not self.leads:
                raise RuntimeError("rank 0 could not hand the weights on; its error says why")

    def tell(self, *values: Any) -> list[Any]:
        """The leading rank's ``values``, on every rank."""
        said = list(values)
        if self.count > 1:
            dist.broadcast_object_list(said, src=0, device=self.device)
        return said

    def total(self, number: int) -> int:
        """Sum of the ranks' numbers."""
        if self.count == 1:
            return number
        summed = torch.tensor([number], device=self.device)
        dist.all_reduce(summed)
        return int(summed)
