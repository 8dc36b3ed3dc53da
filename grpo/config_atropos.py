"""The configuration of a run on Atropos environments: that of every run, less what environments
bring themselves, and a section of its own."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from grpo.config import Config, EnvConfig
from grpo.config_objective import DistillConfig, Section, refuse_all
from grpo.engines.http_call import split_url


class AtroposSection(Section):
    """Where groups come from, how many make a step, and what the run leaves behind."""

    url: str = "http://127.0.0.1:8000"
    """Of the API: a hub, or atroposlib's ``run-api``."""
    steps: int = Field(10, ge=1)
    batch_size: int = Field(2, ge=1)
    """Sequences of a micro-batch; ``train.gradient_accumulation_steps`` times as many make a
    step."""
    seq_len: int = Field(2048, ge=2)
    """Longer sequences are cut."""
    timeout: float = Field(600.0, gt=0)
    """Seconds without a new group after which the run gives up."""
    bridge: bool = False
    """Answer the environments' requests with the policy of this process."""
    max_staleness: int | None = Field(None, ge=0)
    """Tokens sampled more than so many updates ago are not trained, which strikes long sequences
    most; null: all are."""
    restart_interval: int | None = Field(None, ge=1)
    """Steps between two engines, where each update starts a new one; null: 1. An evaluation that
    is due in between starts one, too, so that it is of its step's model."""
    vllm_port: int = Field(9001, ge=1, le=65535)
    vllm_gpu: int | None = Field(None, ge=0)
    """GPU of the engine; null: the trainer's."""
    bridge_config: str | None = None
    """``vllm_bridge_config.json`` of the engine that is to be used; null: the engine that answers
    at the port, else one that is started here."""
    save_path: str = "trained_model_checkpoints"
    log_dir: str = "logs"
    evaluate: bool = False
    """Measure the accuracy on the test problems of the task of section ``env``."""
    eval_max_tokens: int | None = Field(None, ge=1)
    """Longest answer of an evaluation; null: 128."""
    dump_batch: bool = False
    """Write each batch to ``temp.json`` in ``save_path``."""
    debug_loading: bool = False
    """Show where each parameter lies, and what the engine logs."""
    benchmark: bool = False
    """Summarise at the end where the time went."""

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        try:
            split_url(url)
        except ValueError as error:
            raise ValueError(f"atropos.{error}, such as http://127.0.0.1:8000") from None
        return url


class GroupDistillConfig(DistillConfig):
    """A teacher whose most likely tokens the groups bring (``distill_token_ids``)."""

    @model_validator(mode="after")
    def _keys_are_read(self) -> GroupDistillConfig:
        for key in ("teacher", "reverse_kl_coeff"):
            if (value := getattr(self, key)) is not None:
                raise ValueError(f"distill.{key}={value!r} is not read here: environments ask the "
                                 "teacher, and their groups bring its tokens; use "
                                 "distill.topk_coeff")
        if self.topk_coeff is None:
            refuse_all(self.given(), "distill", "topk_coeff")
        return self


# Keys of sections that others read in other runs, and what is in their place here.
_UNREAD = {
    ("train", "max_steps"): "atropos.steps",
    ("train", "data_epochs"): "atropos.steps, because environments choose their problems",
    ("train", "total_dialog_turns"): "atropos.steps",
    ("train", "dialog_turns_per_batch"): "atropos.batch_size",
    ("train", "max_sampling_rounds"): "the environments' ensure_scores_are_not_same",
    ("train", "overlong_buffer"): "the environments' own length penalty",
    ("inference_model", "max_tokens"): "the environments' own max_tokens, atropos.seq_len for what "
                                       "is trained, atropos.eval_max_tokens for evaluations",
}


