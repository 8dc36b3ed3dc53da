"""Whether two configurations describe the same run."""

from __future__ import annotations

from typing import Any

#: What a checkpoint cannot go on without: with another model, task or seed it is refused.
KEPT = ("model.", "ref_model.name:", "env.dataset:", "env.name", "env.id:", "env.path:",
        "env.dataset_mixture", "env.prompt_column:", "env.answer_column:", "env.task.",
        "train.seed:", "train_model.torch_dtype:", "train_model.quantization:",
        "train_model.lora.")

#: What is shown and kept, and where and how fast it is computed, but not what comes out. Every key
#: that is not here counts as changing the results, those that are yet to come included.
_NEUTRAL = (
    "resume:", "device:", "logging.", "eval.", "ray.",
    "env.max_reward_errors:", "env.url:", "env.port:", "env.forward_ports:",
    "train.exp_name:", "train.eval_frequency:", "train.checkpoint_frequency:",
    "train.keep_checkpoints:", "train.rollout_timeout:", "train.max_tokens_per_micro_batch:",
    "train.packing:", "train.proof_interval:",
    *(f"train_model.{key}:" for key in (
        "num_devices", "devices", "gradient_checkpointing", "compile", "attn_implementation",
        "head", "head_chunk_size")),
    *(f"ref_model.{key}:" for key in ("num_devices", "devices", "sharded")),
    *(f"inference_model.{key}:" for key in (
        "num_devices", "devices", "tensor_parallel_size", "engine", "url", "connections",
        "weight_sync", "max_num_seqs", "gpu_memory_utilization", "kv_cache_memory_bytes",
        "enforce_eager")),
    *(f"atropos.{key}:" for key in (
        "url", "timeout", "vllm_port", "forward_ports", "vllm_gpu", "bridge_config", "save_path",
        "log_dir", "dump_batch", "debug_loading", "benchmark")))
#: How many rewards are called at a time, which only matters to random numbers if they come from
#: other generators then.
_REWARD_CALLS = ("env.reward_workers:", "env.reward_processes:")
#: How long a run is only matters to a learning rate that falls towards its end, or rises for a
#: share of it.
_LENGTH = ("train.max_steps:", "train.data_epochs:", "train.total_dialog_turns:",
           "atropos.steps:")
#: Sections that only one of the scripts has, whose runs the others cannot go on with.
_SCRIPTS = ("ray", "atropos")


def changed_keys(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Keys whose values differ between two configurations, as ``key: old -> new``.

    Examples:
        >>> changed_keys({"train": {"seed": 1}}, {"train": {"seed": 2}})
        ['train.seed: 1 -> 2']
    """
    changes = []
    for key in sorted(old.keys() | new.keys()):
        before, after, name = old.get(key), new.get(key), f"{prefix}{key}"
        if isinstance(before, dict) and isinstance(after, dict):
            changes += changed_keys(before, after, name + ".")
        elif before != after:
            changes.append(f"{name}: {before} -> {after}")
    return changes


def identity_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Those of :func:`changed_keys` with which a checkpoint cannot go on at all."""
    return [change for change in changed_keys(old, new) if change.startswith(KEPT)]


def result_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Those of :func:`changed_keys` that change what a run computes.

    Examples:
        >>> result_changes({"optimizer": {"lr": 1e-5}, "train": {"keep_checkpoints": 3}},
        ...                {"optimizer": {"lr": 2e-5}, "train": {"keep_checkpoints": 9}})
        ['optimizer.lr: 1e-05 -> 2e-05']
    """
    neutral = _NEUTRAL
    if _reward_calls(old.get("env", {})) == _reward_calls(new.get("env", {})):
        neutral += _REWARD_CALLS
    if "auto" in (_server(old), _server(new)):  # which is asked whose it is
        neutral += ("inference_model.server:",)
    rate = new.get("optimizer", {})
    if rate.get("schedule", "constant") == "constant" and not 0 < rate.get("warmup_steps", 0) < 1:
        neutral += _LENGTH
    if "atropos" not in new:  # where it is also the size of a batch
        neutral += ("train.gradient_accumulation_steps:",)
    return [change for change in changed_keys(old, new) if not change.startswith(neutral)]


def _server(settings: dict[str, Any]) -> str:
    """Whose server generates, as it was typed."""
    return settings.get("inference_model", {}).get("server", "auto")


def group_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Of a configuration, the keys that a finished group follows from, and that a branch may have
    otherwise: its groups are made by its own rewards, prompts and temperature from the first on.

    Examples:
        >>> group_settings({"env": {"dataset": "gsm8k", "num_envs": 4, "reward": "math"},
        ...                 "inference_model": {"temperature": 1.0, "num_devices": 2}})
        {'env.reward': 'math', 'inference_model.temperature': 1.0}
    """
    others = (*KEPT, *_NEUTRAL, *_REWARD_CALLS, "env.num_envs:")
    keys = {f"{section}.{name}": value for section in ("env", "inference_model")
            for name, value in settings[section].items()}
    return {key: value for key, value in keys.items() if not f"{key}:".startswith(others)}


def _reward_calls(env: dict[str, Any]) -> tuple[bool, bool]:
    """Whether rewards are called side by side, and in processes, whose generators are seeded by the
    sample, where the run's own go on from call to call."""
    workers, processes = env.get("reward_workers", 1), env.get("reward_processes")
    return workers > 1, workers > 1 if processes is None else processes > 0


def with_defaults(old: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """An earlier configuration, with the keys of its script that have come since at their defaults.

    Examples:
        >>> with_defaults({"train": {"seed": 1}}, {"train": {"seed": 0, "new": 2}, "ray": {}})
        {'train': {'seed': 1, 'new': 2}}
    """
    filled = dict(old)
    for key, value in defaults.items():
        if key not in filled and key not in _SCRIPTS:
            filled[key] = value
        elif isinstance(value, dict) and isinstance(filled.get(key), dict):
            filled[key] = with_defaults(filled[key], value)
    return filled
