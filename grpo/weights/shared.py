"""One copy of the weights for trainer and engine."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from grpo.policies.inprocess import engine_module
from grpo.weights.fingerprint import ALL, Part, fingerprints
from grpo.weights.handover import Handover, map_tensors
from grpo.weights.layout import (
    SHUFFLED_EXPERTS,
    Place,
    base_parameters,
    engine_layout,
    hf_names,
    is_experts,
    parameter_reader,
    view,
)

if TYPE_CHECKING:
    from vllm import LLM

    from grpo.policies.handle import EngineHandle

# Pause between attempts to reset the prefix cache, in seconds.
_RETRY = 0.05


class WeightSync(ABC):
    """How new weights reach the policy that generates.

    Attributes:
        version: updates published so far; rollouts carry it as ``policy_version``.
        pending: calls of :meth:`publish` whose update still waits for a later call.
        waited: seconds of the last :meth:`publish` in which the engine finished what it was at.
        starts_engines: whether each update starts a new engine.
        in_flight: whether updates can reach what is being generated.
    """

    version = 0
    pending = 0
    waited = 0.0
    starts_engines = False
    in_flight = True

    @abstractmethod
    def publish(self, *, now: bool = False) -> int:
        """Make the trainer's current weights the engine's and return the new version.

        Args:
            now: also where updates wait on purpose for later ones, as those of
                :class:`~grpo.weights.in_flight.PeriodicUpdates` do.
        """

    @abstractmethod
    def differing(self, part: Part = ALL) -> list[str]:
        """Names of the trainer's parameters, or a part of them, whose bits differ in the engine."""

    def begin_differing(self, part: Part = ALL) -> Callable[[], list[str]]:
        """Begin :meth:`differing`; the function that is returned ends it, and is called before the
        trainer's weights change. An engine elsewhere does its share in between."""
        names = self.differing(part)
        return lambda: names

    def unshared(self) -> list[str]:
        """Names of parameters that have left the memory they shared with the engine, so that
        in-place updates no longer reach it; none where :meth:`publish` copies."""
        return []


class WrappedSync(WeightSync):
    """Another :class:`WeightSync`, for classes that do something around its methods."""

    def __init__(self, weights: WeightSync) -> None:
        self.weights = weights

    @property
    def version(self) -> int:
        return self.weights.version

    @version.setter
    def version(self, value: int) -> None:
        self.weights.version = value

    @property
    def starts_engines(self) -> bool:
        return self.weights.starts_engines

    def publish(self, *, now: bool = False) -> int:
        return self.weights.publish(now=now)

    def differing(self, part: Part = ALL) -> list[str]:
        return self.weights.differing(part)

    def unshared(self) -> list[str]:
        return self.weights.unshared()


class SameModule(WeightSync):
    """Trainer and policy use the very same module, as with ``TransformersPolicy``.

    Args:
        model: the module both sides use.
        used: tells which module the policy uses now; None: nobody asks.
    """

    def __init__(self, model: nn.Module, *, used: Callable[[], nn.Module] | None = None,
                 version: int = 0) -> None:
        self.model, self.version = model, version
        self.used = used or (lambda: model)

    def publish(self, *, now: bool = False) -> int:
        self.version += 1
        return self.version

    @torch.no_grad()
    def differing(self, part: Part = ALL) -> list[str]:
        theirs = dict(self.used().named_parameters())
        return [name for name, param in part.choose(self.model.named_parameters())
                if theirs.get(name) is not param
                and not (name in theirs and torch.equal(theirs[name], param))]


class _OneCopy(WeightSync):
    """The trainer's parameters are views of an engine's tensors.

    An optimizer that writes in place has then already updated the engine; what :meth:`publish`
    adds is that pending GPU work is finished and that the engine forgets keys and values which
    the old weights had computed.
    """

    def _share(self, model: nn.Module, tensors: dict[str, Tensor], loaded: str) -> None:
        """Make the parameters views; ``loaded`` says what it means if their values differ."""
        self.model, params = model, base_parameters(model)
        self.places: dict[str, Place] = engine_layout(params, tensors)
        self.device = next(iter(tensors.values())).device
        if different := self.differing():
            raise ValueError(f"{loaded}; they differ in {some_names(different)}"
                             f"{_of_experts(different, params)}")
        for name, param in params.items():
            param.data = view(self.places[name], tensors)
        self._ours = parameter_reader(model)
        for module in model.modules():  # rotary tables and the like are not the engine's
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = buffer.to(self.device)


