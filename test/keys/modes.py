"""Every mode of a run: by script, engine and way of the weights, and by what is optimised."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from grpo.config.asynchronous import AsyncConfig
from grpo.config.atropos import AtroposConfig
from grpo.config.schema import Config

SCHEMAS = {"sync": Config, "async": AsyncConfig, "atropos": AtroposConfig}
TRANSFORMERS = {"inference_model": {"backend": "transformers"}}
VLLM = {"inference_model": {"backend": "vllm"}}
SERVER = {"inference_model": {"backend": "vllm", "engine": "server"}}
LORA = {"train_model": {"lora": {"enabled": True, "r": 4}}}
ATROPOS = {"env": {"dataset": "atropos", "url": "http://127.0.0.1:8000"}}
EVALUATED = {"atropos": {"evaluate": True, "eval_max_tokens": 4}}


@dataclass(frozen=True)
class Mode:
    """A kind of run."""

    script: Literal["sync", "async", "atropos"]
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    stable: bool = True  # two runs have the same metrics

    @property
    def has_workers(self) -> bool:
        return self.script == "async" or "num_devices" in self.sections.get("inference_model", {})

    @property
    def on_atropos(self) -> bool:
        """Whether groups come from environments of Atropos, whatever the script."""
        return self.script == "atropos" or (
            self.sections.get("env", {}).get("dataset") == "atropos")

    @property
    def schema(self) -> type[Config]:
        return SCHEMAS[self.script]


def merged(*several: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Sections with the keys of all, the last one's where several have one."""
    out: dict[str, Any] = {}
    for one in several:
        for section, keys in one.items():
            out[section] = {**out.get(section, {}), **keys} if isinstance(keys, dict) else keys
    return out


def _atropos(way: str, *more: dict, **inference: Any) -> Mode:
    engine = {"inference_model": {"backend": "vllm", "engine": "server", "weight_sync": way,
                                  **inference}}
    return Mode("atropos", merged(engine, *more))


def _preset(**train: Any) -> Mode:
    return Mode("sync", merged(TRANSFORMERS, {"train": train}))


MODES = {
    "sync": Mode("sync", TRANSFORMERS),
    "sync, adapters": Mode("sync", merged(TRANSFORMERS, LORA)),
    "sync, vLLM in process": Mode("sync", VLLM),
    "sync, vLLM in process, adapters": Mode("sync", merged(VLLM, LORA)),
    "sync, engine=process": Mode("sync", merged(VLLM, {"inference_model": {"engine": "process"}})),
    "sync, engine=server": Mode("sync", SERVER),
    "sync, restarted servers": Mode("sync", merged(
        SERVER, {"inference_model": {"weight_sync": "restart"}})),
    "sync, server at url": Mode("sync", merged(
        SERVER, {"inference_model": {"url": "http://127.0.0.1:9009"}})),
    "sync, stock server": Mode("sync", merged(
        SERVER, {"inference_model": {"url": "http://127.0.0.1:9009", "server": "vllm"}})),
    "sync, two ranks": Mode("sync", merged(
        VLLM, {"train_model": {"num_devices": 2}, "inference_model": {"engine": "process"}})),
    "sync, devices for engines": Mode("sync", merged(
        TRANSFORMERS, {"inference_model": {"num_devices": 2}})),
    "async, Transformers": Mode("async", TRANSFORMERS, stable=False),
    "async, Transformers, staleness 0": Mode("async", merged(
        TRANSFORMERS, {"train": {"staleness": 0}})),
    "async, Transformers, adapters": Mode("async", merged(TRANSFORMERS, LORA), stable=False),
    "async, vLLM": Mode("async", VLLM, stable=False),
    "async, vLLM, adapters": Mode("async", merged(VLLM, LORA), stable=False),
    "async, a device for the reference": Mode("async", merged(
        TRANSFORMERS, {"train": {"kl_to_ref_coeff": 0.1}, "ref_model": {"num_devices": 1}}),
        stable=False),
    "atropos, one copy": _atropos("single_copy"),
    "atropos, one copy, evaluated": _atropos("single_copy", EVALUATED),
    "atropos, adapters": _atropos("lora", LORA),
    "atropos, restarted engines": _atropos("restart"),
    "atropos, engine at url": _atropos("reload", url="http://127.0.0.1:9009"),
    "atropos, bridge": Mode("atropos", merged(VLLM, {"atropos": {"bridge": True}})),
    "atropos, bridge, Transformers, evaluated": Mode("atropos", merged(
        TRANSFORMERS, {"atropos": {"bridge": True}}, EVALUATED)),
    "sync, on Atropos": Mode("sync", merged(TRANSFORMERS, ATROPOS)),
    "async, on Atropos": Mode("async", merged(TRANSFORMERS, ATROPOS), stable=False),
    "logits": Mode("sync", merged(TRANSFORMERS, {"train_model": {"head": "logits"}})),
    "chunks": Mode("sync", merged(TRANSFORMERS, {"train_model": {"head": "chunked"}})),
    "packed": _preset(packing=True),
    "reference": _preset(kl_to_ref_coeff=0.1),
    "reference in the reward": _preset(kl_to_ref_coeff=0.1, kl_in_reward=True),
    "dapo": _preset(clip_epsilon=[0.2, 0.28], max_sampling_rounds=2, overlong_buffer=2),
    "gspo": _preset(objective="gspo", aggregation="sequence"),
    "reinforce": _preset(objective="reinforce", advantage_estimator="global_norm"),
    "scored": _preset(proximal="scored", mismatch={"tis": 2.0}, epochs=2),
    "dr_grpo": _preset(aggregation="dr_grpo", advantage_estimator="group_mean"),
    "maxent": Mode("sync", merged(TRANSFORMERS, {
        "train": {"objective": "maxent_listwise", "aggregation": "prompt"},
        "maxent": {"tau": 0.5, "beta": 0.1, "tau_target": 0.6}})),
    "controllers": Mode("sync", merged(TRANSFORMERS, {
        "train": {"kl_to_ref_coeff": 0.1, "entropy_coeff": 0.1},
        "kl_controller": {"kind": "horizon", "target": 0.1, "horizon": 10},
        "entropy_controller": {"target": 0.1, "step": 0.1, "maximum": 1.0}})),
    "distillation": Mode("sync", merged(TRANSFORMERS, {
        "distill": {"teacher": "{teacher}", "topk_coeff": 0.1, "reverse_kl_coeff": 0.1}})),
    "bfloat16": Mode("sync", merged(VLLM, {"train_model": {"torch_dtype": "bfloat16"}})),
    "wandb": Mode("sync", merged(TRANSFORMERS, {"logging": {"backends": ["wandb"]}})),
    "dialog": Mode("sync", merged(TRANSFORMERS, {
        "model": {"name": "{talker}"}, "env": {"step": "test.training.runs:again"},
        "inference_model": {"max_tokens": 24}})),
    "samples and benchmarks": Mode("sync", merged(TRANSFORMERS, {"eval": {
        "samples": 3, "benchmarks": {"arithmetic": {"task": {
            "max_operand": 9, "num_train": 20, "num_test": 5}}}}})),
    "a band": Mode("sync", merged(TRANSFORMERS, {
        "train": {"kl_to_ref_coeff": 0.1}, "kl_controller": {"kind": "band", "target": 0.1}})),
    "adafactor": Mode("sync", merged(TRANSFORMERS, {"optimizer": {"name": "adafactor"}})),
    "decay": Mode("sync", merged(TRANSFORMERS, {"optimizer": {"schedule": "linear"}})),
}
