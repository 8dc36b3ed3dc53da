"""LoRA adapters reach the engine: the same memory, written in place, in memory, or over HTTP.

Only the two thin factors of each adapted module are trained, so an update is megabytes where the
model is gigabytes. vLLM keeps an active adapter in a *slot* whose addresses never change; what is
written there is in use with the next token, CUDA graphs included.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from torch import Tensor, nn

from grpo.weights.adapters import (
    Adapter,
    adapters,
    engine_factors,
    save_adapter,
    whole_adapters,
)
from grpo.weights.fingerprint import ALL, Part
from grpo.weights.gather import Tell, TrainerRanks, tell_nobody
from grpo.weights.lora_slot import AdapterSlot, differing_factors, lora_request, shapes_of
from grpo.weights.shared import WeightSync
from grpo.weights.worker.lora import flat

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

    from grpo.policies.client import EngineClient
    from grpo.policies.handle import EngineHandle

How = Literal["auto", "views", "write", "load"]


class LoRASync(WeightSync):
    """Keep one adapter of an engine equal to the trainer's.

    ========= ==================================================== ==============================
    ``how``    an update                                            possible
    ========= ==================================================== ==============================
    "views"    nothing: the trained parameters *are* the slot       ``alpha == r``, ``r`` equals the
                                                                    engine's ``max_lora_rank``, one
                                                                    dtype and one device, a trainer
                                                                    that is not sharded
    "write"    one copy into the slot, the scaling folded into B    no tensor parallelism
    "load"     the engine takes up a new adapter from memory        always
    ========= ==================================================== ==============================

    ``"auto"`` takes the first that is possible. Views need a scaling of 1 because engines keep
    ``scaling * B``: a parameter that held the product would be trained with another effective
    learning rate than B itself, and how weights travel must not change what is learned. They need
    the full rank because B would be a matrix with gaps otherwise, which fused optimizers refuse.

    The engine has the trainer's adapter from construction on. Requests use it by carrying
    :attr:`lora_request`; one with ``load_inplace`` would reload the adapter at every engine step.

    Args:
        model: with adapters, see :func:`~grpo.weights.adapters.make_lora`; the engine serves the
            same base weights.
        engine: started with LoRA enabled and :class:`~grpo.weights.worker.lora.LoRAMethods` among
            its worker's methods.
        how: see above.
        name: of the adapter, for requests.
        adapter_id: of the adapter, positive; one for each adapter of an engine.
        version: updates published so far.
        timeout: seconds that any call to the engine may take.
        tell: the other ranks of a sharded trainer to gather.

    Raises:
        RuntimeError: if the engine was started without LoRA.
        ValueError: for an adapter that does not fit the engine, naming each module, and for a
            ``how`` that is impossible, with the reason.
    """

    def __init__(self, model: nn.Module, engine: EngineHandle, *, how: How = "auto",
                 name: str = "policy", adapter_id: int = 1, version: int = 0,
                 timeout: float = 60.0, tell: Tell = tell_nobody) -> None:
        if how not in get_args(How):
            raise ValueError(f"how={how!r} is unknown; use one of {get_args(How)}")
        if adapter_id < 1:
            raise ValueError(f"adapter_id={adapter_id} must be positive; 0 means no adapter")
        self.engine, self.version, self.timeout = engine, version, timeout
        self.name, self.adapter_id = name, adapter_id
        self.model, self.tell = model, tell
        self.adapters: dict[str, Adapter] = adapters(model)
        self.target = AdapterSlot(
            engine, {key: a.shape for key, a in self.adapters.items()}, name=name,
            adapter_id=adapter_id, load=how == "load", timeout=timeout)
        self.how = self._choose(how)
        self.target.write(self._values())
        if self.how == "views":
            for param_name, param in self._params().items():
                param.data = self.target.held[param_name]

    @property
    def lora_request(self) -> LoRARequest:
        """What generation requests carry to use the adapter."""
        return lora_request(self.name, self.adapter_id)

    def publish(self, *, now: bool = False) -> int:
        """Bring the adapter's current values to the engine and return the new version.

        Raises:
            RuntimeError: if the engine dropped the adapter, or still runs requests, whose cached
                keys and values cannot be dropped.
        """
        self.target.write(self._values())
        if not self.engine.reset_prefix_cache(timeout=self.timeout):
            raise RuntimeError("the engine refused to reset its prefix cache because requests are "
                               "still running; finish or abort them before publishing weights")
        self.version += 1
        self.engine.set_version(self.version)
        return self.version

    def differing(self, part: Part = ALL) -> list[str]:
        """Factors whose values differ in the engine, as ``module.lora_A`` or ``module.lora_B``."""
        return self.target.differing(dict(part.choose(self._values().items())))

    def unshared(self) -> list[str]:
        """Factors that should be views of the engine's slot and are not."""
        if self.how != "views":
            return []
        return [name for name, param in self._params().items()
                if param.data_ptr() != self.target.held[name].data_ptr()]

    def close(self) -> None:
        """Give the slot back; parameters that were views of it keep their values."""
        if self.how == "views":
            for param in self._params().values():
                param.data = param.data.clone()
        self.target.close()

    def _params(self) -> dict[str, Tensor]:
        return flat({key: adapter.factors() for key, adapter in self.adapters.items()})

    def _values(self) -> dict[str, Tensor]:
        with self.tell("adapters"):
            return engine_factors(self.model)

    def _choose(self, how: How) -> How:
        """What ``how`` comes to."""
        if self.target.loads:
            if how not in ("auto", "load"):
                raise ValueError(f"how={how!r} is impossible: the engine has "
                                 f"{self.target.workers} workers with a shard each. Use "
                                 "how='load' or 'auto'")
            return "load"
        obstacles = self._obstacles_to_views(self.target.held)
        if how == "views" and obstacles:
            raise ValueError(f"how='views' is impossible: {'; '.join(obstacles)}. Use how='write' "
                             "or 'auto'")
        return "views" if how != "write" and not obstacles else "write"

    def _obstacles_to_views(self, held: dict[str, Tensor]) -> list[str]:
        obstacles = []
        if (count := TrainerRanks(self.model).count) > 1:
            obstacles.append(f"each of {count} ranks of the trainer has a slice of the adapters")
        scalings = {adapter.scaling for adapter in self.adapters.values()} - {1.0}
        if scalings:
            obstacles.append(f"adapters are scaled by {', '.join(map(str, sorted(scalings)))}, and "
                             "only alpha == r gives 1")
        for name, param in self._params().items():
            theirs = held[name]
            if (param.dtype, param.device) != (theirs.dtype, theirs.device):
                obstacles.append(f"{name} is {param.dtype} on {param.device}, the engine's slot "
                                 f"{theirs.dtype} on {theirs.device}")
            if not theirs.is_contiguous():
                obstacles.append(f"{name} has a rank of {param.shape[1]}, below the engine's "
                                 "max_lora_rank")
        return obstacles[:3]


