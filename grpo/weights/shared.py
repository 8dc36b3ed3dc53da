"""One copy of the weights for trainer and engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from grpo.engines.inprocess import engine_module
from grpo.weights.layout import Place, engine_layout, view

if TYPE_CHECKING:
    from vllm import LLM


class WeightSync(Protocol):
    """How new weights reach the policy that generates."""

    version: int
    """Number of updates published so far; rollouts carry it as ``policy_version``."""

    def publish(self) -> int:
        """Make the trainer's current weights the engine's and return the new version."""

    def differing(self) -> list[str]:
        """Names of the trainer's parameters whose values differ in the engine."""

    def unshared(self) -> list[str]:
        """Names of parameters whose in-place updates would not reach the engine."""


class SameModule:
    """Trainer and policy use the very same module, as with ``TransformersPolicy``.

    Args:
        model: the module both sides use.
    """

    def __init__(self, model: nn.Module, *, version: int = 0) -> None:
        self.model, self.version = model, version

    def publish(self) -> int:
        self.version += 1
        return self.version

    def differing(self) -> list[str]:
        return []

    def unshared(self) -> list[str]:
        return []


class SingleCopy:
    """The trainer's parameters are views into an in-process engine's tensors.

    An optimizer that writes in place has then already updated the engine; what :meth:`publish`
    adds is that pending GPU work is finished and that the engine forgets keys and values which
    the old weights had computed.

    Args:
        model: the trainer's model, loaded from the same checkpoint as the engine. Its parameters
            are moved into the engine's memory, its buffers to the engine's device.
        engine: from :func:`grpo.engines.inprocess.start_engine`.

    Raises:
        LayoutError: if the models' parameters do not match one to one.
        ValueError: if their values differ before they are shared.
    """

    def __init__(self, model: nn.Module, engine: LLM, *, version: int = 0) -> None:
        self.model, self.engine, self.version = model, engine, version
        self.engine_params = dict(engine_module(engine).named_parameters())
        trainer_params = dict(model.named_parameters())
        self.places: dict[str, Place] = engine_layout(trainer_params, self.engine_params)
        self.device = next(iter(self.engine_params.values())).device
        different = self.differing()
        if different:
            raise ValueError("trainer and engine were loaded from different weights; they differ "
                             f"in {some_names(different)}")
        for name, param in trainer_params.items():
            param.data = view(self.places[name], self.engine_params)
        for module in model.modules():  # rotary tables and the like are not the engine's
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = buffer.to(self.device)

    def publish(self) -> int:
        """Finish pending writes, drop the engine's cached keys and values, count the version.

        Raises:
            RuntimeError: if the engine still runs requests, whose cache cannot be dropped.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("the engine refused to reset its prefix cache because requests are "
                               "still running; finish or abort them before publishing weights")
        self.version += 1
        return self.version

    @torch.no_grad()
    def differing(self) -> list[str]:
        """Names of the trainer's parameters whose values differ in the engine."""
        different = []
        for name, param in self.model.named_parameters():
            target = view(self.places[name], self.engine_params)
            if param.data_ptr() == target.data_ptr():
                continue
            if not torch.equal(param.data.to(target.device), target):
                different.append(name)
        return different

    def unshared(self) -> list[str]:
        """Names of parameters that no longer lie in the engine's memory.

        An in-place update of such a parameter never reaches the engine.
        """
        return [name for name, param in self.model.named_parameters()
                if param.data_ptr() != view(self.places[name], self.engine_params).data_ptr()]


def some_names(names: list[str], count: int = 5) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
