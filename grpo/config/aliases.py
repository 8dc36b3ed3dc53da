"""Names that earlier systems gave to keys of the configuration.

Those of :data:`ALIASES` are accepted with the new name printed; they may stand at the top level or
in the section ``train``. Those of :data:`REPLACED` are refused with what to write instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Earlier name -> (section, key) of today.
ALIASES = {
    "iterations": ("train", "max_steps"),
    "num_train_epochs": ("train", "data_epochs"),
    "init_kl_coeff": ("train", "kl_to_ref_coeff"),
    "kl_target": ("kl_controller", "target"),
    "kl_horizon": ("kl_controller", "horizon"),
    "kl_ctl_step_size": ("kl_controller", "step"),
    "maxent_tau": ("maxent", "tau"),
    "maxent_q_temperature": ("maxent", "q_temperature"),
    "maxent_q_epsilon": ("maxent", "q_epsilon"),
    "maxent_length_normalize_ref": ("maxent", "length_normalize_ref"),
    "dataset_mixture": ("env", "dataset_mixture"),
    "system_prompt": ("env", "system_prompt"),
    "chat_template": ("env", "chat_template"),
}
# The only earlier name in a section of its own.
_KL_COEF = ("policy", "kl_coef")

_NO_RAY_OPTIONS = ("Ray is started with what the devices of the run need, or joined at "
                   "ray.address; leave it out")
_OF_THE_TRAINER = ("it is what that key of train_model says, so that the same tokens have the same "
                   "log-probs; leave it out")
_NO_FILTER = ("the trainer computes log-probs of all tokens, and those of a filtered distribution "
              "are others; leave it out")
_SCRIPT = "the script says which, grpo.py is synchronous and grpo-async.py is not; leave it out"
_SGLANG = "it is SGLang's, and vLLM generates; leave it out"
#: Keys and sections of TorchRL's GRPO recipe that are something else here -> what to write.
REPLACED = {
    "mode": _SCRIPT,
    "train.sync_iter": "grpo.py is what true was; for false use grpo-async.py, with "
                       "train.staleness=1",
    "train.use_kl_to_ref": "train.kl_to_ref_coeff alone says it, and without it nothing is "
                           "compared with a reference; leave it out",
    "train.kl_coef_in_loss": "true is what happens; for false write train.kl_in_reward=true",
    "train_model.quantization.enabled": "write train_model.quantization=nf4 or int8, with "
                                        "train_model.lora.enabled=true",
    "inference_model.quantization": "the engine takes up what train_model.quantization says; leave "
                                    "it out",
    "ref_model.quantization": "the reference is the model that the run starts from, quantised as "
                              "train_model.quantization says; leave it out",
    "ref_model.lora": "the reference is the model that the run starts from, without the adapters "
                      "of train_model.lora; leave it out",
    "ref_model.gradient_checkpointing": "the reference has no backward pass; leave it out",
    "ref_model.attn_implementation": _OF_THE_TRAINER,
    "ref_model.torch_dtype": _OF_THE_TRAINER,
    "inference_model.torch_dtype": _OF_THE_TRAINER,
    "inference_model.attn_implementation": "vLLM chooses its own kernels; leave it out",
    "inference_model.top_p": _NO_FILTER,
    "inference_model.enable_fp32_lm_head": "write train_model.fp32_head=true, which is for both "
                                           "sides",
    "inference_model.enable_prefix_caching": "it is always on, and what it holds is dropped with "
                                             "each update; leave it out",
    "inference_model.include_stop_str_in_output": "tokens are trained as they were sampled, the "
                                                  "last one too; leave it out",
    "inference_model.disable_cuda_graph": "write inference_model.enforce_eager=true for true; for "
                                          "false leave it out",
    "inference_model.disable_piecewise_cuda_graph": _SGLANG,
    "inference_model.disable_overlap_schedule": _SGLANG,
    "env.reasoning": "write env.thinking_prompt=true for its prompt, and env.step=retry with "
                     "env.max_steps for its further turns; for false leave it out",
    "model.compile": "write train_model.compile",
    "train.mixed_precision": "master weights are always float32, and train_model.torch_dtype says "
                             "what the model computes in; leave it out",
    "train.sync": _SCRIPT,
    "train.buffer_size": "a batch is what is generated for it, and train.epochs says how often it "
                         "is trained on; in grpo-async.py train.staleness says how old it may be; "
                         "leave it out",
    "train.empty_replay_buffer": "each batch is trained on train.epochs times and dropped; leave "
                                 "it out",
    "train.weight_update_frequency": "engines get each update; train.staleness of grpo-async.py "
                                     "says how many may pass before a token is trained on; leave "
                                     "it out",
    "train.logging_frequency": "each iteration is logged; leave it out",
    "logging.experiment_name": "write train.exp_name, or logging.wandb_run_name",
    "logging.checkpoint_dir": "checkpoints are in the run's folder; leave it out",
    "logging.checkpoint_frequency": "write train.checkpoint_frequency",
    "ray.init_config": _NO_RAY_OPTIONS,
    "ray.collector_config": _NO_RAY_OPTIONS,
    "ray.train_handler_config": _NO_RAY_OPTIONS,
    "ray.replay_buffer_config": _NO_RAY_OPTIONS,
}


def accept_aliases(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which the values of earlier names are at the keys of today; prints each move.

    A ``kl_controller`` that is only given by earlier names is of the kind they belonged to,
    ``horizon``. A null is no value.

    Raises:
        ValueError: if a setting is given by two names with two values.

    Examples:
        >>> accept_aliases({"train": {"maxent_tau": 0.5}})
        train.maxent_tau is now called maxent.tau; using 0.5
        {'train': {}, 'maxent': {'tau': 0.5}}
    """
    out = {name: dict(value) if isinstance(value, Mapping) else value
           for name, value in values.items()}
    for old, new in ALIASES.items():
        for section in (None, "train"):
            _move(out, (section, old), new)
    _move(out, _KL_COEF, ALIASES["init_kl_coeff"])
    return out


def replaced_key(path: str, value: Any) -> str | None:
    """What to write in the place of a key that only an earlier system had; None for any other.

    Examples:
        >>> replaced_key("mode", "async")  # doctest: +NORMALIZE_WHITESPACE
        "mode: the script says which, grpo.py is synchronous and grpo-async.py is not; leave it out
         (given 'async')"
        >>> replaced_key("train.seed", 1) is None
        True
    """
    parts = path.split(".")
    for depth in range(1, len(parts) + 1):
        if instead := REPLACED.get(".".join(parts[:depth])):
            return f"{path}: {instead} (given {value!r})"
    return None


def _move(values: dict[str, Any], old: tuple[str | None, str], new: tuple[str, str]) -> None:
    holder = values if old[0] is None else values.get(old[0])
    if not isinstance(holder, dict) or old[1] not in holder:
        return
    section = values.setdefault(new[0], {})
    if not isinstance(section, dict):  # ill-typed, which is reported later
        return
    value, former = holder.pop(old[1]), ".".join(part for part in old if part)
    if value is None:
        return
    today = ".".join(new)
    if section.get(new[1]) not in (None, value):
        raise ValueError(f"{former}={value} and {today}={section[new[1]]} are the same setting; "
                         "give one")
    print(f"{former} is now called {today}; using {value}")
    section[new[1]] = value
    if new[0] == "kl_controller" and section.get("kind") is None:
        section["kind"] = "horizon"
        print(f"{former} belongs to kl_controller.kind=horizon; using that")
