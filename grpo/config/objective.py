"""The part of the configuration that says what is optimised: ``train.*`` of the objective, and the
sections of controllers, MaxEnt and distillation. :mod:`grpo.config.schema` puts them into a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from grpo.config.section import Section
from grpo.config.unread import Unread, only_with
from grpo.objectives.aggregate import Aggregation
from grpo.objectives.controllers import (
    Controller,
    EntropyController,
    KLControllerKind,
    make_kl_controller,
)
from grpo.objectives.estimators import check_estimator
from grpo.objectives.kl import KLEstimator
from grpo.objectives.maxent import MaxEntWeights, TauController
from grpo.objectives.registry import get_objective
from grpo.objectives.terms import LossTerms, Proximal

_ADVANTAGE = Unread(lambda c: c.train.is_maxent, "by train.objective={train.objective}, whose "
                    "weights come from the section maxent;")
_KL = Unread(lambda c: c.train.kl_to_ref_coeff is None and c.train.kl_to_inference_coeff is None,
             "because both train.kl_to_ref_coeff and train.kl_to_inference_coeff are null; set one "
             "of them, or")
_TAU = only_with("maxent.tau_target")
_TOPK = only_with("distill.topk_coeff")


class ObjectiveConfig(Section):
    """What the loss is made of; the formulas are in ``docs/objectives.md``."""

    objective: str = "ppo_clip"
    clip_epsilon: float | tuple[float, float] | None = None
    """null: the objective's own."""
    objective_options: dict[str, Any] | None = None
    """Its other options, for example ``{delta: 3.0}`` of ``ppo_clip``."""
    aggregation: Aggregation = "token"
    proximal: Proximal = "sampled"
    mismatch: dict[str, float | tuple[float, float]] | None = None
    """Corrections by name, for example ``{tis: 2.0}``."""
    off_policy_delta: float | None = Field(None, ge=0)
    entropy_top_fraction: float | None = Field(None, gt=0, lt=1)
    """Share of the tokens, those with the highest entropy, that the objective is applied to."""
    kl_to_ref_coeff: float | None = Field(None, ge=0)
    kl_to_inference_coeff: float | None = Field(None, ge=0)
    kl_estimator: Annotated[KLEstimator | None, _KL] = None
    """null: k3 in the loss, k1 in the reward."""
    kl_in_reward: Annotated[bool, _ADVANTAGE] = False
    """Subtract the KL to the reference from the reward instead of adding it to the loss; with
    ``global_norm`` from that of each token on, as REINFORCE++ does."""
    entropy_coeff: float | None = Field(None, ge=0)
    advantage_estimator: Annotated[str | None, _ADVANTAGE] = None
    """null: group_norm; ``module:function``: your own."""
    advantage_eps: Annotated[float | None, _ADVANTAGE] = Field(None, ge=0)
    """Added to what the estimator divides by; null: 1e-4, and 0 for maxrl."""
    advantage_clip_percentile: Annotated[float | None, _ADVANTAGE] = Field(None, gt=0, lt=50)
    zero_variance_filter: Annotated[bool, _ADVANTAGE] = False
    mask_truncated: Annotated[bool, _ADVANTAGE] = False
    overlong_buffer: Annotated[float | None, _ADVANTAGE] = Field(None, gt=0)
    """Tokens before ``inference_model.max_tokens`` over which length is punished; below 1: as a
    share of it."""
    overlong_factor: Annotated[float | None, only_with("train.overlong_buffer")] = Field(None, gt=0)
    """null: 1."""
    max_sampling_rounds: int | None = Field(None, ge=2)
    """Dynamic sampling: generate until all groups of a batch have different rewards, at most so
    many rounds; null: every group is used."""

    @field_validator("objective")
    @classmethod
    def _is_there(cls, name: str) -> str:
        try:
            get_objective(name)
        except ValueError as error:
            raise ValueError(f"train.objective={name}: {error}") from None
        return name

    @property
    def is_maxent(self) -> bool:
        """Whether the objective reads the weights of the section ``maxent``."""
        return get_objective(self.objective).reads_listwise_weight

    @property
    def compares_rows(self) -> bool:
        return get_objective(self.objective).scope == "group"

    @property
    def kl_in_loss_coeff(self) -> float | None:
        return None if self.kl_in_reward else self.kl_to_ref_coeff

    def loss_terms(self) -> dict[str, Any]:
        """Arguments of :class:`LossTerms`."""
        return {
            "objective": self.objective, "clip_epsilon": self.clip_epsilon,
            "objective_options": self.objective_options, "proximal": self.proximal,
            "mismatch": self.mismatch, "off_policy_delta": self.off_policy_delta,
            "high_entropy_only": self.entropy_top_fraction is not None,
            "kl_to_ref_coeff": self.kl_in_loss_coeff,
            "kl_to_inference_coeff": self.kl_to_inference_coeff,
            "kl_estimator": self.kl_estimator if self.kl_estimator and not self.kl_in_reward
            else "k3",
            "entropy_coeff": self.entropy_coeff,
        }

    @model_validator(mode="after")
    def _terms_are_valid(self) -> ObjectiveConfig:
        if self.compares_rows and self.entropy_top_fraction is not None:
            raise ValueError(f"train.entropy_top_fraction={self.entropy_top_fraction} chooses "
                             f"single tokens, but train.objective={self.objective!r} has one term "
                             "a sequence; remove it")
        LossTerms(**self.loss_terms())
        return self

    @model_validator(mode="after")
    def _kl_in_reward_is_possible(self) -> ObjectiveConfig:
        if self.kl_in_reward and not self.kl_to_ref_coeff:
            raise ValueError("train.kl_in_reward=true needs train.kl_to_ref_coeff above 0; set it, "
                             "or set kl_in_reward to false")
        if self.kl_in_reward and self.kl_estimator == "unbiased_k3":
            raise ValueError("train.kl_estimator='unbiased_k3' is for the loss: it weighs by the "
                             "ratio; with train.kl_in_reward=true use k1, k2 or k3")
        if self.kl_in_reward and self.kl_to_inference_coeff is not None and self.kl_estimator:
            raise ValueError(f"train.kl_estimator={self.kl_estimator!r} would name the estimator "
                             "of the reward and of train.kl_to_inference_coeff at once; remove it")
        if self.kl_in_reward and self.advantage_estimator == "global_norm" and not (
                get_objective(self.objective).token_advantages):
            raise ValueError("train.kl_in_reward=true with train.advantage_estimator=global_norm "
                             "gives each token its own advantage, but the ratio of "
                             f"train.objective={self.objective!r} is that of a whole sequence; use "
                             "gspo_token, or another estimator")
        return self

    @model_validator(mode="after")
    def _advantages_are_possible(self) -> ObjectiveConfig:
        buffer = self.overlong_buffer
        if buffer is not None and buffer > 1 and buffer != int(buffer):
            raise ValueError(f"train.overlong_buffer={buffer} must be a whole number of tokens, or "
                             "a share below 1")
        if self.compares_rows and self.aggregation != "prompt":
            raise ValueError(f"train.objective={self.objective!r} is a loss of whole groups; "
                             "set train.aggregation=prompt")
        estimator = self.advantage_estimator or "group_norm"
        with _named("train.advantage_estimator"):
            check_estimator(estimator)
        with _named("train.advantage_eps"):
            check_estimator(estimator, self.advantage_eps)
        taken_off = {"overlong_buffer": buffer, "kl_in_reward": self.kl_in_reward or None}
        for name, value in taken_off.items():
            if estimator == "maxrl" and value is not None:
                raise ValueError(f"train.{name}={str(value).lower()} makes rewards of 0 negative, "
                                 "and train.advantage_estimator=maxrl divides by their mean; "
                                 "remove it, or use another estimator")
        return self


