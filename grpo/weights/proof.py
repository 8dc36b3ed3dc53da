"""Proof to the bit that the engine has the trainer's weights, beside the canary's in nats.

In half precision a canary cannot see one missed update: both sides round differently by more than a
small step changes. So what the engine holds and what the trainer trains are hashed where they are,
and the numbers are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo.weights.canary import StaleWeightsError
from grpo.weights.diagnosis import some_groups
from grpo.weights.fingerprint import ALL, Part
from grpo.weights.shared import WeightSync

#: Updates after the start, or after a run was resumed, of which all tensors are compared.
FIRST_UPDATES = 3
# Values of each tensor that the self-test changes, spread so that each worker of an engine that
# divides the tensor has some.
_CHANGED = 1024
# Relative change, at least one step of every float type; and what stands for it next to zero.
_RELATIVE, _SMALL, _FROM_ZERO = 2.0**-6, 1e-4, 1e-3


class Perturbation:
    """Other values in a few places of each parameter, written in place until :meth:`undo`.

    The changes are small, so that an engine which meanwhile answers somebody is hardly another, and
    large enough to survive the rounding to half precision and the scaling of an adapter.

    Args:
        params: whole tensors, or the ``DTensor`` shards of this rank.

    Examples:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, 0.0], dtype=torch.bfloat16))
        >>> change = Perturbation([weight])
        >>> weight.tolist()
        [1.015625, 0.00099945068359375]
        >>> change.undo()
        >>> weight.tolist()
        [1.0, 0.0]
    """

    @torch.no_grad()
    def __init__(self, params: Iterable[Tensor]) -> None:
        self._before: list[tuple[Tensor, tuple[Tensor, ...], Tensor]] = []
        for param in params:
            local = _local(param)
            if not local.numel():
                continue
            count = min(_CHANGED, local.numel())
            index = torch.unravel_index(_spread(count, local.numel()).to(local.device),
                                        local.shape)
            values = local[index]
            self._before.append((param, index, values))
            local[index] = torch.where(values.abs() < _SMALL, _FROM_ZERO,
                                       values * (1 + _RELATIVE)).to(values.dtype)

    @torch.no_grad()
    def undo(self) -> None:
        """Put the values back, to the bit."""
        for param, index, values in self._before:
            _local(param)[index] = values  # where it is now: the first update may have moved it
        self._before = []


def _local(param: Tensor) -> Tensor:
    """What this rank has of a parameter."""
    return param.to_local() if isinstance(param, DTensor) else param.data


def _spread(count: int, size: int) -> Tensor:
    """``count`` different numbers below ``size``: one in each of as many equal pieces, at places
    that follow no pattern of rows and columns."""
    number = torch.arange(count)
    first, after = number * size // count, (number + 1) * size // count
    return first + (number * 2_654_435_761 >> 12) % (after - first)


class Perturbed(Protocol):
    """What the self-test needs of a :class:`~grpo.training.learner.Learner`."""

    def perturb(self) -> None:
        """Change some values of each trained parameter, on every rank."""

    def restore(self) -> None:
        """Undo it."""


class WeightProof:
    """Compare engine and trainer to the bit after updates.

    After each update an ``interval``-th of the tensors is compared, each time another one; all of
    them after the first :data:`FIRST_UPDATES`, wherever the caller says so, and after each update
    that starts a new engine. So an update that did not arrive at all is found at once, and a tensor
    that stays behind within ``interval`` updates.

    Args:
        weights: names what differs.
        interval: updates within which all tensors are compared; 1 compares all after each.

    Raises:
        ValueError: for an ``interval`` below 1.
    """

    def __init__(self, weights: WeightSync, *, interval: int = 10) -> None:
        if interval < 1:
            raise ValueError(f"interval={interval} must be at least 1; the comparison cannot be "
                             "switched off")
        self.weights, self.interval = weights, interval
        self._checks = 0
        self._begun: Callable[[], list[str]] | None = None

    def check(self, *, whole: bool = False) -> None:
        """Compare a part of the tensors, or the whole; call it after each update.

        Where updates wait on purpose (:class:`~grpo.weights.in_flight.PeriodicUpdates`) nothing is
        compared until the engine has them.

        Raises:
            StaleWeightsError: naming the tensors that differ.
        """
        self.start(whole=whole)
        self.finish()

    def start(self, *, whole: bool = False) -> None:
        """Begin a :meth:`check`, which :meth:`finish` ends before the weights change again."""
        if self.weights.pending:
            return
        whole = whole or self._checks < FIRST_UPDATES or self.weights.starts_engines
        part = ALL if whole else Part(self._checks % self.interval, self.interval)
        self._checks += 1
        self._begun = self.weights.begin_differing(part)

    def finish(self) -> None:
        """Compare; without effect where nothing was begun."""
        begun, self._begun = self._begun, None
        if names := begun and begun():
            raise StaleWeightsError(self._complaint(
                names, "after an update the engine does not have the trainer's weights",
                "what they were trained on since all tensors were last compared may be of others, "
                "so the run names the checkpoint to go on from"))

    def self_test(self, learner: Perturbed, *, begin: Callable[[], object] = lambda: None) -> None:
        """Prove before the first step that updates arrive.

        A few values of each trained tensor are changed, published and compared; then they are put
        back, published and compared again. The version stays. Where each update starts a new
        engine, which takes long, the present one is compared and nothing published.

        Args:
            learner: changes the values.
            begin: called before values are written.

        Raises:
            StaleWeightsError: as :meth:`check`; the trainer has its own values again.
        """
        missed = [] if self.weights.starts_engines else self._missed(learner, begin)
        if missed:
            raise StaleWeightsError(self._complaint(
                missed, "the self-test changed a few values and published them, but the engine "
                "does not have them", "inference_model.weight_sync does not work here; see that "
                "the engine is of the same version of this package, or use weight_sync=reload, "
                "which needs a disk only"))
        if missed := self.weights.differing():
            raise StaleWeightsError(self._complaint(
                missed, "the engine does not have the weights that the trainer starts from",
                "start it from the same model"))

    def _missed(self, learner: Perturbed, begin: Callable[[], object]) -> list[str]:
        """Tensors whose changed values did not arrive; they have been put back and published."""
        version = self.weights.version
        begin()
        learner.perturb()
        try:
            self._publish_again()
            missed = self.weights.differing()
            begin()
        finally:
            learner.restore()
            self.weights.version = version
        self._publish_again()
        return missed

    def _publish_again(self) -> None:
        self.weights.version -= 1
        self.weights.publish()

    def _complaint(self, names: list[str], what: str, fix: str) -> str:
        return (f"policy version {self.weights.version}: {what}; {len(names)} of the tensors "
                f"compared differ to the bit: {some_groups(names)}. If these are all, publish() "
                "sent nothing, or one of several engines missed it: look at the engine's log and "
                "see that no call of it failed. If they are a few, something else than the "
                "optimizer wrote to them or replaced their storage on one side: write into "
                f"parameters in place. The trainer's weights are intact; {fix}")
