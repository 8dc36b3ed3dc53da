"""The loop: how long it runs, in whichever of three units the user counts, and what a round is."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo.config.objective import ObjectiveConfig
from grpo.config.unread import Unread, only_with

_NOBODY = Unread(lambda c: not (c.has_workers or c.env.is_atropos or c.engine == "server"),
                 "because this process drives the engine and waits for nobody; use "
                 "inference_model.engine=server, or inference_model.num_devices, or")
_UNITS = ("max_steps", "data_epochs", "total_dialog_turns")


class TrainConfig(ObjectiveConfig):
    """The loop, and the objective of :class:`~grpo.config.objective.ObjectiveConfig`."""

    exp_name: str = "grpo"
    seed: int = Field(0, ge=0, lt=2**32)
    max_steps: int | None = Field(None, ge=1)
    """Iterations: rounds of generate, train and publish. One takes several optimizer steps where
    ``train.optim_batch_size`` or ``train.epochs`` says so."""
    data_epochs: float | None = Field(None, gt=0)
    """Passes over the training problems, rounded up to whole batches. ``train.epochs`` is another
    thing: passes over each batch of completions."""
    total_dialog_turns: int | None = Field(None, ge=1)
    """Completions, rounded down to whole batches. All three null: 100,000; 92,160 for the embedded
    model, and 5 batches of it on problems it cannot solve."""
    dialog_turns_per_batch: int | None = Field(None, ge=1)
    """Completions generated between weight updates; null: ``env.num_envs * env.repeats``."""
    optim_batch_size: int | None = Field(None, ge=1)
    """Completions an optimizer step; null: all of a batch (strictly on-policy)."""
    epochs: int = Field(1, ge=1)
    """Passes over each batch of completions; those over the problems are ``train.data_epochs``."""
    gradient_accumulation_steps: int | None = Field(None, ge=1)
    max_tokens_per_micro_batch: int | None = Field(None, ge=1)
    """Split by token budget; null together with the previous key: the largest of
    :data:`grpo.run.fast_defaults.BUDGETS` that fits the GPU, and 8192 tokens on a CPU."""
    packing: bool | None = None
    """Compute on rows laid end to end without padding, and on what rows of a group begin with once,
    where the model's attention allows that (see :mod:`grpo.objectives.packing`). null: on a GPU,
    for models that were measured, see :mod:`grpo.run.fast_defaults`."""
    eval_frequency: Annotated[int, Field(ge=0)] | Literal["never"] = 10
    """Iterations between held-out evaluations; 0: at the start and the end only."""
    checkpoint_frequency: int = Field(100, ge=0)
    """Iterations between checkpoints; 0: none."""
    keep_checkpoints: Annotated[
        int | None, only_with("train.checkpoint_frequency", "raise that")] = Field(None, ge=1)
    """null: the 3 newest."""
    proof_interval: int = Field(10, ge=1)
    """Updates within which every tensor of the engine is compared with the trainer's, to the bit: a
    part of them after each, all after the first three, at evaluations and at checkpoints. 1: all
    after each update; it cannot be switched off."""
    rollout_timeout: Annotated[float, _NOBODY] = Field(1800.0, gt=0)
    """Seconds without a finished group after which the run ends, resumable; those that an engine
    server may take for a batch, and any engine elsewhere for the batch of an evaluation. An update
    of the weights at a group's border waits for groups as long, too."""

    @model_validator(mode="after")
    def _one_way_to_split(self) -> TrainConfig:
        if self.gradient_accumulation_steps and self.max_tokens_per_micro_batch:
            raise ValueError("train.gradient_accumulation_steps and "
                             "train.max_tokens_per_micro_batch both say how to split a batch; "
                             "set one of them to null")
        return self

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        given = [f"train.{key}={getattr(self, key):g}" for key in _UNITS
                 if getattr(self, key) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} each say how long the run is; give one of "
                             "them, and set what a recipe gives to null")
        if self.data_epochs is not None and self.max_sampling_rounds is not None:
            raise ValueError(f"train.data_epochs={self.data_epochs:g} has no fixed number of "
                             f"batches with train.max_sampling_rounds={self.max_sampling_rounds}, "
                             "which draws as many problems as a batch needs; use train.max_steps")
        return self