class KLControllerConfig(Section):
    """Adapts ``train.kl_to_ref_coeff``, its first value, to the measured KL."""

    only = only_with("kl_controller.kind")

    kind: KLControllerKind | None = None
    """null: the coefficient stays."""
    target: float | None = Field(None, gt=0)
    """Nats a token."""
    horizon: float | None = Field(None, gt=0)
    step: float | None = Field(None, gt=0)
    band: float | None = Field(None, ge=1)
    factor: float | None = Field(None, gt=1)

    def controller(self, init: float | None) -> Controller | None:
        """The controller, starting at ``init``; None if there is none."""
        options = self.given()
        kind = options.pop("kind", None)
        if kind is None:
            return None
        if not init:
            raise ValueError(f"kl_controller.kind={kind!r} needs train.kl_to_ref_coeff above 0, "
                             "where it starts; set it, or set kind to null")
        with _named("kl_controller"):
            return make_kl_controller(kind, init, **options)


class EntropyControllerConfig(Section):
    """Adapts ``train.entropy_coeff``, its first value, to keep the entropy up."""

    only = only_with("entropy_controller.target")

    target: float | None = Field(None, gt=0)
    """Nats a token; null: the coefficient stays."""
    step: float | None = Field(None, gt=0)
    minimum: float | None = Field(None, ge=0)
    maximum: float | None = Field(None, gt=0)

    def controller(self, init: float | None) -> EntropyController | None:
        """The controller, starting at ``init``; None if there is none."""
        options = self.given()
        if self.target is None:
            return None
        for key in ("step", "maximum"):
            if key not in options:
                raise ValueError(f"entropy_controller.target={self.target} needs "
                                 f"entropy_controller.{key}; add it")
        if init is None:
            raise ValueError(f"entropy_controller.target={self.target} needs train.entropy_coeff, "
                             "where it starts; set it, to 0 for example")
        with _named("entropy_controller, whose init is train.entropy_coeff"):
            return EntropyController(init, **options)