class SingleCopy(_OneCopy):
    """One copy with an engine of this process.

    Args:
        model: the trainer's model, loaded from the same checkpoint as the engine. Its parameters
            are moved into the engine's memory, its buffers to the engine's device.
        engine: from :func:`grpo.policies.inprocess.start_engine`.

    Raises:
        LayoutError: if the models' parameters do not match one to one.
        ValueError: if their values differ before they are shared.
    """

    def __init__(self, model: nn.Module, engine: LLM, *, version: int = 0) -> None:
        self.engine, self.version = engine, version
        self.engine_params = base_parameters(engine_module(engine))
        self._share(model, self.engine_params,
                    "trainer and engine were loaded from different weights")
        self._addresses = {name: param.data_ptr() for name, param in self._ours().items()}
        self._theirs = parameter_reader(engine_module(engine))

    def publish(self, *, now: bool = False) -> int:
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
    def differing(self, part: Part = ALL) -> list[str]:
        # What both use now, which something may have put in the place of what is shared.
        ours, theirs = ((self._ours(), self._theirs()) if part != ALL else
                        (base_parameters(self.model), base_parameters(engine_module(self.engine))))
        return [name for name, param in part.choose(ours.items())
                if _differs(param, view(self.places[name], theirs))]

    def unshared(self) -> list[str]:
        return [name for name, param in self._ours().items()
                if param.data_ptr() != self._addresses[name]]


class SharedCopy(_OneCopy):
    """One copy with an engine in another process, which owns the memory and exports it.

    Args:
        model: as for :class:`SingleCopy`.
        engine: handle of an engine with :class:`~grpo.weights.worker.extension.WeightWorker`.
        timeout: seconds :meth:`publish` may take, and each question to the engine.
        version: number of updates so far.

    Raises:
        LayoutError: if the models' parameters do not match one to one.
        ValueError: if their values differ, or the engine has several workers.
        HandoverError: if the engine's memory cannot be mapped.
    """

    def __init__(self, model: nn.Module, engine: EngineHandle, *, timeout: float = 60.0,
                 version: int = 0) -> None:
        self.engine, self.timeout, self.version = engine, timeout, version
        answers = engine.collective_rpc("export_weights", timeout=timeout)
        if len(answers) != 1:
            raise ValueError(f"{engine} has {len(answers)} workers, each with a part of every "
                             "tensor; one copy needs tensor_parallel_size=1, use weights that are "
                             "copied")
        self.tensors = map_tensors(Handover.from_dict(answers[0], source=str(engine)))
        self._share(model, self.tensors, f"trainer and {engine} were loaded from different "
                                         "weights, or the engine does not use this memory")

    def publish(self, *, now: bool = False) -> int:
        """Finish pending writes, drop the engine's cached keys and values, count the version.

        Raises:
            TimeoutError: if requests still run when the time is over.
            EngineError: if the engine is dead or does not answer.
        """
        deadline = time.monotonic() + self.timeout
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        # Also where there is no GPU: only an answer of the worker proves that it lives.
        self.engine.collective_rpc("synchronize", timeout=self.timeout)
        # Enough for one answer after the deadline.
        while not self.engine.reset_prefix_cache(timeout=max(1.0, deadline - time.monotonic())):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"waited {self.timeout:g} s for {self.engine} to reset its prefix cache, but "
                    "requests are still running; finish, pause or abort them before publishing "
                    "weights, or raise the timeout")
            time.sleep(_RETRY)
        self.version += 1
        self.engine.set_version(self.version)
        return self.version

    @torch.no_grad()
    def differing(self, part: Part = ALL) -> list[str]:
        """See :meth:`WeightSync.differing`; ``part`` is one of the engine's tensors.

        The engine hashes them in its own process, which proves that both see one memory.
        """
        names = part.choose(self.tensors)
        if not names:
            return []
        theirs, = self.engine.collective_rpc("fingerprints", names, timeout=self.timeout)
        ours = fingerprints(self.tensors[name] for name in names)
        params, parts = base_parameters(self.model), hf_names(self.places)
        different = set()
        for tensor, mine in zip(names, ours, strict=True):
            for name in parts.get(tensor, []):
                if theirs[tensor] != mine or _differs(
                        params[name], view(self.places[name], self.tensors)):
                    different.add(name)
        return [name for name in self.places if name in different]

    def unshared(self) -> list[str]:
        return [name for name, param in self._ours().items()
                if param.data_ptr() != view(self.places[name], self.tensors).data_ptr()]


def _differs(param: Tensor, target: Tensor) -> bool:
    """Whether a parameter has values of its own instead of the engine's."""
    return param.data_ptr() != target.data_ptr() and not torch.equal(
        param.data.to(target.device), target)


def _of_experts(names: list[str], params: dict[str, Tensor]) -> str:
    """What it means that nothing but experts differs."""
    only = all(is_experts(name, params[name]) for name in names)
    return f". As these are experts alone: {SHUFFLED_EXPERTS}" if only else ""


def some_names(names: list[str], count: int = 5) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
