"""Workers that import their libraries while the command that started them imports its own.

A command that trains with workers on Ray used to import PyTorch, then start Ray, then have each
worker import PyTorch and vLLM. What a worker imports needs no checked configuration, so
:func:`start_ahead` starts Ray and the workers of the engines before the command's own imports, from
the keys that say on which devices they are. The run takes them by :func:`taken` if it asks for the
same; else they are ended, and others started as if there had been none.

A signal ends them before the command (:mod:`grpo.system.descendants`), and Ray does where the
command ends by itself.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo.collectors.worker_actor import start_worker
from grpo.config.devices import has_workers
from grpo.config.keys import ATROPOS, ConfigError
from grpo.policies.first_import import vllm_available
from grpo.policies.ray_engine import ray_available
from grpo.run.local_ray import start_own_ray
from grpo.run.placement import DevicePlan, Kind, Places, plan_devices
from grpo.system.collection import without_collection
from grpo.system.descendants import end_descendants
from grpo.training.stopping import (
    Stopped,
    a_thread_ends_at_once,
    end_at_once,
    signals_end_at_once,
)


@dataclass(frozen=True)
class Imports:
    """What decides which libraries a worker imports, and how they find its environment."""

    backend: str  # vllm or transformers
    device: Kind
    enforce_eager: bool | None  # inference_model.enforce_eager

    @property
    def library(self) -> str:
        """That which takes longest."""
        return "vLLM" if self.backend == "vllm" else "PyTorch"

    def __call__(self) -> None:
        """Import all that a rollout worker works with; in its process."""
        with without_collection():
            import grpo.run.build_worker  # noqa: F401 (it is imported for its effect)

        if self.backend == "vllm":
            from grpo.policies.inprocess import import_engine

            import_engine(self.device, enforce_eager=self.enforce_eager)


@dataclass(frozen=True)
class Ahead:
    """What has been started, and for what.

    Attributes:
        actors: Ray's handles of the workers, by number of the engine.
        end: ends them and their Ray.
    """

    plan: DevicePlan
    imports: Imports
    actors: dict[int, Any]
    end: Callable[[], None]


_DEVICES = Path("/dev")
# At most one: between the start of a command and its first run nothing else can hand it on, for
# the run is Hydra's to begin. A sweep's next runs find none.
_started: list[Ahead] = []


def start_ahead(config: DictConfig | None) -> None:
    """Start Ray and the workers of the engines for a run that will need them.

    Args:
        config: that a recipe and a command line have composed, not checked; None: not known yet.
    """
    if config is None or "torch" in sys.modules:  # where there is nothing left to wait for
        return
    guess = _guess(config)
    if guess is None:
        return
    plan, imports = guess
    signals_end_at_once(end_descendants)
    print("starting Ray", flush=True)
    begun = time.monotonic()
    try:
        with a_thread_ends_at_once(end_descendants):
            end = start_own_ray(plan)
    except ConfigError as error:
        end_descendants()
        sys.exit(f"error: {error}")
    except Stopped as stopped:  # of which Ray, half started, has no account that it could end
        end_at_once(stopped.number, end_descendants)
    print(f"Ray: there after {time.monotonic() - begun:.1f} s", flush=True)
    places, count = Places(plan, cluster=False), len(plan.engines)
    _started.append(Ahead(plan, imports, {
        number: start_worker(places.engine(number), imports) for number in range(count)}, end))
    print(f"loading {imports.library} in {count} rollout worker{'s' * (count > 1)}", flush=True)


def taken(plan: DevicePlan, imports: Imports) -> Ahead | None:
    """What was started ahead and fits, which is the caller's to end; None if there is none, nor a
    Ray."""
    if not _started:
        return None
    ahead = _started.pop()
    if (ahead.plan, ahead.imports) == (replace(plan, available=None), imports):
        return ahead
    ahead.end()
    return None


def _guess(config: DictConfig) -> tuple[DevicePlan, Imports] | None:
    """What a run will need of Ray; None where it needs none, or cannot be known before its
    configuration is checked."""
    try:
        keys = _wanted(config)
        if keys is None or not ray_available():
            return None
        kind: Kind = "cuda" if keys.device != "cpu" and _sees_gpus() else "cpu"
        plan = plan_devices(keys, kind=kind, available=None)
    except (OmegaConfBaseException, ConfigError):  # which the run will say in full
        return None
    inference = keys.inference_model
    backend = inference.backend
    if backend == "auto":
        backend = "vllm" if vllm_available() else "transformers"
    return plan, Imports(backend, kind, inference.enforce_eager)


def _wanted(config: DictConfig) -> SimpleNamespace | None:
    """The keys of a run with workers on a Ray of its own; None for any other, or where a number is
    none."""
    keys = SimpleNamespace(device=config.device, **{
        name: SimpleNamespace(**OmegaConf.to_container(config[name], resolve=True))
        for name in ("env", "train", "maxent", "train_model", "ref_model", "inference_model")})
    keys.train_model.lora = SimpleNamespace(**keys.train_model.lora)
    ray = config.get("ray")  # a section of grpo-async.py
    keys.ray = SimpleNamespace(address=ray.address if ray else None)
    if keys.ray.address is not None or keys.env.dataset == ATROPOS:
        return None
    roles = (keys.train_model, keys.ref_model, keys.inference_model)
    counts = [keys.inference_model.tensor_parallel_size, *(
        role.num_devices for role in roles if role.num_devices is not None)]
    lists = [role.devices or [] for role in roles]
    sound = all(type(n) is int and n > 0 for n in counts) and all(
        isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)
        for numbers in lists)
    return keys if sound and (ray or has_workers(keys)) else None


def _sees_gpus() -> bool:
    """Whether PyTorch will see a GPU, as far as that can be told without it."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    return not hidden and "+cpu" not in version("torch") and any(_DEVICES.glob("nvidia[0-9]*"))
