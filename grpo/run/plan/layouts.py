"""The layouts that a number of GPUs allows, what each needs of a device, and how long its step is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from grpo.config.asynchronous import AsyncConfig, with_workers
from grpo.config.devices import reference_apart
from grpo.config.schema import Config, ConfigError, load_config
from grpo.config.unread import value_at
from grpo.policies.model_shape import ModelShape
from grpo.run import fast_defaults
from grpo.run.build import resolve_backend
from grpo.run.device_memory import adapters_of, role_ledgers, run_ledger
from grpo.run.ledger import Ledger
from grpo.run.placement import plan_devices
from grpo.run.plan.costs import Costs, Layout, Training, phases_of
from grpo.run.plan.options import PlanOptions
from grpo.run.plan.simulate import Outcome, Phases, Simulation, Work

#: A layout whose step is so many times the shortest is as good, if it has fewer GPUs.
_ALIKE = 1.03
_ROLES = ("train_model", "inference_model", "ref_model")
#: Devices that train, in the layouts that are tried.
_TRAIN = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class Planned:
    """A layout, what it needs and how long it takes."""

    layout: Layout
    keys: tuple[str, ...]
    ledgers: dict[str, Ledger]  # of a device of each role
    training: Training
    phases: Phases
    rows: int  # that an engine has in hand, when it has most
    outcome: Outcome | None  # None: it does not fit

    @property
    def script(self) -> str:
        return "grpo-async.py" if self.layout.staleness else "grpo.py"


@dataclass(frozen=True)
class Planner:
    """All layouts of one run.

    Args:
        config: of ``grpo-async.py``; what it says of devices and adapters is kept.
        given: the keys that the user has given, which no layout changes.
        options: of the plan.
        path: of the model's ``config.json``.
        costs: of a device.
        kind: of the devices.
        memory: bytes of one; of a CPU's processes all together.
    """

    config: AsyncConfig
    given: frozenset[str]
    options: PlanOptions
    path: str
    costs: Costs
    kind: str
    memory: int

    @property
    def shape(self) -> ModelShape:
        return ModelShape.of(self.path)

    @property
    def work(self) -> Work:
        """The batches of the run."""
        config, options = self.config, self.options
        fixed = config.inference_model.ignore_eos
        mean = options.response_tokens or config.max_tokens / (1 if fixed else 2)
        if mean > config.max_tokens:
            raise ConfigError(f"response_tokens={mean:g} is more than inference_model.max_tokens="
                              f"{config.max_tokens}, at which completions are cut; lower it")
        return Work(groups=config.groups_per_batch, rows=config.env.repeats,
                    prompt_tokens=options.prompt_tokens, max_tokens=config.max_tokens,
                    mean_tokens=mean, sigma=0.0 if fixed else options.sigma,
                    seed=config.train.seed)

    def plans(self) -> tuple[list[Planned], list[ConfigError]]:
        """Those that fit by their time a step, then those that do not; and why other layouts, which
        the user has not asked for, are no runs of this configuration.

        Raises:
            ConfigError: if there is no run at all.
        """
        self._check_numbers()
        found, refused = [], []
        for layout in self.layouts():
            try:
                found.append(self.plan(layout))
            except ConfigError as error:
                refused.append(error)
        if not found:
            raise refused[0] if refused else ConfigError(self._no_layout())
        return sorted(found, key=lambda plan: (
            round(plan.outcome.step, 2) if plan.outcome else float("inf"),
            plan.layout.devices, plan.layout.tensor_parallel)), refused

    def _no_layout(self) -> str:
        keys = [f"{role}.{key}" for role in _ROLES
                for key in ("num_devices", "devices", "tensor_parallel_size")]
        said = ", ".join(f"{key}={value_at(self.config, key)}" for key in keys if key in self.given)
        return (f"num_gpus={self.options.num_gpus}: no layout has what is given: {said}; raise "
                "num_gpus, or remove one of these")

    def _check_numbers(self) -> None:
        """Refuse ``devices=[...]`` that no layout can keep."""
        taken: set[int] = set()
        for role, numbers in self._numbered():
            given = f"{role}.devices={numbers}"
            if self.kind == "cpu":
                raise ConfigError(f"{given} numbers GPUs, but with device=cpu devices are "
                                  "processes; use num_devices")
            if missing := [number for number in numbers if number >= self._gpus]:
                raise ConfigError(f"{given}: there is no GPU {missing[0]}; those of one host are 0 "
                                  f"to {self._gpus - 1}; lower the number, or raise num_gpus="
                                  f"{self.options.num_gpus}")
            if shared := taken.intersection(numbers):
                raise ConfigError(f"{given}: another role is on GPU {min(shared)} too, and how "
                                  "long a step takes then is not known; give each role GPUs of "
                                  "its own")
            taken |= set(numbers)

    def _numbered(self) -> list[tuple[str, list[int]]]:
        """The roles whose GPUs the user has numbered; of a reference only if there is one."""
        roles = _ROLES if reference_apart(self.config) else _ROLES[:2]
        sections = [(role, getattr(self.config, role).devices) for role in roles]
        return [(role, numbers) for role, numbers in sections if numbers is not None]

    @property
    def _gpus(self) -> int:
        """Numbers are of the GPUs of one host."""
        options = self.options
        return min(options.num_gpus, options.gpus_per_host) if self._numbered() else (
            options.num_gpus)

    def layouts(self) -> Iterator[Layout]:
        """Those of ``grpo.py`` without devices for engines; else all GPUs are taken, as far as the
        devices that train are on one host."""
        config, most = self.config, min(self._gpus, self.options.gpus_per_host)
        loras = [config.train_model.lora.enabled]
        if "train_model.lora.enabled" not in self.given:
            loras = [False, True]
        for lora in loras:
            for train in self._choices("train_model", config.train_model.ranks,
                                       [n for n in _TRAIN if n <= most]):
                references = [0]
                if config.needs_reference and (not lora or config.ref_model.name):
                    references = self._choices("ref_model", config.ref_model.count, [0, 1, 2, 4])
                for reference in references:
                    yield from self._with_engines(train, reference, lora)

    def _with_engines(self, train: int, reference: int, lora: bool) -> Iterator[Layout]:
        config, options = self.config, self.options
        adapters = adapters_of(config, enabled=lora)
        left = self._gpus - train - reference
        own, count = self._engines_given, config.inference_model.count
        # Alone on one device grpo.py takes the first; an engine on several has them for itself.
        shares = (config.train_model.devices in (None, [0]) if train == 1 else
                  self._backend == "vllm") and config.inference_model.tensor_parallel_size == 1
        if shares and not own and not reference and train <= self._gpus:
            yield Layout(train=train, engines=0, lora=adapters)
        for size in self._choices("inference_model.tensor_parallel_size",
                                  config.inference_model.tensor_parallel_size,
                                  self._tensor_parallel()):
            devices = count if own else left
            if not 0 < devices <= left or devices // size < 1 or own and devices % size:
                continue
            for staleness in sorted({0, config.train.staleness}):
                if staleness or self._gpus <= options.gpus_per_host:
                    yield Layout(train=train, engines=devices // size, tensor_parallel=size,
                                 reference=reference, lora=adapters, staleness=staleness)

    def _tensor_parallel(self) -> list[int]:
        """Devices of an engine: as many as divide the heads of keys; processes share nothing."""
        most = min(self.options.gpus_per_host, self.shape.kv_heads)
        return [2**k for k in range(most.bit_length()) if self.kind == "cuda" or not k]

    def _choices(self, key: str, value: int, others: list[int]) -> list[int]:
        """The value of a key, or of a role's devices, that was given, else all others."""
        return [value] if key in self.given or self._has_devices(key) else others

    def _has_devices(self, role: str) -> bool:
        """Whether the user has said which devices a role has, or how many."""
        return f"{role}.num_devices" in self.given or role in dict(self._numbered())

    @property
    def _engines_given(self) -> bool:
        return self._has_devices("inference_model") and self.config.inference_model.count > 0

    def plan(self, layout: Layout) -> Planned:
        """Memory and time of a layout."""
        config, keys = self._config_of(layout)
        config, training = self._as_chosen(config, layout)
        ledgers = self._ledgers(config, layout)
        phases = phases_of(self.costs, self.shape, self.work, layout, training,
                           hosts=-(-layout.devices // self.options.gpus_per_host))
        limit = self._rows_at_a_time(config, layout, ledgers)
        outcome = (self._simulate(layout, phases, limit=limit) if self.fits(ledgers, layout)
                   else None)
        started = (config.turns_per_batch * (1 + layout.staleness) // layout.engines
                   if layout.engines else config.env.num_envs * config.env.repeats)
        return Planned(layout, tuple(keys), ledgers, training, phases, min(limit, started), outcome)

    def recommended(self, plans: list[Planned], *, lora: bool) -> Planned | None:
        """The shortest step, without the engines that it does not need; None: nothing fits."""
        fitting = [plan for plan in plans
                   if plan.outcome is not None and (plan.layout.lora is not None) == lora]
        if not fitting:
            return None
        limit = _ALIKE * min(plan.outcome.step for plan in fitting)
        alike = {}
        for plan in fitting:  # of those that differ in tensor parallelism alone, the simplest
            key = (plan.layout.train, plan.layout.reference, plan.layout.staleness)
            if plan.outcome.step <= limit and (
                    key not in alike
                    or plan.layout.tensor_parallel < alike[key].layout.tensor_parallel):
                alike[key] = plan
        return min((self._without_idle(plan, limit) for plan in alike.values()),
                   key=lambda plan: (plan.layout.devices, plan.outcome.step))

    def _without_idle(self, plan: Planned, limit: float) -> Planned:
        """With as few engines as keep a step within so many seconds."""
        too_few, enough = 0, plan
        if self._engines_given:
            return plan
        while enough.layout.engines - too_few > 1:
            middle = (too_few + enough.layout.engines) // 2
            tried = self.plan(replace(plan.layout, engines=middle))
            if tried.outcome is not None and tried.outcome.step <= limit:
                enough = tried
            else:
                too_few = middle
        return enough

    def fits(self, ledgers: dict[str, Ledger], layout: Layout) -> bool:
        if self.kind == "cuda":
            return all(ledger.total <= self.memory for ledger in ledgers.values())
        counts = {"train": 1, "engine": layout.engines, "reference": layout.reference}
        return sum(counts[role] * ledger.total for role, ledger in ledgers.items()) <= self.memory

    def _config_of(self, layout: Layout) -> tuple[Config, list[str]]:
        """The configuration of a layout, and its keys that the user has not given."""
        chosen: dict[str, dict[str, Any]] = {
            "train_model": {"num_devices": layout.train}, "inference_model": {}, "ref_model": {},
            "train": {}}
        if layout.engines:
            chosen["inference_model"] = {
                "num_devices": layout.engines * layout.tensor_parallel,
                "tensor_parallel_size": layout.tensor_parallel}
            chosen["train"] = {"staleness": layout.staleness}
        if layout.reference:
            chosen["ref_model"] = {"num_devices": layout.reference}
        values = self.config.model_dump()
        if not layout.reference:  # also that of adapters, which is the trainer's own model
            values["ref_model"] |= {"num_devices": None, "devices": None, "sharded": None}
        for section, keys in chosen.items():
            values[section] |= keys
        values["train_model"]["lora"]["enabled"] = layout.lora is not None
        if layout.devices > self.options.gpus_per_host:
            values["ray"]["address"] = "auto"
        if layout.staleness == 0:
            del values["train"]["staleness"]
            if not layout.has_workers:
                del values["train"]["rollout_timeout"]
            config = with_workers(synchronous(values))
            chosen["train"] = {}
        else:
            config = load_config(values, AsyncConfig)
        lines = [f"{section}.{key}={value}" for section, keys in chosen.items()
                 for key, value in keys.items()]
        if layout.lora is not None:
            lines.append("train_model.lora.enabled=true")
        if layout.devices > self.options.gpus_per_host:
            lines.append("ray.address=auto")
        return config, [line for line in lines if not self._stays(line.partition("=")[0])]

    def _stays(self, key: str) -> bool:
        """Whether the user's own value of a key is that of the layout."""
        role, _, name = key.partition(".")
        if name == "num_devices" and role in dict(self._numbered()):
            return True
        return key in self.given and value_at(self.config, key) is not None

    def training_of(self, layout: Layout) -> Training:
        """How the trainer of a layout computes."""
        return self._as_chosen(self._config_of(layout)[0], layout)[1]

    def _as_chosen(self, config: Config, layout: Layout) -> tuple[Config, Training]:
        """With what a run chooses by itself where its configuration leaves it open."""
        sized = config.for_problems(10_000)  # only whether compiling pays depends on the number
        chosen, _ = fast_defaults.choose(
            sized, self.shape, lambda changed: self._ledgers(changed, layout)["train"],
            device=torch.device(self.kind), dtype=self._dtype, backend=self._backend,
            row_tokens=self._row_tokens, room=self.memory)
        budget = chosen.train.max_tokens_per_micro_batch
        if budget is None:
            pieces = chosen.train.gradient_accumulation_steps
            rows = -(-chosen.rows_per_optimizer_step // pieces // layout.train)
            budget = max(1, rows) * self._row_tokens
        return chosen, Training(
            compiled=bool(chosen.train_model.compile), packed=bool(chosen.train.packing),
            micro_batch=budget, epochs=chosen.train.epochs, scores=chosen.needs_reference,
            optimizer_steps=chosen.turns_per_batch // chosen.rows_per_optimizer_step,
            own_scores=_own_scores(chosen),
            checkpointing=chosen.train_model.gradient_checkpointing)

    def _ledgers(self, config: Config, layout: Layout) -> dict[str, Ledger]:
        of_run = partial(
            run_ledger, config, self.path, torch.device(self.kind), self._dtype, self._backend,
            max_model_len=self._row_tokens, memory=self.memory)
        if not layout.engines:
            return {"train": of_run()}
        places = plan_devices(config, kind=self.kind, available=None)
        return role_ledgers(config, places, self.path, torch.device(self.kind), self._dtype,
                            self._backend, max_model_len=self._row_tokens, memory=self.memory)

    def _rows_at_a_time(self, config: Config, layout: Layout, ledgers: dict[str, Ledger]) -> int:
        """Of an engine: what it is asked for, as far as its KV cache has room."""
        asked = config.inference_model.max_num_seqs or min(config.turns_per_batch, 1024)
        [cache] = [row.bytes for row in ledgers.get("engine", ledgers["train"]).rows
                   if row.name == "KV cache"]
        tokens = cache * layout.tensor_parallel / self.shape.kv_bytes_per_token(self._dtype)
        return max(1, min(asked, int(tokens / (self.work.prompt_tokens + self.work.mean_tokens))))

    def _simulate(self, layout: Layout, phases: Phases, *, limit: int) -> Outcome:
        in_flight = self.config.train.update_at != "group_border" and self._backend == "vllm"
        return Simulation(
            self.work, phases, engines=max(1, layout.engines), staleness=layout.staleness,
            in_flight=in_flight, references=layout.reference, limit=limit,
            oversample=self.config.train.oversample if layout.staleness else 0.0,
            rollout=None if layout.engines else self.config.env.num_envs).go()

    @property
    def _dtype(self) -> torch.dtype:
        name = self.config.train_model.torch_dtype
        if name == "auto":
            name = "bfloat16" if self.kind == "cuda" else "float32"
        return getattr(torch, name)

    @property
    def _backend(self) -> str:
        if self.kind == "cuda" and self.config.inference_model.backend == "auto":
            return "vllm"  # which need not be installed here
        return resolve_backend(self.config)

    @property
    def _row_tokens(self) -> int:
        """Of the longest row."""
        return self.config.inference_model.max_model_len or (
            self.options.prompt_tokens + self.config.max_tokens)


def _own_scores(config: Config) -> int:
    """Forward passes of the trainer over a batch, beside the reference's."""
    train = config.train
    by_policy = train.proximal == "scored" or train.entropy_top_fraction is not None
    return by_policy + (config.distill.teacher is not None)


def synchronous(values: dict[str, Any]) -> Config:
    """What ``grpo.py`` makes of these values, the keys that it does not know left out."""
    known = Config.model_fields["train"].annotation.model_fields
    values = {section: keys for section, keys in values.items() if section in Config.model_fields}
    values["train"] = {key: value for key, value in values["train"].items() if key in known}
    return load_config(values)