class AtroposConfig(Config):
    """A whole run on Atropos environments; see :class:`~grpo.config.Config` for the rest."""

    atropos: AtroposSection = Field(default_factory=AtroposSection)
    distill: GroupDistillConfig = Field(default_factory=GroupDistillConfig)

    # In the place of Config's of the same name: there is neither `num_envs` nor `repeats` here.
    @model_validator(mode="after")
    def _keys_that_belong_together(self) -> AtroposConfig:
        if self.ref_model.name is not None and not self.needs_reference:
            raise ValueError(f"ref_model.name={self.ref_model.name!r} is not read because "
                             "train.kl_to_ref_coeff is null; set that, or remove it")
        for key in ("num_devices", "devices"):
            if (value := getattr(self.train_model, key)) is not None:
                raise ValueError(f"train_model.{key}={value} is not read with Atropos "
                                 "environments, where one device trains; remove it")
        if self.turns_per_batch % self.rows_per_optimizer_step:
            raise ValueError(f"train.optim_batch_size={self.rows_per_optimizer_step} must divide "
                             f"the {self.turns_per_batch} sequences of a step")
        for (section, key), instead in _UNREAD.items():
            if (value := getattr(getattr(self, section), key)) is not None:
                raise ValueError(f"{section}.{key}={value} is not read with Atropos environments; "
                                 f"use {instead}, and remove it")
        if self.train.is_maxent:
            raise ValueError(f"train.objective={self.train.objective!r} compares the rows of "
                             "groups of one size, which environments do not promise; use another")
        if not self.atropos.evaluate:
            self._refuse_evaluation()
        return self

    def _refuse_evaluation(self) -> None:
        for key, value in self.env:
            if value != getattr(EnvConfig(), key):
                raise ValueError(f"env.{key}={value!r} is not read: environments bring problems "
                                 "and rewards; set atropos.evaluate=true to measure the accuracy "
                                 "on a task of this library, or remove it")
        if self.atropos.eval_max_tokens is not None:
            raise ValueError(f"atropos.eval_max_tokens={self.atropos.eval_max_tokens} is not read "
                             "without atropos.evaluate=true; set that, or remove it")

    @model_validator(mode="after")
    def _engine_keys_are_read(self) -> AtroposConfig:
        atropos, inference = self.atropos, self.inference_model
        if atropos.bridge == (inference.engine == "server"):
            raise ValueError(f"inference_model.engine={inference.engine} does not go with "
                             f"atropos.bridge={str(atropos.bridge).lower()}: environments ask a "
                             "server, or, with the bridge, the policy of this process")
        if atropos.restart_interval is not None and inference.weight_sync != "restart":
            raise ValueError(f"atropos.restart_interval={atropos.restart_interval} is not read by "
                             f"inference_model.weight_sync={inference.weight_sync}; use restart, "
                             "or remove it")
        if not atropos.bridge and atropos.max_staleness is not None:
            raise ValueError(f"atropos.max_staleness={atropos.max_staleness} needs the version "
                             "that sampled each token, which only the bridge knows (groups do not "
                             "say it); set atropos.bridge=true, or remove it")
        if atropos.bridge:
            for key in ("vllm_gpu", "bridge_config"):
                if (value := getattr(atropos, key)) is not None:
                    raise ValueError(f"atropos.{key}={value} is for an engine server; with "
                                     "atropos.bridge=true there is none, remove it")
        if inference.max_model_len is not None and atropos.seq_len > inference.max_model_len:
            raise ValueError(f"atropos.seq_len={atropos.seq_len} is more than "
                             f"inference_model.max_model_len={inference.max_model_len}, so no "
                             "sequence could be so long; lower the first or raise the second")
        return self

    @property
    def turns_per_batch(self) -> int:
        """Sequences of a step."""
        return self.atropos.batch_size * (self.train.gradient_accumulation_steps or 1)

    @property
    def iterations(self) -> int:
        return self.atropos.steps

    @property
    def max_tokens(self) -> int:
        """What stands for the longest response, which environments choose."""
        return self.atropos.seq_len