class HTTPLoRASync(WeightSync):
    """Bring adapters to an engine server as folders that it reads from disk.

    The server gives every load a name and id of its own, so running requests finish with the
    adapter they started with, no cached key or value is taken for a newer adapter's, and the
    adapter is read once. It drops an old adapter when its last request has ended; the newest two
    folders are kept.

    Args:
        client: of the server, which must see ``folder`` at the same path.
        model: with adapters, see :func:`~grpo.weights.adapters.make_lora`.
        folder: gets ``adapter_step_1``, ``adapter_step_2`` and so on.
        name: of the adapter; the server appends the number of the load.
        version: updates published so far.
        tell: the other ranks of a sharded trainer to gather.

    Attributes:
        lora_name: what the newest version is served as; None before the first is published.
        restart: where set, starts a new server for each version and returns its client.
    """

    KEPT = 2

    def __init__(self, client: EngineClient, model: nn.Module, *, folder: str | Path,
                 name: str = "policy", version: int = 0, tell: Tell = tell_nobody) -> None:
        adapters(model)  # raises if there are none
        self.tell = tell
        self.client, self.model, self.folder = client, model, Path(folder)
        self.name, self.version = name, version
        self.lora_name: str | None = None
        self.saved: list[Path] = []
        self.restart: Callable[[], EngineClient] | None = None

    def publish(self, *, now: bool = False) -> int:
        """Save the adapter and have the server use it for the requests to come.

        The version only counts once the server has loaded it.
        """
        version = self.version + 1
        with self.tell("adapters"):
            gathered = whole_adapters(self.model)
        path = save_adapter(self.model, self.folder / f"adapter_step_{version}", gathered)
        if self.restart is not None:
            self.client = self.restart()
        self.lora_name = self.client.load_lora(str(path), name=self.name, version=version)
        self.version = version
        self.saved = [*(older for older in self.saved if older != path), path]
        while len(self.saved) > self.KEPT:
            shutil.rmtree(self.saved.pop(0), ignore_errors=True)
        return self.version

    @property
    def starts_engines(self) -> bool:
        return self.restart is not None

    def differing(self, part: Part = ALL) -> list[str]:
        """Factors that differ in the adapter that the server's requests use."""
        with self.tell("adapters"):
            values = dict(part.choose(engine_factors(self.model).items()))
        return differing_factors(self.client.lora_fingerprints(shapes_of(values)), values)
