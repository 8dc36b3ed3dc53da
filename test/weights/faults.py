"""Updates of which something is lost on the way, far too small for a canary."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from grpo.weights.canary import StaleWeightsError
from grpo.weights.proof import Perturbation, WeightProof
from grpo.weights.shared import WeightSync, WrappedSync

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

#: What can be lost.
FAULTS = ("a skipped update", "one tensor", "one stale worker")


def params(module: nn.Module) -> dict[str, Tensor]:
    """What a module holds."""
    return dict(module.named_parameters())


@torch.no_grad()
def nudge(model: nn.Module) -> None:
    """Move every trained value to the next number of its type."""
    for param in model.parameters():
        if param.requires_grad:
            param.copy_(param.view(_BITS[param.itemsize]).add(1).view(param.dtype))


class Faulty(WrappedSync):
    """Updates after which some of the engine's tensors have their old values again.

    Args:
        weights: how an update is made.
        workers: what each worker of the engine holds.
        fault: one of :data:`FAULTS`.
        name: of the tensor that is lost where it is one.

    Attributes:
        active: whether updates are hit.
    """

    def __init__(self, weights: WeightSync, workers: list[dict[str, Tensor]],
                 fault: str = FAULTS[0], name: str = "model.norm.weight") -> None:
        super().__init__(weights)
        assert fault in FAULTS
        hit = workers[-1:] if fault == FAULTS[2] else workers
        self.held = [tensor.data for worker in hit for key, tensor in worker.items()
                     if fault != FAULTS[1] or key == name]
        assert self.held
        self.active = True

    def publish(self, *, now: bool = False) -> int:
        lost = self.held if self.active else []
        values = [value.clone() for value in lost]
        version = super().publish(now=now)
        for target, value in zip(lost, values, strict=True):
            target.copy_(value)
        return version


def updates_until_found(faulty: Faulty, model: nn.Module, *, sound: int = 4, interval: int = 3
                        ) -> int:
    """Train and publish; how many faulty updates it took until the proof failed.

    Args:
        faulty: the way of the weights.
        model: the trainer's.
        sound: updates before the first faulty one.
        interval: of the proof.
    """
    proof = WeightProof(faulty, interval=interval)
    for update in range(1, sound + interval + 1):
        faulty.active = update > sound
        nudge(model)
        faulty.publish()
        try:
            proof.check()
        except StaleWeightsError:
            assert faulty.active, "nothing was wrong yet"
            return update - sound
    raise AssertionError(f"{interval} faulty updates went unnoticed")


def complaint(check: Callable[[], object]) -> str:
    """What is said of weights that are stale."""
    with pytest.raises(StaleWeightsError) as error:
        check()
    return str(error.value)


class Changing:
    """As much of a learner as the self-test needs; sees that nothing of it stays."""

    def __init__(self, model: nn.Module) -> None:
        self.params = [param for param in model.parameters() if param.requires_grad]

    def _values(self) -> list[Tensor]:
        return [getattr(param, "_local_tensor", param).detach().clone() for param in self.params]

    def perturb(self) -> None:
        self.before = self._values()
        self.change = Perturbation(self.params)

    def restore(self) -> None:
        assert not any(map(torch.equal, self._values(), self.before))
        self.change.undo()
        assert all(map(torch.equal, self._values(), self.before))
