"""What a batch is, and how long a run: completions of a device there, of all of them here.

TRL generates ``per_device_train_batch_size * num_processes * steps_per_generation`` completions at
a time, of which ``num_generations`` have one prompt, and takes an optimizer step on
``per_device_train_batch_size * num_processes * gradient_accumulation_steps`` of them, going
``num_iterations`` times over all (``GRPOConfig`` and the sampler of ``GRPOTrainer``, TRL 1.16). An
iteration here is one such generation with its steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from grpo.config.keys import ConfigError
from grpo.config.trl_names.kinds import COUNT
from grpo.config.trl_names.values import Values

_SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation",
          "generation_batch_size")
_EVALUATES, _SAVES = ("no", "steps", "epoch"), ("no", "steps", "epoch", "best")
_PASSES, _STEP = "train.epochs", "train.optim_batch_size"
_TURNS = ("train.dialog_turns_per_batch", "env.num_envs", "env.repeats")
#: Keys that say how long a run is, of which one does.
LENGTHS = ("train.max_steps", "train.data_epochs", "train.total_dialog_turns")


@dataclass(frozen=True)
class Sizes:
    """In completions, over all devices."""

    generated: int
    per_step: int
    passes: int


def sizes(values: Values) -> Sizes:
    """What is generated at a time, and trained.

    Raises:
        ConfigError: if one does not divide the other, as TRL requires, too.
    """
    devices = values.given.get("num_processes") or values.own.get("train_model.num_devices") or len(
        values.own.get("train_model.devices") or [0])
    step = values["per_device_train_batch_size"] * devices
    per_step, generated = step * values["gradient_accumulation_steps"], None
    many, rows = values["steps_per_generation"], values["generation_batch_size"]
    if many is not None and rows is not None:
        raise ConfigError(f"steps_per_generation={many} and generation_batch_size={rows} are the "
                          "same setting; give one")
    generated = rows or (step * many if many else per_step)
    group = _group(values)
    if generated % group:
        name = "num_generations" if group == values["num_generations"] else "env.repeats"
        raise ConfigError(f"{generated} completions are generated at a time (per_device_train_"
                          f"batch_size x {devices} devices x steps), which is no multiple of "
                          f"{name}={group}; change one of them")
    if generated * values["num_iterations"] % per_step or generated < per_step:
        raise ConfigError(f"{generated} completions are generated at a time, and an optimizer step "
                          f"has {per_step} of them; let the one be a multiple of the other "
                          "(steps_per_generation, gradient_accumulation_steps)")
    return Sizes(generated, per_step, values["num_iterations"])


def steps_per_batch(values: Values) -> int | None:
    """Optimizer steps of an iteration, for which keys of today count before names; None where those
    have several values, or leave the size of a batch open."""
    found = sizes(values) if values.any(*_SIZES) else None
    group = _group(values) if found or values.named("num_generations") else None
    step = found.per_step if found and found.per_step < found.generated else None
    if {_PASSES, _STEP} & {*values.swept}:
        return None
    passes = _today(values, _PASSES, values["num_iterations"])
    step = _today(values, _STEP, None if _STEP in values.own else step)
    if step is None:  # all of a batch
        return passes
    if {*_TURNS} & {*values.swept}:
        return None
    prompts = _today(values, "env.num_envs", found.generated // group if found else None)
    group = _today(values, "env.repeats", group)
    turns = _today(values, _TURNS[0], prompts * group if prompts and group else None)
    return turns and max(1, turns * passes // step)


def _group(values: Values) -> int:
    """Completions of a prompt; a key of today says it where no name does."""
    named = values.named("num_generations")
    return values["num_generations"] if named else _today(
        values, "env.repeats", values["num_generations"])


def _today(values: Values, key: str, other: int | None) -> int | None:
    """A count by its key of today; what is no count is the schema's to refuse."""
    value = values.own.get(key)
    return value if COUNT.allows(value) else other


