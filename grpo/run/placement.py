"""Which devices train, score and generate, and how Ray puts actors there.

The same keys serve one machine and a cluster: ``train_model.num_devices``,
``ref_model.num_devices``, ``inference_model.num_devices`` and ``tensor_parallel_size``, or explicit
``devices=[...]`` on one machine. On a CPU a device is a process. Needs no PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from grpo.config.devices import reference_apart
from grpo.config.keys import ConfigError

if TYPE_CHECKING:
    from grpo.config.asynchronous import AsyncConfig
    from grpo.config.schema import Config

Kind = Literal["cuda", "cpu"]
#: Variable that tells Ray to leave a process the devices that it is shown.
KEEPS_DEVICES = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class DevicePlan:
    """Devices of each role, by number; on a cluster the numbers only count.

    Examples:
        >>> plan = DevicePlan("cuda", (0,), (), ((1,), (2,)), available=4)
        >>> print("\\n".join(plan.table()))
        train       GPU 0
        engine 0    GPU 1
        engine 1    GPU 2
        free        GPU 3
    """

    kind: Kind
    train: tuple[int, ...]  # one a rank
    reference: tuple[int, ...]  # one a copy of it; empty: none of its own
    engines: tuple[tuple[int, ...], ...]  # of each engine
    available: int | None = None  # None: a CPU has room for any number of processes

    def roles(self) -> dict[int, tuple[str, ...]]:
        """Who is on each device that is in use: ``train``, ``engine``, ``reference``.

        Examples:
            >>> DevicePlan("cuda", (0,), (1,), ((0,), (2,))).roles()
            {0: ('train', 'engine'), 1: ('reference',), 2: ('engine',)}
        """
        devices = {"train": self.train, "engine": tuple(d for own in self.engines for d in own),
                   "reference": self.reference}
        used = dict.fromkeys(device for several in devices.values() for device in several)
        return {device: tuple(role for role, several in devices.items() if device in several)
                for device in sorted(used)}

    def shared(self, *roles: str) -> bool:
        """Whether all of these roles, or of a single one any other, are on one device."""
        return any(set(roles) <= set(there) and len(there) > 1 for there in self.roles().values())

    def table(self) -> list[str]:
        """One line for the trainer, each copy of the reference, each engine and what is free."""
        rows = [("train", self.train),
                *((f"reference {i}", (device,)) for i, device in enumerate(self.reference)),
                *((f"engine {i}", devices) for i, devices in enumerate(self.engines))]
        used = {device for _, devices in rows for device in devices}
        rows.append(("free", tuple(d for d in range(self.available or 0) if d not in used)))
        unit = "GPU" if self.kind == "cuda" else "process"
        return [f"{name:<11} {unit} {', '.join(map(str, devices))}"
                for name, devices in rows if devices]


def plan_devices(config: AsyncConfig, *, kind: Kind, available: int | None) -> DevicePlan:
    """Give each role its devices, of ``available`` GPUs of the machine or cluster: its own, but for
    those that several roles name in ``devices``.

    Raises:
        ConfigError: for a device that is not there, or more than there are; with what each role
            asks for.
    """
    size = config.inference_model.tensor_parallel_size
    sections = {"train_model": (config.train_model, 1), "ref_model": (config.ref_model, 0),
                "inference_model": (config.inference_model, size)}
    if not reference_apart(config):
        del sections["ref_model"]
    wanted = {name: (len(section.devices), section.devices) if section.devices else
              (section.num_devices or default, None)
              for name, (section, default) in sections.items()}
    request = "; ".join(f"{name} wants {_words(count, devices)}"
                        for name, (count, devices) in wanted.items() if count)
    numbered = [device for _, devices in wanted.values() for device in devices or ()]
    if kind == "cpu":
        for name, (_, devices) in wanted.items():
            if devices is not None and len(set(numbered)) == len(numbered):
                raise ConfigError(f"{name}.devices={devices} numbers GPUs, but this run is on a "
                                  "CPU, where numbers only say which roles share their cores; use "
                                  "num_devices")
        if size > 1:
            raise ConfigError(f"inference_model.tensor_parallel_size={size} needs GPUs; on a CPU "
                              "raise inference_model.num_devices")
    if config.ray.address is not None and any(devices for _, devices in wanted.values()):
        raise ConfigError("devices=[...] numbers the GPUs of one machine, but ray.address="
                          f"{config.ray.address} is a cluster; use num_devices ({request})")
    for name, (_, devices) in wanted.items():
        if wrong := [d for d in devices or () if available is not None and d >= available]:
            raise ConfigError(f"{name}.devices={devices}: there is no GPU {wrong[0]}, the "
                              f"{available} of this machine are 0 to {available - 1}")
    taken = set(numbered)
    total = len(taken) + sum(count for count, devices in wanted.values() if not devices)
    if available is not None and total > available:
        raise ConfigError(f"{request}: {total} GPUs in all, but there are {available}; lower "
                          "num_devices, or train and generate on one GPU with grpo.py")
    free = iter(device for device in range(total + len(taken)) if device not in taken)
    chosen = {name: tuple(devices if devices is not None else [next(free) for _ in range(count)])
              for name, (count, devices) in wanted.items()}
    engines = chosen["inference_model"]
    if len(engines) % size:
        raise ConfigError(f"inference_model has {len(engines)} devices, which cannot be divided "
                          f"into engines of inference_model.tensor_parallel_size={size}")
    return DevicePlan(
        kind, chosen["train_model"], chosen.get("ref_model", ()),
        tuple(engines[i:i + size] for i in range(0, len(engines), size)), available)


def _words(count: int, devices: list[int] | None) -> str:
    return f"GPU {', '.join(map(str, devices))}" if devices else (
        f"{count} GPU{'s' * (count > 1)}")


def unused_reference(config: Config) -> list[str]:
    """The line that says so where ``ref_model`` asks for devices and there is no reference, or that
    of adapters, which is the trainer's own model.

    Examples:
        >>> from grpo.config.asynchronous import AsyncConfig
        >>> for line in unused_reference(AsyncConfig(ref_model={"num_devices": 2})):
        ...     print(line)
        ref_model.num_devices=2 stays idle and reserves nothing: without train.kl_to_ref_coeff \
