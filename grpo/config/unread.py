"""Which keys a run does not read: one table, from which the refusals of such keys are made.

A key that is set and read by nothing would be a run other than the one that was asked for. So each
entry says of some keys in which runs they are not read, why, and what else could be done than
remove them. A default is never refused: it was not asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

from grpo.config.keys import ConfigError

if TYPE_CHECKING:
    from grpo.config.schema import Config


@dataclass(frozen=True)
class Unread:
    """Keys that some runs do not read.

    Attributes:
        keys: ``section.key``, several parted by spaces; ``section.*``: all keys of a section.
        where: whether a configuration is that of such a run.
        why: goes on after ``KEY=VALUE is not read``; ``{section.key}`` stands for a value.
        instead: what could be done instead of removing the key, such as ``set that, or``.
        but: keys of ``keys`` that are read all the same.
    """

    keys: str
    where: Callable[[Any], bool]
    why: str
    instead: str = ""
    but: str = ""

    def names(self, config: Config) -> Iterator[str]:
        """The keys, with those of whole sections."""
        for key in self.keys.split():
            section, _, name = key.rpartition(".")
            names = type(value_at(config, section)).model_fields if name == "*" else [name]
            yield from (f"{section}.{name}" for name in names
                        if f"{section}.{name}" not in self.but.split())


def _without(*keys: str) -> Callable[[Any], bool]:
    """Whether all of some keys are null, false, 0 or empty."""
    return lambda config: not any(value_at(config, key) for key in keys)


def _null(*keys: str) -> Callable[[Any], bool]:
    return lambda config: all(value_at(config, key) is None for key in keys)


def _switch(section: str, key: str) -> Unread:
    """A section of which nothing is read while one of its keys is null."""
    switch = f"{section}.{key}"
    return Unread(f"{section}.*", _null(switch), f"because {switch} is null", "set that, or",
                  but=switch)


def _separate_reference(config: Any) -> bool:
    return not (config.train_model.lora.enabled and config.ref_model.name is None)


_WEIGHTS = "by train.objective={train.objective}, whose weights come from the section maxent"
_ADAFACTOR = "by optimizer.name={optimizer.name}"

#: Where the whole of a new engine is compared after each update.
WHOLE_PROOF = Unread("train.proof_interval", lambda c: c.inference_model.weight_sync == "restart",
                     "by inference_model.weight_sync=restart, because of a new engine all tensors "
                     "are compared")

# Of every run.
_COMMON = (
    Unread("model.warm_start_steps model.warm_start_noise",
           lambda c: c.model.name != "embedded",
           "because model.name={model.name} is trained already", "set model.name=embedded, or"),
    Unread("train.keep_checkpoints", _without("train.checkpoint_frequency"),
           "because train.checkpoint_frequency is 0", "raise that, or"),
    Unread("train.kl_estimator", _null("train.kl_to_ref_coeff", "train.kl_to_inference_coeff"),
           "because both train.kl_to_ref_coeff and train.kl_to_inference_coeff are null",
           "set one of them, or"),
    Unread("train.overlong_factor", _null("train.overlong_buffer"),
           "without train.overlong_buffer", "set that, or"),
    Unread("train.advantage_estimator train.advantage_eps train.advantage_clip_percentile "
           "train.zero_variance_filter train.mask_truncated train.overlong_buffer "
           "train.kl_in_reward", lambda c: c.train.is_maxent, _WEIGHTS),
    Unread("maxent.*", lambda c: not c.train.is_maxent,
           "by train.objective={train.objective}, but by maxent_listwise and maxent_weighted"),
    Unread("maxent.length_normalize_ref", _without("maxent.beta"), "without maxent.beta",
           "set that, or"),
    Unread("maxent.tau_step maxent.tau_minimum maxent.tau_maximum", _null("maxent.tau_target"),
           "because maxent.tau_target is null", "set that, or"),
    _switch("kl_controller", "kind"),
    _switch("entropy_controller", "target"),
    Unread("ref_model.*", lambda c: not c.needs_reference,
           "because train.kl_to_ref_coeff and maxent.beta are null", "set the coefficient, or"),
    Unread("optimizer.final_lr_fraction", lambda c: c.optimizer.schedule == "constant",
           "by optimizer.schedule=constant", "choose linear or cosine, or"),
    Unread("optimizer.betas optimizer.eps", lambda c: c.optimizer.name == "adafactor", _ADAFACTOR),
    Unread("optimizer.scale_parameter optimizer.relative_step",
           lambda c: c.optimizer.name != "adafactor", _ADAFACTOR, "choose adafactor, or"),
    Unread("optimizer.lr optimizer.schedule optimizer.warmup_steps",
           lambda c: c.optimizer.relative_step, "by optimizer.relative_step=true"),
    Unread("logging.wandb_project logging.wandb_group logging.wandb_run_name logging.wandb_mode",
           lambda c: "wandb" not in c.logging.backends,
           "because logging.backends has no 'wandb'", "add it, or"),
    Unread("train_model.fp32_head train_model.head_chunk_size",
           lambda c: c.train_model.head == "logits",
           "by train_model.head=logits, which are the model's own and all there at once",
           "set head=auto, or"),
    Unread("train_model.lora.*", _without("train_model.lora.enabled"),
           "because train_model.lora.enabled is false", "set that to true, or",
           but="train_model.lora.enabled"),
    Unread("inference_model.url", lambda c: c.inference_model.engine != "server",
           "by inference_model.engine={inference_model.engine}", "set engine=server, or"),
    Unread("inference_model.max_num_seqs inference_model.gpu_memory_utilization "
           "inference_model.kv_cache_memory_bytes inference_model.enforce_eager",
           lambda c: c.inference_model.url is not None,
           "because the server at inference_model.url={inference_model.url} runs already",
           "start that with the option, or"),
)

#: Of ``grpo.py``.
SYNC = (
    *_COMMON,
    _switch("distill", "teacher"),
    Unread("distill.topk distill.temperature", _null("distill.topk_coeff"),
           "without distill.topk_coeff", "set that, or"),
    WHOLE_PROOF,
)

#: Of ``grpo-async.py``.
ASYNC = (
    *SYNC,
    Unread("inference_model.engine inference_model.url inference_model.weight_sync",
           lambda c: True, "by grpo-async.py, whose engines are its own workers"),
    Unread("ref_model.num_devices ref_model.devices", lambda c: not _separate_reference(c),
           "because with train_model.lora.enabled=true the reference is the trainer's own model "
           "without its adapters", "name another model as ref_model.name, or"),
    Unread("train.update_at", lambda c: c.train.staleness == 0 and c.train.oversample == 0,
           "because with train.staleness=0 and train.oversample=0 nothing is being generated when "
           "weights are updated", "raise one of them, or"),
    Unread("train.oversample", lambda c: c.oversampled_groups == 0,
           "because of the {groups_per_batch} groups of a batch that is less than half a group",
           "raise it, or"),
)

#: Of runs on Atropos environments.
ATROPOS = (
    *_COMMON,
    Unread("distill.teacher distill.reverse_kl_coeff", lambda c: True,
           "with Atropos environments: those ask the teacher, and their groups bring its tokens",
           "use distill.topk_coeff, and"),
    _switch("distill", "topk_coeff"),
    *(Unread(key, lambda c: True, "with Atropos environments", f"use {instead}, and")
      for key, instead in {
          "train.max_steps": "atropos.steps",
          "train.data_epochs": "atropos.steps, because environments choose their problems",
          "train.total_dialog_turns": "atropos.steps",
          "train.dialog_turns_per_batch": "atropos.batch_size",
          "train.max_sampling_rounds": "the environments' ensure_scores_are_not_same",
          "train.overlong_buffer": "the environments' own length penalty",
          "inference_model.max_tokens":
              "the environments' own max_tokens, atropos.seq_len for what is trained, "
              "atropos.eval_max_tokens for evaluations",
          "inference_model.ignore_eos": "the environments' own options of sampling",
      }.items()),
    Unread("train_model.num_devices train_model.devices", lambda c: True,
           "with Atropos environments, where one device trains"),
    Unread("env.*", _without("atropos.evaluate"),
           "because environments bring problems and rewards",
           "set atropos.evaluate=true (--eval-task) to measure the accuracy on a task of this "
           "library, or"),
    Unread("env.num_envs env.repeats", lambda c: True,
           "with Atropos environments, which make their groups themselves, and an evaluation takes "
           "each problem once"),
    Unread("atropos.eval_max_tokens train.eval_frequency logging.num_samples",
           _without("atropos.evaluate"), "without atropos.evaluate=true (--eval-task)",
           "set that, or"),
    Unread("atropos.restart_interval", lambda c: c.inference_model.weight_sync != "restart",
           "by inference_model.weight_sync={inference_model.weight_sync}", "use restart, or"),
    Unread("atropos.max_staleness", _without("atropos.bridge"),
           "because only the bridge knows the version that sampled each token (groups do not say "
           "it)", "set atropos.bridge=true, or"),
    Unread("atropos.vllm_gpu atropos.bridge_config", lambda c: c.atropos.bridge,
           "with atropos.bridge=true, where there is no engine server"),
)

#: Of runs on Atropos environments that are told where their engine is.
ENGINE_AT_URL = (
    Unread("atropos.vllm_port atropos.bridge_config", lambda c: c.inference_model.url is not None,
           "because inference_model.url={inference_model.url} says where the engine is"),
)

#: Of ``atropos-grpo``, which starts no environments.
ALONE = (
    Unread("atropos.log_dir", lambda c: c.atropos.bridge or c.inference_model.url is not None,
           "by atropos-grpo where it starts no engine that could log there"),
)

#: On a CPU, for which vLLM has neither.
ON_A_CPU = (
    Unread("inference_model.gpu_memory_utilization", lambda c: True, "on a CPU",
           "set inference_model.kv_cache_memory_bytes, and"),
    Unread("inference_model.enforce_eager", lambda c: (
        c.inference_model.engine == "server" and c.inference_model.enforce_eager is False),
           "by a server on a CPU, which compiles nothing", "use engine=process, or"),
)

#: Where Transformers generates, which depends on what is installed.
TRANSFORMERS = (
    Unread("inference_model.engine inference_model.weight_sync inference_model.max_num_seqs "
           "inference_model.gpu_memory_utilization inference_model.kv_cache_memory_bytes "
           "inference_model.enforce_eager", lambda c: True,
           "by inference_model.backend=transformers"),
)


def refuse_unread(config: Config, table: tuple[Unread, ...]) -> None:
    """Refuse the first key that is set and would not be read.

    Args:
        config: of a run.
        table: what is not read when.

    Raises:
        ConfigError: naming the key, its value, why it is not read, and the fix.

    Examples:
        >>> from grpo.config.schema import Config
        >>> refuse_unread(Config(), SYNC)
        >>> Config(train={"keep_checkpoints": 2, "checkpoint_frequency": 0})
        Traceback (most recent call last):
        ...
        pydantic_core._pydantic_core.ValidationError: 1 validation error for Config
          Value error, train.keep_checkpoints=2 is not read because train.checkpoint_frequency is \
0; raise that, or remove it [type=value_error, ...
    """
    for entry in table:
        for key in entry.names(config) if entry.where(config) else ():
            value = value_at(config, key)
            if value != _default(config, key):
                why = entry.why.format_map(_Values(config))
                raise ConfigError(f"{key}={_shown(value)} is not read {why}; "
                                  + f"{entry.instead} remove it".lstrip())


def value_at(config: Config, key: str) -> Any:
    """The value of ``section.key``; of ``section`` its keys.

    Examples:
        >>> from grpo.config.schema import Config
        >>> value_at(Config(), "train_model.lora.r")
        16
    """
    return reduce(getattr, key.split("."), config)


def _default(config: Config, key: str) -> Any:
    section, _, name = key.rpartition(".")
    field = type(value_at(config, section)).model_fields[name]
    return field.get_default(call_default_factory=True)


def _shown(value: Any) -> str:
    """As it is typed."""
    return str(value).lower() if isinstance(value, bool) else str(value)


class _Values(dict):
    """``{section.key}`` of a text: its first part, whose attributes :meth:`str.format` looks up."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __missing__(self, name: str) -> Any:
        return getattr(self.config, name)
