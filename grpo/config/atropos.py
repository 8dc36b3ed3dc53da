"""The configuration of a run on Atropos environments: that of every run, less what environments
bring themselves, and a section of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field, model_validator

from grpo.config.atropos_section import EVALUATED, AtroposSection
from grpo.config.model import EngineKind
from grpo.config.objective import DistillConfig
from grpo.config.schema import Config
from grpo.config.train import TrainConfig
from grpo.config.unread import Unread, only_with
from grpo.system.ports import check_ports

#: What environments do themselves, and what is used instead.
_INSTEAD = {
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
}


class AtroposTrainConfig(TrainConfig):
    """The loop; evaluations are few unless they are asked for."""

    eval_frequency: Annotated[int, EVALUATED] = Field(0, ge=0)


class AtroposDistillConfig(DistillConfig):
    """A teacher whose own tokens come with the groups."""

    only = only_with("distill.topk_coeff")


class AtroposConfig(Config):
    """A whole run on Atropos environments; see :class:`~grpo.config.schema.Config` for the rest."""

    unread = (
        *(Unread(lambda c: True, f"with Atropos environments; use {instead}, and", key)
          for key, instead in _INSTEAD.items()),
        Unread(lambda c: True, "with Atropos environments: those ask the teacher, and their groups "
               "bring its tokens; use distill.topk_coeff, and",
               "distill.teacher distill.reverse_kl_coeff"),
        Unread(lambda c: True, "by atropos-grpo, whose engine has one device; use env=atropos in "
               "grpo.py or grpo-async.py, or",
               "train_model.num_devices train_model.devices inference_model.num_devices "
               "inference_model.devices inference_model.tensor_parallel_size "
               "ref_model.num_devices ref_model.devices"),
        Unread(lambda c: not c.atropos.evaluate, "because environments bring problems and rewards; "
               "set atropos.evaluate=true (--eval-task) to measure the accuracy on a task of this "
               "library, or", "env.*"),
        Unread(lambda c: True, "with Atropos environments, which make their groups themselves, and "
               "an evaluation takes each problem once;", "env.num_envs env.repeats"),
        Unread(lambda c: True, "with Atropos environments; use python -m grpo.run.evaluate on the "
               "run's checkpoints, and", "eval.benchmarks eval.batch_size"),
        Unread(lambda c: True, "with Atropos environments, whose engine is a server of this "
               "library;", "inference_model.server inference_model.connections"),
        replace(EVALUATED, keys="logging.num_samples eval.samples"))

    atropos: AtroposSection = Field(default_factory=AtroposSection)
    train: AtroposTrainConfig = Field(default_factory=AtroposTrainConfig)
    distill: AtroposDistillConfig = Field(default_factory=AtroposDistillConfig)

    # In the place of Config's of the same name: there is neither `num_envs` nor `repeats` here.
    @model_validator(mode="after")
    def _keys_that_belong_together(self) -> AtroposConfig:
        if self.turns_per_batch % self.rows_per_optimizer_step:
            raise ValueError(f"train.optim_batch_size={self.rows_per_optimizer_step} must divide "
                             f"the {self.turns_per_batch} sequences of a step")
        if self.train.compares_rows:
            raise ValueError(f"train.objective={self.train.objective!r} compares the rows of "
                             "groups of one size, which environments do not promise; use another")
        return self

    @model_validator(mode="after")
    def _engine_fits_the_environments(self) -> AtroposConfig:
        atropos, inference = self.atropos, self.inference_model
        if atropos.bridge == (self.engine == "server"):
            raise ValueError(f"inference_model.engine={self.engine} does not go with "
                             f"atropos.bridge={str(atropos.bridge).lower()}: environments ask a "
                             "server, or, with the bridge, the policy of this process")
        try:
            check_ports(atropos.forward_ports, self.engine_url)
        except ValueError as error:
            raise ValueError(f"atropos.forward_ports={atropos.forward_ports}: {error}") from None
        if inference.max_model_len is not None and atropos.seq_len > inference.max_model_len:
            raise ValueError(f"atropos.seq_len={atropos.seq_len} is more than "
                             f"inference_model.max_model_len={inference.max_model_len}, so no "
                             "sequence could be so long; lower the first or raise the second")
        return self

    @property
    def engine(self) -> EngineKind:
        """``inference_model.engine``, resolved: what environments can ask.

        Examples:
            >>> AtroposConfig().engine, AtroposConfig(atropos={"bridge": True}).engine
            ('server', 'in_process')
        """
        chosen = self.inference_model.engine
        if chosen != "auto":
            return chosen
        return "in_process" if self.atropos.bridge else "server"

    @property
    def engine_url(self) -> str:
        """Where environments ask."""
        return self.inference_model.url or f"http://127.0.0.1:{self.atropos.vllm_port}"

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
