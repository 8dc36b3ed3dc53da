"""Times of the machine at hand: a short run of ``grpo.py`` on one of its devices, phase by phase.

What several devices have to do with one another stays as in :data:`~grpo.run.plan.costs.H200`.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from grpo import data
from grpo.config.asynchronous import AsyncConfig
from grpo.config.schema import Config
from grpo.policies.transformers import TransformersPolicy
from grpo.run.assemble import assemble
from grpo.run.device_memory import adapters_of
from grpo.run.plan.costs import Costs, Layout, decode_seconds, train_seconds
from grpo.run.plan.layouts import Planner, synchronous
from grpo.run.plan.options import PlanOptions
from grpo.run.plan.simulate import Work
from grpo.training.trainer import Trainer

#: Seconds that are measured, of which a part is for steps; a step takes as long as it takes.
SECONDS, _FOR_STEPS = 20.0, 0.75
#: Tokens of a completion at most, so that a step is short; of those of a few rows.
_LONGEST, _OF_FEW = 256, 64
_OVERLONG = "soft_overlong_punishment"


@dataclass(frozen=True)
class Measured:
    """What a short run took."""

    seconds: dict[str, float]  # of the phases of a step, medians
    mean_tokens: float  # of the completions of these steps
    generate: float  # of one batch
    lengths: np.ndarray  # of its completions
    few: float  # of a decode step with one row
    prompt_tokens: float  # mean
    whole_batch: bool  # whether finished rows stay in hand until the last is finished
    rollouts: int = 1  # of the batch, one after another


def calibrated(planner: Planner, *, seconds: float = SECONDS) -> Planner:
    """The same planner with the times, and where they were not given the lengths, of this machine.

    Raises:
        ConfigError: for a model that is not here.
        DoesNotFitError: for one that does not fit one device.
    """
    alone = replace(planner, config=_on_one_device(planner.config))
    config = _short(alone)
    work = replace(planner.work, max_tokens=config.max_tokens, prompt_tokens=1,
                   mean_tokens=min(planner.work.mean_tokens, config.max_tokens))
    measured = _measure(config, seconds)
    work = replace(work, prompt_tokens=round(measured.prompt_tokens),
                   mean_tokens=measured.mean_tokens)
    costs = _fitted(planner.costs, alone, work, measured)
    return replace(planner, costs=costs, options=_with_lengths(planner, measured))


def _on_one_device(config: AsyncConfig) -> AsyncConfig:
    """The same run without devices of any role's own."""
    none = {"num_devices": None, "devices": None}
    return config.changed(train_model=none, ref_model=none | {"sharded": None},
                          inference_model=none | {"tensor_parallel_size": 1})


def _short(planner: Planner) -> Config:
    """With completions that do not take long, and nothing else to do; but computed as the run of
    the ``planner`` would be, though compiling may not pay for rows so short."""
    values, training = planner.config.model_dump(), planner.training_of(_alone(planner))
    values["train_model"]["compile"] = training.compiled
    longest = min(planner.config.max_tokens, _LONGEST)
    values["inference_model"]["max_tokens"] = longest
    values["train"] |= {"packing": training.packed, "eval_frequency": "never",
                        "checkpoint_frequency": 0, "keep_checkpoints": None,
                        "overlong_buffer": None, "overlong_factor": None,
                        "max_sampling_rounds": None}  # each of which generates a batch
    values |= {"eval": {}, "logging": {}}
    if _OVERLONG in planner.config.env.weighted_rewards(""):  # within limits that these rows reach
        values["env"]["reward_options"] = (values["env"]["reward_options"] or {}) | {
            _OVERLONG: {"max_completion_len": longest, "soft_punish_cache": longest}}
    return synchronous(values)


def _alone(planner: Planner) -> Layout:
    """The layout that is measured: with adapters, if the run has them."""
    config = planner.config
    return Layout(train=1, engines=0, lora=adapters_of(
        config, enabled=config.train_model.lora.enabled))


def _measure(config: Config, seconds: float) -> Measured:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as at_end:
        print("a run on one device is started and measured", file=sys.stderr, flush=True)
        # A real file: what captures CUDA graphs and starts processes asks for its number.
        silent = at_end.enter_context(open(os.devnull, "w"))
        at_end.enter_context(contextlib.redirect_stdout(silent))
        trainer = assemble(config, Path(folder), None, at_end)
        at_end.callback(trainer.reporter.loggers.close)
        trainer.iterate()  # compiles and captures
        begin, rows = time.monotonic(), []
        while not rows or (time.monotonic() - begin + rows[-1]["time/step"]
                           < _FOR_STEPS * seconds):
            rows.append(trainer.iterate())
        return _measured(trainer, rows,
                         whole_batch=isinstance(trainer.collector.policy, TransformersPolicy))