or maxent.beta nothing is compared with a reference; set train.kl_to_ref_coeff=0.1 to use it
        >>> unused_reference(AsyncConfig())
        []
    """
    asked = config.ref_model.given()
    key = next((key for key in ("devices", "num_devices") if key in asked), None)
    if key is None or reference_apart(config):
        return []
    idle = f"ref_model.{key}={asked[key]} stays idle and reserves nothing: "
    if config.needs_reference:
        # Those that train are where it is.
        there = key == "devices" and sorted(asked[key]) == sorted(config.train_model.devices or ())
        return [] if there else [
            f"{idle}with train_model.lora.enabled=true the reference is the trainer's own model "
            "without its adapters; name another model as ref_model.name to use it"]
    fix = "set train.kl_to_ref_coeff=0.1 to use it"
    if config.train_model.lora.enabled:  # whose reference has no devices of its own
        fix = "with adapters that would be the trainer's own model without them; remove it"
    return [f"{idle}without train.kl_to_ref_coeff or maxent.beta nothing is compared with a "
            f"reference; {fix}"]


def gpu_names() -> list[str] | None:
    """``CUDA_VISIBLE_DEVICES`` of this process, in the order in which it counts GPUs."""
    ours = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [name.strip() for name in ours.split(",")] if ours else None


def visible(devices: tuple[int, ...]) -> str:
    """``CUDA_VISIBLE_DEVICES`` of a process with some of this process's devices.

    Examples:
        >>> visible((1, 2)) if "CUDA_VISIBLE_DEVICES" not in os.environ else "1,2"
        '1,2'
    """
    names = gpu_names()
    return ",".join(names[device] if names else str(device) for device in devices)


def positions(ids: Sequence[str]) -> tuple[int, ...]:
    """Numbers, ascending, that GPUs have in this process, by the names that Ray gives them.

    Raises:
        ConfigError: for one that this process does not see.

    Examples:
        >>> positions(["2", "1"]) if "CUDA_VISIBLE_DEVICES" not in os.environ else (1, 2)
        (1, 2)
    """
    names = gpu_names()
    found = [int(device) if names is None else names.index(device) for device in ids
             if (device.isdigit() if names is None else device in names)]
    if len(found) < len(ids):
        ours = os.environ.get("CUDA_VISIBLE_DEVICES", "(not set)")
        raise ConfigError(f"Ray gave the trainer the GPUs {','.join(ids)}, but this process has "
                          f"CUDA_VISIBLE_DEVICES={ours}; start the script with the "
                          "CUDA_VISIBLE_DEVICES that `ray start` had here")
    return tuple(sorted(found))


class Places:
    """Where Ray starts the actors of a plan.

    On one machine an actor is told its GPUs by number. On a ``cluster`` a placement group reserves
    them within ``timeout`` seconds, with the trainer's on this machine, held by an actor that does
    nothing else.

    Raises:
        ConfigError: if the cluster cannot do so, with the plan and what it has; or if it gives
            the trainer GPUs that this process does not see.
    """

    def __init__(self, plan: DevicePlan, *, cluster: bool, timeout: float = 300.0) -> None:
        self.plan, self._group, self._holder = plan, None, None
        #: Ray's handles of workers that were started ahead, by number of the engine.
        self.ahead: dict[int, Any] = {}
        #: Numbers of the trainer's GPUs on this machine.
        self.trainer = plan.train
        if cluster:
            self._reserve(timeout)

    def _reserve(self, timeout: float) -> None:
        import ray
        from ray.util import get_node_ip_address, placement_group

        gpus = self.plan.kind == "cuda"
        sizes = [len(self.plan.train), *map(len, self._others())]
        bundles = [{"CPU": 1.0, **({"GPU": float(size)} if gpus else {})} for size in sizes]
        bundles[0][f"node:{get_node_ip_address()}"] = 0.001  # which only this machine has
        self._group = placement_group(bundles, strategy="PACK")
        if not self._group.wait(timeout):
            self.release()
            raise ConfigError(
                f"the cluster could not reserve these devices within {timeout:g} s:\n  "
                + "\n  ".join(self.plan.table()) + f"\nit has {ray.cluster_resources()}; lower "
                "num_devices, or wait until they are free")
        self._holder = ray.remote(_Holder).options(num_cpus=1, **self._bundle(0)).remote()
        try:
            self.trainer = positions(ray.get(self._holder.devices.remote(), timeout=60))
        except BaseException:
            self.release()
            raise

    def engine(self, number: int) -> dict[str, Any]:
        """Ray's options for the actor of an engine."""
        return self._options(self.plan.engines[number], 1 + number)

    def reference(self, number: int) -> dict[str, Any]:
        """Ray's options for the actor of a copy of the reference model."""
        return self._options((self.plan.reference[number],), 1 + len(self.plan.engines) + number)

    def release(self) -> None:
        """Give back what a cluster has reserved."""
        import ray
        from ray.util import remove_placement_group

        if self._holder is not None:
            ray.kill(self._holder)
        if self._group is not None:
            remove_placement_group(self._group)
        self._group = self._holder = None

    def _others(self) -> list[tuple[int, ...]]:
        return [*self.plan.engines, *((device,) for device in self.plan.reference)]

    def _options(self, devices: tuple[int, ...], bundle: int) -> dict[str, Any]:
        # Ray would keep a record of every call, some 5 KB each, in its head process.
        options = {"num_cpus": 1, "enable_task_events": False}
        if self._group is not None:
            options |= self._bundle(bundle)
        if self.plan.kind == "cpu":
            return options | self._threads()
        if self._group is not None:
            return options
        # Set before the process starts, because some imports look for GPUs.
        return options | _environment(CUDA_VISIBLE_DEVICES=visible(devices),
                                      **{KEEPS_DEVICES: "1"})

    def _threads(self) -> dict[str, Any]:
        """Ray's options for a share of this machine's cores, unless the user has given one."""
        places = len(self.plan.roles())
        # Of those that this process may use, where the system tells.
        affinity = getattr(os, "sched_getaffinity", None)
        cores = len(affinity(0)) if affinity else os.cpu_count() or 1
        share = max(1, cores // places)
        # Where it is not set, Ray sets it to num_cpus.
        return _environment(OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", str(share)))

    def _bundle(self, number: int) -> dict[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {"num_gpus": self._group.bundle_specs[number].get("GPU", 0),
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=number)}


def _environment(**variables: str) -> dict[str, Any]:
    """Ray's options for an actor whose process starts with these variables."""
    return {"runtime_env": {"env_vars": variables}}


class _Holder:
    """Keeps the trainer's GPUs from being given to others."""

    def devices(self) -> list[str]:
        """As the raylet names them: numbers of this machine, or UUIDs."""
        import ray

        return [str(device) for device in ray.get_gpu_ids()]
