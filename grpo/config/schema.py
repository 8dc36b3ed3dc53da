"""The configuration of a run: every key, its type and default, checked once.

The YAML groups in ``config/`` carry the same keys; this schema is what they are checked against.
An unknown key is an error, and so is a key that the chosen mode would not read. ``null`` means
"the default for the chosen mode"; the resolved values are printed and saved with every run.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from omegaconf import DictConfig, OmegaConf
from pydantic import Field, ValidationError, model_validator

from grpo.config import devices
from grpo.config.aliases import accept_aliases
from grpo.config.env import WITH_ATROPOS, EnvConfig
from grpo.config.evaluation import EvalConfig
from grpo.config.keys import ConfigError, errors_text, unknown_key
from grpo.config.model import (
    EngineKind,
    InferenceModelConfig,
    ModelConfig,
    RefModelConfig,
    Sync,
    TrainModelConfig,
    resolve_sync,
)
from grpo.config.objective import (
    DistillConfig,
    EntropyControllerConfig,
    KLControllerConfig,
    MaxEntConfig,
)
from grpo.config.optimizer import OptimizerConfig
from grpo.config.section import Section
from grpo.config.train import TrainConfig
from grpo.config.unread import WHOLE_PROOF, Unread, refuse_unread
from grpo.objectives.registry import get_objective


class PolicyConfig(Section):
    """Earlier names, accepted for other keys."""

    kl_coef: float | None = Field(None, ge=0)
    """The same as ``train.kl_to_ref_coeff``."""


_WANDB = Unread(lambda c: "wandb" not in c.logging.backends,
                "because logging.backends has no 'wandb'; add it, or")


_EVALUATED = Unread(lambda c: c.train.eval_frequency == "never",
                    "because train.eval_frequency=never; give that a number, or")


class LoggingConfig(Section):
    """Loggers beside ``metrics.jsonl``, which is always written."""

    backends: list[Literal["wandb", "tensorboard"]] = Field(default_factory=list)
    wandb_project: Annotated[str | None, _WANDB] = None
    wandb_group: Annotated[str | None, _WANDB] = None
    wandb_run_name: Annotated[str | None, _WANDB] = None
    wandb_mode: Annotated[Literal["online", "offline"] | None, _WANDB] = None
    legacy_names: Literal["atropos"] | None = None
    """Metrics also under the names that this trainer gave them, see
    :mod:`grpo.report.legacy_names`."""
    num_samples: Annotated[int, _EVALUATED] = Field(6, ge=0)
    """Completions shown and saved at each evaluation."""


AnyConfig = TypeVar("AnyConfig", bound="Config")
#: Completions of a run whose length nobody has given: of a model that is to learn something; of the
#: embedded one, which is through with its additions after 360 batches of 256; and batches of a
#: demonstration.
_DEFAULT_TURNS, _EMBEDDED_TURNS, _DEMONSTRATION_BATCHES = 100_000, 92_160, 5


class Config(Section):
    """A whole run."""

    #: What the script does not read, besides what keys and sections say of themselves.
    unread: ClassVar[tuple[Unread, ...]] = (WHOLE_PROOF, Unread(
        lambda c: c.has_workers, "where engines are workers on Ray, which they are in "
        "grpo-async.py, and in grpo.py with num_devices or devices for inference_model or "
        "ref_model, or with tensor_parallel_size;",
        "inference_model.engine inference_model.url inference_model.weight_sync"), *WITH_ATROPOS)

    device: Literal["auto", "cpu", "cuda"] = "auto"
    resume: str | None = None
    """Path of a run or checkpoint, or ``auto`` for the newest run of the same name and settings."""
    env: EnvConfig = Field(default_factory=EnvConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    train_model: TrainModelConfig = Field(default_factory=TrainModelConfig)
    inference_model: InferenceModelConfig = Field(default_factory=InferenceModelConfig)
    ref_model: RefModelConfig = Field(default_factory=RefModelConfig)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    kl_controller: KLControllerConfig = Field(default_factory=KLControllerConfig)
    entropy_controller: EntropyControllerConfig = Field(default_factory=EntropyControllerConfig)
    maxent: MaxEntConfig = Field(default_factory=MaxEntConfig)
    distill: DistillConfig = Field(default_factory=DistillConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)

    _accept_earlier_names = model_validator(mode="before")(accept_aliases)

    @model_validator(mode="after")
    def _keys_are_read(self) -> Config:
        refuse_unread(self, self.unread)
        return self

    @model_validator(mode="after")
    def _keys_that_belong_together(self) -> Config:
        group_rows = self.env.num_envs * self.env.repeats
        batch = self.turns_per_batch
        if batch % group_rows:
            raise ValueError(f"train.dialog_turns_per_batch={batch} must be a multiple of "
                             f"env.num_envs * env.repeats = {group_rows}")
        if batch % self.rows_per_optimizer_step:
            raise ValueError(f"train.optim_batch_size={self.rows_per_optimizer_step} must divide "
                             f"the {batch} completions of a batch")
        if self.train.aggregation == "prompt" and self.rows_per_optimizer_step % self.env.repeats:
            raise ValueError(f"train.optim_batch_size={self.rows_per_optimizer_step} must be a "
                             f"multiple of env.repeats={self.env.repeats}: "
                             "train.aggregation=prompt needs whole groups in an optimizer step, "
                             "or prompts would have different weights")
        if self.train.data_epochs is None and not self.iterations:
            turns = self.train.total_dialog_turns or self._default_turns
            raise ValueError(f"train.total_dialog_turns={turns} is less than one batch of {batch} "
                             "completions; raise it, or give train.max_steps instead")
        return self

    @model_validator(mode="after")
    def _weights_can_reach_the_engine(self) -> Config:
        _ = self.weight_sync  # which raises where they cannot
        return self

    @model_validator(mode="after")
    def _the_engine_has_what_is_quantised(self) -> Config:
        url = self.inference_model.url
        if self.train_model.quantization is not None and url is not None:
            raise ValueError(f"train_model.quantization={self.train_model.quantization}: engines "
                             "must hold the very values that the trainer's bits stand for, and "
                             f"the server at inference_model.url={url} was started from others; "
                             "remove the url, or set quantization to null")
        return self

    @model_validator(mode="after")
    def _ranks_can_share_the_optimizer(self) -> Config:
        if self.train_model.ranks > 1 and self.optimizer.name != "adamw":
            raise ValueError(f"optimizer.name={self.optimizer.name} steps whole tensors, but "
                             f"{self.train_model.ranks} devices of train_model have a slice of "
                             "each; use adamw, whose state they share, or train on one device")
        return self

    @model_validator(mode="after")
    def _objective_fits_the_loop(self) -> Config:
        train = self.train
        self.kl_controller.controller(train.kl_to_ref_coeff)
        self.entropy_controller.controller(train.entropy_coeff)
        if train.is_maxent:
            self.maxent.weights()
            self.maxent.controller(group_size=self.env.repeats)
            if self.distill.reverse_kl_coeff is not None:
                raise ValueError(f"distill.reverse_kl_coeff={self.distill.reverse_kl_coeff} is an "
                                 f"advantage, which train.objective={train.objective!r} does not "
                                 "read; remove it, or use distill.topk_coeff")
        elif self.distill.reverse_kl_coeff and not get_objective(train.objective).token_advantages:
            raise ValueError(f"distill.reverse_kl_coeff={self.distill.reverse_kl_coeff} gives each "
                             f"token its own advantage, but the ratio of train.objective="
                             f"{train.objective!r} is that of a whole sequence; use gspo_token, or "
                             "distill.topk_coeff")
        steps = self.turns_per_batch // self.rows_per_optimizer_step * train.epochs
        if train.proximal == "current" and steps > 1:
            raise ValueError(f"train.proximal='current' is for one optimizer step a batch, not "
                             f"{steps}: from the second on the current policy is no longer the one "
                             "that the batch was scored with; set train.proximal=scored")
        if (self.overlong_tokens or 0) >= self.max_tokens:
            raise ValueError(f"train.overlong_buffer={train.overlong_buffer} must be below "
                             f"inference_model.max_tokens={self.max_tokens}")
        return self

    def changed(self: AnyConfig, **sections: dict[str, Any]) -> AnyConfig:
        """A copy with other values of some keys, checked as a whole.

        Examples:
            >>> Config().changed(train={"seed": 3}).train.seed
            3
        """
        values = self.model_dump()
        for section, keys in sections.items():
            values[section] |= keys
        return type(self).model_validate(values)

    @property
    def needs_reference(self) -> bool:
        """Whether anything is compared with the reference policy."""
        return devices.needs_reference(self)

    @property
    def engine(self) -> EngineKind:
        """``inference_model.engine``, resolved; for vLLM.

        Examples:
            >>> Config().engine, Config(train_model={"num_devices": 2}).engine
            ('in_process', 'process')
        """
        chosen = self.inference_model.engine
        if chosen != "auto":
            return chosen
        if self.inference_model.url is not None:
            return "server"
        return "process" if self.train_model.ranks > 1 else "in_process"

    @property
    def has_workers(self) -> bool:
        """Whether engines are workers on Ray, because they or the reference have devices of their
        own."""
        return devices.has_workers(self)

    @property
    def weight_sync(self) -> Sync:
        """``inference_model.weight_sync``, resolved; for vLLM, which alone needs any."""
        if self.has_workers:
            return "lora" if self.train_model.lora.enabled else "transfer"
        return resolve_sync(self.inference_model, self.train_model.lora, self.engine,
                            ranks=self.train_model.ranks)

    @property
    def shares_weights(self) -> bool:
        """Whether trainer and vLLM engine read one copy of the weights, adapters aside."""
        return (self.weight_sync in ("single_copy", "lora") and self.inference_model.on_this_host
                and not self.has_workers and self.train_model.ranks == 1  # else each has a slice
                and self.train_model.quantization is None)  # which engines have written out

    @property
    def is_demonstration(self) -> bool:
        """The embedded model on problems it cannot solve: it only shows that the pipeline runs."""
        return self.model.name == "embedded" and self.env.dataset != "arithmetic"

    def for_problems(self: AnyConfig, count: int) -> AnyConfig:
        """The same run with ``train.data_epochs``, passes over ``count`` problems, as
        ``train.max_steps``.

        Examples:
            >>> Config(train={"data_epochs": 2}).for_problems(7473).iterations  # 32 a batch
            468
        """
        if (epochs := self.train.data_epochs) is None:
            return self
        batches = round(epochs * count / self.groups_per_batch, 6)  # 0.3 * 10 is above 3
        return self.changed(train={"data_epochs": None, "max_steps": math.ceil(batches)})

    @property
    def total_turns(self) -> int:
        """Completions of the whole run."""
        return self.iterations * self.turns_per_batch

    @property
    def _default_turns(self) -> int:
        if self.is_demonstration:
            return _DEMONSTRATION_BATCHES * self.turns_per_batch
        return _EMBEDDED_TURNS if self.model.name == "embedded" else _DEFAULT_TURNS

    @property
    def max_tokens(self) -> int:
        """``inference_model.max_tokens``, resolved."""
        return self.inference_model.max_tokens or (128 if self.is_demonstration else 1024)

    @property
    def overlong_tokens(self) -> int | None:
        """``train.overlong_buffer`` in tokens."""
        buffer = self.train.overlong_buffer
        if buffer is None:
            return None
        return max(1, round(buffer * self.max_tokens)) if buffer < 1 else int(buffer)

    @property
    def turns_per_batch(self) -> int:
        """Completions of one iteration."""
        return self.train.dialog_turns_per_batch or self.env.num_envs * self.env.repeats

    @property
    def groups_per_batch(self) -> int:
        return self.turns_per_batch // self.env.repeats

    @property
    def rows_per_optimizer_step(self) -> int:
        return self.train.optim_batch_size or self.turns_per_batch

    @property
    def iterations(self) -> int:
        """Rounds of generate, train and publish.

        Raises:
            ValueError: if the length is given in passes over problems that are not yet counted.
        """
        train = self.train
        if train.data_epochs is not None:
            raise ValueError(f"train.data_epochs={train.data_epochs:g} counts training problems, "
                             "whose number is not known yet; call config.for_problems(number)")
        return train.max_steps or (
            train.total_dialog_turns or self._default_turns) // self.turns_per_batch

    @property
    def optimizer_steps(self) -> int:
        return (self.iterations * self.train.epochs * self.turns_per_batch
                // self.rows_per_optimizer_step)


def load_config(
    values: DictConfig | dict[str, Any], schema: type[AnyConfig] = Config
) -> AnyConfig:
    """Check a configuration, from Hydra or a plain dictionary.

    Raises:
        ConfigError: naming every key that is unknown, ill-typed, out of range or not read.

    Examples:
        >>> load_config({"optimizer": {"lr": 1e-6}}).optimizer.lr
        1e-06
        >>> load_config({"optimizer": {"learning_rate": 1e-6}})
        Traceback (most recent call last):
        ...
        grpo.config.keys.ConfigError: the configuration has 1 error:
          optimizer.learning_rate: unknown key (given 1e-06); known keys of optimizer: name, lr, \
betas, eps, weight_decay, clip_grad_norm, warmup_steps, schedule, final_lr_fraction, \
scale_parameter, relative_step
    """
    if isinstance(values, DictConfig):
        values = OmegaConf.to_container(values, resolve=True)
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        lines = [_explain(problem, schema) for problem in error.errors()]
        raise ConfigError(errors_text(lines)) from None


def _explain(problem: dict[str, Any], schema: type[Config]) -> str:
    path = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    if problem["type"] != "extra_forbidden":
        return f"{path}={problem['input']!r}: {problem['msg']}"
    section = schema
    for part in problem["loc"][:-1]:
        section = section.model_fields[part].annotation
    return unknown_key(path, problem["input"], section.model_fields)