def _measured(trainer: Trainer, rows: list[dict[str, float]], *, whole_batch: bool) -> Measured:
    def median(key: str) -> float:
        return statistics.median(row[key] for row in rows)

    rollout = trainer.collector.collect()
    lengths = rollout[data.ASSISTANT_MASK].sum(-1).cpu().numpy().astype(float)
    prompts = rollout[data.ATTENTION_MASK].sum(-1).float().mean().item() - lengths.mean()
    policy = trainer.collector.policy.with_sampling(
        max_tokens=min(_OF_FEW, trainer.collector.policy.sampling.max_tokens))
    few = []
    for row in range(min(3, len(rollout))):
        asked = rollout[row:row + 1].select(*policy.in_keys).clone()
        start = time.perf_counter()
        answered = policy(asked)
        few.append((time.perf_counter() - start)
                   / answered[data.ASSISTANT_MASK].sum().item())
    return Measured(
        {key.removeprefix("time/"): median(key) for key in rows[0] if key.startswith("time/")},
        median("tokens/response_mean"), trainer.collector.seconds["generate"], lengths, min(few),
        prompts, whole_batch, trainer.collector.rollouts_per_batch)


def _fitted(costs: Costs, planner: Planner, work: Work, measured: Measured) -> Costs:
    """Costs whose phases take what was measured."""
    shape, seconds, rows = planner.shape, measured.seconds, work.groups * work.rows
    alone = _alone(planner)
    training = replace(planner.training_of(alone), scores=False, own_scores=0)
    tokens = rows * measured.mean_tokens
    predicted = train_seconds(replace(costs, optimizer=0.0), shape, work, alone, training, tokens)
    faster = predicted / seconds["train"]
    phases = ("advantage", "canary", "generate", "optimizer", "reward", "sync", "train",
              "reference", "teacher", "proximal")
    rest = seconds["step"] - sum(seconds.get(phase, 0.0) for phase in phases)
    driver = max(0.0, rest) / rows
    floor, trained, with_adapter = measured.few, shape.parameters, 1.0
    if alone.lora:
        trained, with_adapter = sum(shape.adapter_sizes(alone.lora)), costs.lora_decode
    return replace(
        costs, source=f"this machine, measured for a step of {rows} rows, and between devices of "
                      "an H200",
        decode_floor=floor / with_adapter,
        decode_scale=_scale(measured, floor, lambda count: decode_seconds(
            replace(costs, decode_floor=0.0, decode_scale=1.0), shape, work, alone, count)),
        train_rate=costs.train_rate * faster, eager_rate=costs.eager_rate * faster,
        optimizer=seconds["optimizer"] / (
            training.optimizer_steps * training.epochs * trained), canary=seconds["canary"],
        driver_row=driver, driver_row_apart=driver * costs.driver_row_apart / costs.driver_row)


def _scale(measured: Measured, floor: float, gpu: Callable[[int], float]) -> float:
    """How many times what ``gpu`` says of so many rows their decode steps take, so that all of them
    together take what was measured."""
    alive = []
    for lengths in np.split(measured.lengths, measured.rollouts):
        steps = range(int(lengths.max()))
        alive += [len(lengths)] * len(steps) if measured.whole_batch else [
            int((lengths > step).sum()) for step in steps]
    alone = np.array([gpu(count) for count in alive])
    low, high = 0.0, measured.generate / alone.sum()
    for _ in range(60):
        middle = (low + high) / 2
        total = np.maximum(floor, middle * alone).sum()
        low, high = (middle, high) if total < measured.generate else (low, middle)
    return high if high > 1e-9 else 1.0


def _with_lengths(planner: Planner, measured: Measured) -> PlanOptions:
    """The options, with the lengths that were seen where none were given."""
    given, found = planner.options.model_fields_set, {}
    if "prompt_tokens" not in given:
        found["prompt_tokens"] = max(1, round(measured.prompt_tokens))
    if planner.config.max_tokens <= _LONGEST:  # else they were cut
        if "response_tokens" not in given:
            found["response_tokens"] = max(1, round(measured.lengths.mean()))
        if "sigma" not in given:
            found["sigma"] = float(np.log(measured.lengths).std())
    return planner.options.model_copy(update=found)