def batch(values: Values) -> dict[str, Any]:
    """Prompts, completions of each, and those of an optimizer step."""
    if not values.any(*_SIZES):
        keys = {}
        if values.named("num_generations"):
            keys["env.repeats"] = values["num_generations"]
        if values.named("num_iterations"):
            keys["train.epochs"] = values["num_iterations"]
        return keys
    found, group = sizes(values), _group(values)
    if values.named(*_SIZES):
        values.notes.append(
            f"  {found.generated} completions are generated at a time, {group} of each of "
            f"{found.generated // group} prompts; an optimizer step has {found.per_step}. "
            "Micro-batches are the largest that fit, which changes no gradient")
    return {"env.num_envs": found.generated // group, "env.repeats": group,
            "train.dialog_turns_per_batch": None, "train.epochs": found.passes,
            "train.optim_batch_size": None if found.per_step == found.generated
            else found.per_step}


def length(values: Values) -> dict[str, Any]:
    """Optimizer steps as iterations, or passes over the prompts."""
    if any(values.own.get(key) is not None or key in values.swept for key in LENGTHS):
        return {}  # whoever gives one of them ends the run by it
    if values.named("iterations") and not values.named("max_steps"):
        return {}  # an earlier name of one
    steps = values["max_steps"]
    if steps > 0:
        many = _steps(values, "max_steps", "train.max_steps")
        if many > 1 and values.named("max_steps"):
            values.notes.append(f"  an iteration has {many} optimizer steps")
        return {"train.max_steps": math.ceil(steps / many), "train.data_epochs": None}
    if not values.any("num_train_epochs"):
        return {}
    return {"train.max_steps": None, "train.data_epochs": float(values["num_train_epochs"])}


def every(values: Values) -> dict[str, Any]:
    """How often the run evaluates and saves."""
    keys: dict[str, Any] = {}
    name = "evaluation_strategy" if values.named("evaluation_strategy") else "eval_strategy"
    when = _when(values, name, _EVALUATES)
    if values.named("eval_steps") and not values.named(name):
        when = "steps"
    if when == "steps":
        steps = values["eval_steps"] or 10  # as often as it logs
        keys["train.eval_frequency"] = _iterations(
            values, "eval_steps", steps, "train.eval_frequency")
    elif when == "no" and values.any(name):
        keys["train.eval_frequency"] = 0
    elif when == "epoch":
        values.notes.append(f"  {name}=epoch: train.eval_frequency says how often, in iterations")
    when, saves = _when(values, "save_strategy", _SAVES), values.any("save_strategy", "save_steps")
    if when == "no":
        keys["train.checkpoint_frequency"] = 0
    elif when == "steps" and saves:
        keys["train.checkpoint_frequency"] = _iterations(
            values, "save_steps", values["save_steps"], "train.checkpoint_frequency")
    elif when in ("epoch", "best"):
        values.notes.append(f"  save_strategy={when}: train.checkpoint_frequency says how often, "
                            "in iterations")
    if when != "no" and values["save_total_limit"]:
        keys["train.keep_checkpoints"] = values["save_total_limit"]
    return keys


def _when(values: Values, name: str, known: tuple[str, ...]) -> str:
    strategy = "no" if values[name] is False else str(values[name])  # which YAML makes of no
    if strategy not in known:
        raise ConfigError(f"{name}={strategy}: known are {', '.join(known)}")
    return strategy


def _iterations(values: Values, name: str, steps: float, key: str) -> int:
    if values.whole and key in values.own:
        return values.own[key]  # which wins
    if steps < 1:
        raise ConfigError(f"{name}={steps}: a share of the run is not an interval here; give a "
                          "number of optimizer steps")
    return max(1, round(steps / _steps(values, name, key)))


def _steps(values: Values, name: str, key: str) -> int:
    """Optimizer steps of an iteration, for a name that counts them."""
    many = steps_per_batch(values)
    if many is not None or not values.named(name):
        return many or 1
    given = f"{name}={values[name]}: it counts optimizer steps, "
    if swept := [one for one in (_PASSES, _STEP, *_TURNS) if one in values.swept]:
        raise ConfigError(f"{given}of which an iteration has not as many in each run of this sweep "
                          f"of {', '.join(swept)}; write {key}, in iterations")
    raise ConfigError(f"{given}and how many an iteration has with {_STEP}={values.own[_STEP]} "
                      f"depends on env.num_envs and env.repeats; give both, or write {key}, in "
                      "iterations")
