"""Names of TRL that say what the objective is, with its range and its options."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from grpo.config.keys import ConfigError
from grpo.config.recipes import recipes
from grpo.config.trl_names.values import Values

#: ``loss_type`` -> objective and aggregation.
LOSSES = {
    "grpo": ("ppo_clip", "sequence"), "dapo": ("ppo_clip", "token"), "bnpo": ("ppo_clip", "token"),
    "dr_grpo": ("ppo_clip", "dr_grpo"), "cispo": ("cispo", "token"), "sapo": ("sapo", "sequence"),
}
_NOT_HERE = {
    "vespo": "write sapo, or train.objective=cispo",
    "luspo": "write train.objective=gspo train.aggregation=dr_grpo, whose gradient is TRL's "
             "divided by inference_model.max_tokens",
}
_RANGE, _TEMPERATURES = ("epsilon", "epsilon_high"), ("sapo_temperature_pos",
                                                      "sapo_temperature_neg")
#: Those whose range is about a ratio of 1, as TRL's ``epsilon`` is.
_CLIPPED = ("ppo_clip", "gspo", "gspo_token")


def loss(values: Values) -> dict[str, Any]:
    """The objective, its range and its options."""
    kind, level = values["loss_type"], values["importance_sampling_level"]
    if kind not in LOSSES:
        known = f"known are {', '.join(LOSSES)}"
        raise ConfigError(f"loss_type={kind}: {_NOT_HERE.get(kind, known)}")
    if level not in ("token", "sequence"):
        raise ConfigError(f"importance_sampling_level={level}: known are token and sequence")
    objective, aggregation = LOSSES[kind]
    keys: dict[str, Any] = {"train.aggregation": aggregation} if values.any("loss_type") else {}
    if _is_swept(values):
        return keys
    chosen = _chosen(values)
    objective = _with_ratios_of(level, values, chosen or objective,
                                f"train.objective={chosen}" if chosen else f"loss_type={kind}")
    if values.any("loss_type", "importance_sampling_level"):
        keys["train.objective"] = objective
    wins = "train.clip_epsilon" in values.own and (values.whole or not values.named(*_RANGE))
    if not wins and (values.named(*_RANGE) or values.whole and objective in _CLIPPED
                     or not chosen and values.any("loss_type", "importance_sampling_level")):
        keys |= _clip(values, objective)
    if values["delta"] is not None:
        if objective != "ppo_clip":
            raise ConfigError(f"delta={values['delta']}: it bounds the ratio of tokens, which "
                              f"train.objective={objective} does not have; leave it out")
        keys["train.objective_options"] = {"delta": float(values["delta"])}
    if objective != "sapo":
        if values.named(*_TEMPERATURES):
            values.notes.append(f"sapo_temperature_*: not read by train.objective={objective}")
    elif values.named(*_TEMPERATURES) or not chosen:
        keys["train.objective_options"] = {
            f"temperature_{sign}": float(values[f"sapo_temperature_{sign[:3]}"])
            for sign in ("positive", "negative")}
    if kind == "bnpo":
        values.notes.append("loss_type=bnpo is a mean of each micro-batch, here of the optimizer "
                            "batch, as dapo; the same where there is one micro-batch")
    return keys


def refuse_both(preset: str, loss_type: Any) -> None:
    """Refuse a preset beside ``loss_type``, where neither stands behind the other.

    Args:
        preset: as it was given, ``preset=NAME``; none is no preset.
        loss_type: None if it is not given.
    """
    if loss_type is not None and preset not in ("", "preset=none"):
        raise ConfigError(f"{preset} and loss_type={loss_type} both say what the objective is; "
                          "give one")


def _is_swept(values: Values) -> bool:
    """Whether runs of a sweep have several objectives, of which each has its own range."""
    swept = [key for key in ("preset", "train.objective") if key in values.swept]
    if not swept or values.named("loss_type"):
        return False
    for name in (*_RANGE, "delta", *_TEMPERATURES, "importance_sampling_level"):
        if values.named(name):
            key = {"importance_sampling_level": "train.objective"}.get(
                name, "train.clip_epsilon" if name in _RANGE else "train.objective_options")
            raise ConfigError(f"{name}={values[name]}: what it means depends on {swept[0]}, which "
                              f"has several values in this sweep; write {key}")
    return True


def _chosen(values: Values) -> str | None:
    """The objective of a key of today, or of a preset, where no name says another."""
    objective = values.own.get("train.objective")
    if values.named("loss_type"):
        return objective if values.whole else None
    file = recipes() / "preset" / f"{values.own.get('preset')}.yaml"
    if objective is None and file.is_file():
        return OmegaConf.select(OmegaConf.load(file), "train.objective")
    return objective


def _with_ratios_of(level: str, values: Values, objective: str, said: str) -> str:
    """The objective with ratios of tokens or of sequences."""
    if level == "token":
        named = values.named("importance_sampling_level")
        return "ppo_clip" if objective == "gspo" and named else objective
    if objective not in _CLIPPED:
        raise ConfigError(f"importance_sampling_level=sequence with {said}: ratios of sequences "
                          "are for grpo, dapo, bnpo and dr_grpo, as train.objective=gspo")
    return "gspo" if objective == "ppo_clip" else objective


def _clip(values: Values, objective: str) -> dict[str, Any]:
    low, high = values["epsilon"], values["epsilon_high"]
    high = low if high is None else high
    if objective == "sapo":
        if values.named(*_RANGE):
            values.notes.append("epsilon: train.objective=sapo has no range")
        return {"train.clip_epsilon": None}
    if objective == "cispo":
        if high < 1:
            raise ConfigError(f"train.objective=cispo epsilon_high={high}: it is the bound of the "
                              "ratio itself, below which every token would be; give one above 1, "
                              "such as 5.0")
        return {"train.clip_epsilon": [1.0, round(high - 1, 12)]}
    return {"train.clip_epsilon": [float(low), float(high)]}
