"""Names of TRL that say something only together: one function a group, from values to keys of
today.

What a batch is, and how long a run, is in :mod:`grpo.config.trl_names.batch`, what the objective in
:mod:`grpo.config.trl_names.loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpo.config.keys import ConfigError
from grpo.config.trl_names.batch import batch, every, length, steps_per_batch
from grpo.config.trl_names.loss import loss
from grpo.config.trl_names.parts import data, engine, folder, loggers, lora, precision, rewards
from grpo.config.trl_names.values import Values

#: ``vllm_importance_sampling_mode`` -> correction.
_CORRECTIONS = {"token_truncate": "tis", "token_mask": "mis", "sequence_truncate": "sequence_tis",
                "sequence_mask": "sequence_mis"}


def advantage(values: Values) -> dict[str, Any]:
    """How rewards are scaled."""
    scale = {True: "group", False: "none"}.get(values["scale_rewards"], values["scale_rewards"])
    if scale not in ("group", "none", "batch"):
        raise ConfigError(f"scale_rewards={scale}: known are group, none and batch")
    if scale == "batch":
        raise ConfigError("scale_rewards=batch: rewards are not divided by their own deviation "
                          "in the batch; write train.advantage_estimator=batch_norm, which divides "
                          "by that of what is left when the group's mean is taken off")
    return {"train.advantage_estimator": {"group": "group_norm", "none": "group_mean"}[scale]}


def kl(values: Values) -> dict[str, Any]:
    """The KL to the reference."""
    beta, corrected = values["beta"], values["use_bias_correction_kl"]
    if not values.any("beta"):
        return {"train.kl_estimator": "unbiased_k3" if corrected else "k3"}
    if not beta:
        return {"train.kl_to_ref_coeff": None, "train.kl_estimator": None}
    estimator = "unbiased_k3" if corrected else "k3"
    estimator = values.today("train.kl_estimator", "use_bias_correction_kl", estimator)
    if estimator == "unbiased_k3" and values["importance_sampling_level"] == "sequence":
        raise ConfigError(f"beta={beta} importance_sampling_level=sequence: TRL weighs the KL by "
                          "the ratio of the sequence, which is not here; write "
                          "use_bias_correction_kl=false")
    return {"train.kl_to_ref_coeff": float(beta), "train.kl_estimator": estimator}


def mismatch(values: Values) -> dict[str, Any]:
    """Between what vLLM sampled from and what is trained."""
    proximal = values.own.get(
        "train.proximal", "current" if steps_per_batch(values) == 1 else "scored")
    vllm = values["use_vllm"] if values.whole else values.given.get("use_vllm", True)
    if not (vllm and values["vllm_importance_sampling_correction"]):
        return {"train.proximal": proximal, "train.mismatch": None}
    mode, low = values["vllm_importance_sampling_mode"], values["vllm_importance_sampling_clip_min"]
    high = values["vllm_importance_sampling_cap"] or values["vllm_importance_sampling_clip_max"]
    if mode not in _CORRECTIONS:
        raise ConfigError(f"vllm_importance_sampling_mode={mode}: known are "
                          f"{', '.join(_CORRECTIONS)}")
    if high is None or (low is not None and mode.endswith("truncate")):
        raise ConfigError(f"vllm_importance_sampling_mode={mode} with clip_min={low}, clip_max="
                          f"{high}: give clip_max, and clip_min with a mask alone")
    bound = float(high) if low is None else [float(low), float(high)]
    return {"train.proximal": proximal, "train.mismatch": {_CORRECTIONS[mode]: bound}}


def entropy(values: Values) -> dict[str, Any]:
    """The bonus, its controller, and the tokens that the objective is applied to."""
    keys: dict[str, Any] = {}
    share, coefficient = values["top_entropy_quantile"], values["entropy_coef"]
    if values.named("top_entropy_quantile"):
        keys["train.entropy_top_fraction"] = None if share >= 1 else float(share)
    if values["use_adaptive_entropy"]:
        keys |= {key: values.today(key, name, float(values[name])) for key, name in (
            ("train.entropy_coeff", "entropy_coef"),
            ("entropy_controller.target", "entropy_target"),
            ("entropy_controller.step", "entropy_coef_delta"),
            ("entropy_controller.minimum", "entropy_coef_min"),
            ("entropy_controller.maximum", "entropy_coef_max"))}
    elif values.named("entropy_coef"):
        keys["train.entropy_coeff"] = float(coefficient) if coefficient else None
    return keys


#: ``lr_scheduler_type`` -> ``optimizer.schedule``.
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant",
              "constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}


def schedule(values: Values) -> dict[str, Any]:
    """The learning rate over the run."""
    kind, options = str(values["lr_scheduler_type"]), dict(values["lr_scheduler_kwargs"] or {})
    keys: dict[str, Any] = {}
    if kind not in _SCHEDULES:
        raise ConfigError(f"lr_scheduler_type={kind}: known are {', '.join(_SCHEDULES)}")
    if values.any("lr_scheduler_type"):
        keys["optimizer.schedule"] = _SCHEDULES[kind]
    if kind == "cosine_with_min_lr":
        rate, least = options.pop("min_lr_rate", None), options.pop("min_lr", None)
        if least is not None:
            rate = _share_of_the_rate(values, least)
        if rate is None:
            raise ConfigError("lr_scheduler_type=cosine_with_min_lr needs lr_scheduler_kwargs="
                              "{min_lr_rate: ...} or {min_lr: ...}")
        keys["optimizer.final_lr_fraction"] = rate
    if options:
        raise ConfigError(f"lr_scheduler_kwargs={options}: not read by lr_scheduler_type={kind}; "
                          "leave them out")
    if kind == "constant" and values.named("lr_scheduler_type") or not values.any(
            "warmup_steps", "warmup_ratio"):
        return keys  # Transformers' constant has no warm-up
    keys["optimizer.warmup_steps"] = values["warmup_steps"] or values["warmup_ratio"]
    return keys


def _share_of_the_rate(values: Values, least: Any) -> float:
    """``min_lr`` as a share of the rate; where none is given that depends on the task."""
    given = f"lr_scheduler_kwargs={{min_lr: {least}}}"
    if "optimizer.lr" in values.swept:
        raise ConfigError(f"{given}: it is a share of the rate here, which has several values in "
                          "this sweep; write min_lr_rate")
    rate = values.own.get("optimizer.lr")
    if rate is None and not values.any("learning_rate"):
        raise ConfigError(f"{given}: it is a share of the rate here; give learning_rate, too, or "
                          "write min_lr_rate")
    rate = values["learning_rate"] if rate is None else rate
    if not all(isinstance(one, int | float) for one in (least, rate)) or rate <= 0:
        raise ConfigError(f"{given} with optimizer.lr={rate}: expected numbers, and a rate above 0")
    return least / rate


_OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw",
               "adamw_8bit": "adamw_8bit", "adamw_bnb_8bit": "adamw_8bit",
               "adafactor": "adafactor"}


def optimizer(values: Values) -> dict[str, Any]:
    """Which one, and what has another form."""
    kind, keys = str(values["optim"]), {}
    if kind not in _OPTIMIZERS:
        raise ConfigError(f"optim={kind}: known are {', '.join(_OPTIMIZERS)}")
    if values.any("optim"):
        keys["optimizer.name"] = _OPTIMIZERS[kind]
    if values.any("adam_beta1", "adam_beta2") and kind != "adafactor":
        keys["optimizer.betas"] = [float(values["adam_beta1"]), float(values["adam_beta2"])]
    if values.any("max_grad_norm"):
        keys["optimizer.clip_grad_norm"] = values["max_grad_norm"] or None
    return keys


def device(values: Values) -> dict[str, Any]:
    """A CPU on purpose."""
    return {"device": "cpu"} if values["use_cpu"] else {}


#: Group -> from values to keys; those of the first line are what a preset is about.
OF_THE_OBJECTIVE = ("loss", "advantage", "kl", "mismatch", "entropy")
GROUPS: dict[str, Callable[[Values], dict[str, Any]]] = {
    "data": data, "batch": batch, "length": length, "loss": loss, "advantage": advantage, "kl": kl,
    "mismatch": mismatch, "entropy": entropy, "rewards": rewards, "schedule": schedule,
    "optimizer": optimizer, "precision": precision, "lora": lora, "engine": engine,
    "every": every, "loggers": loggers, "folder": folder, "device": device,
}