class MaxEntConfig(Section):
    """Weights of ``train.objective=maxent_listwise`` and ``maxent_weighted``."""

    only = Unread(lambda c: not c.train.is_maxent, "by train.objective={train.objective}, but by "
                  "maxent_listwise and maxent_weighted;")

    tau: float | None = Field(None, ge=0)
    """null: 1."""
    beta: float | None = Field(None, ge=0)
    """null: 0, no pull towards the reference."""
    q_temperature: float | None = Field(None, gt=0)
    q_epsilon: float | None = Field(None, ge=0, lt=1)
    length_normalize_ref: Annotated[bool | None, only_with("maxent.beta")] = None
    tau_target: float | None = Field(None, gt=0)
    """Wanted entropy of the weights, nats; null: tau stays."""
    tau_step: Annotated[float | None, _TAU] = Field(None, gt=0)
    tau_minimum: Annotated[float | None, _TAU] = Field(None, gt=0)
    tau_maximum: Annotated[float | None, _TAU] = Field(None, gt=0)

    def weights(self) -> MaxEntWeights:
        options = {key: value for key, value in self.given().items()
                   if not key.startswith("tau_")}
        with _named("maxent"):
            return MaxEntWeights(**{"tau": 1.0, **options})

    def controller(self, *, group_size: int) -> TauController | None:
        """The controller of tau; None if there is none."""
        options = {key.removeprefix("tau_"): value for key, value in self.given().items()
                   if key.startswith("tau_")}
        if self.tau_target is None:
            return None
        options = {"step": 0.1, "minimum": 1e-3, "maximum": 1e3, **options}
        with _named("maxent.tau_*, whose init is maxent.tau and group_size env.repeats"):
            return TauController(1.0 if self.tau is None else self.tau, group_size=group_size,
                                 **options)


class DistillConfig(Section):
    """A teacher: its own tokens (``topk_coeff``) or its opinion of the policy's
    (``reverse_kl_coeff``), or both."""

    only = only_with("distill.teacher")

    teacher: str | None = None
    """Folder or hub id of a model with the same vocabulary; null: none."""
    reverse_kl_coeff: float | None = Field(None, gt=0)
    topk_coeff: float | None = Field(None, gt=0)
    topk: Annotated[int | None, _TOPK] = Field(None, ge=1)
    """Tokens of the teacher's distribution; null: 20."""
    temperature: Annotated[float | None, _TOPK] = Field(None, gt=0)
    """Of the top-k cross-entropy; null: that of sampling."""

    @model_validator(mode="after")
    def _a_teacher_teaches(self) -> DistillConfig:
        if self.teacher is not None and self.reverse_kl_coeff is None and self.topk_coeff is None:
            raise ValueError(f"distill.teacher={self.teacher!r} teaches nothing: set "
                             "distill.reverse_kl_coeff or distill.topk_coeff")
        return self


@contextmanager
def _named(section: str) -> Iterator[None]:
    """Say which section an error of what it configures is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{section}: {error}") from None


