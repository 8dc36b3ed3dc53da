"""From the log-probs of some tokens to the terms of the loss: the configuration of the objective,
checked once, and its arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from grpo.objectives.inputs import BatchTokens
from grpo.objectives.kl import KLEstimator, check_kl_estimator, kl_estimate
from grpo.objectives.mismatch import (
    check_off_policy_delta,
    make_mismatch,
    off_policy_sequence_mask,
)
from grpo.objectives.registry import ClipEpsilon, Options, Scope, get_objective
from grpo.objectives.tokens import LossTokens

Proximal = Literal["sampled", "current", "scored"]


class LossTerms:
    """The terms of a loss as functions of log-probs and entropies.

    Arguments and errors are those of :class:`~grpo.objectives.grpo.GRPOLoss`. The coefficients
    may be set between optimizer steps; a term whose coefficient is None does not exist.
    """

    def __init__(
        self, *, objective: str, clip_epsilon: ClipEpsilon, objective_options: Options,
        proximal: Proximal, mismatch: Mapping[str, float | tuple[float, float]] | None,
        off_policy_delta: float | None, high_entropy_only: bool, kl_to_ref_coeff: float | None,
        kl_to_inference_coeff: float | None, kl_estimator: KLEstimator, entropy_coeff: float | None,
    ) -> None:
        for name, value in (("kl_to_ref_coeff", kl_to_ref_coeff), ("entropy_coeff", entropy_coeff),
                            ("kl_to_inference_coeff", kl_to_inference_coeff)):
            if value is not None and not value >= 0:  # NaN included
                raise ValueError(f"{name}={value} must be a number that is not negative")
        if proximal not in get_args(Proximal):
            raise ValueError(f"proximal={proximal!r} is unknown; use one of {get_args(Proximal)}")
        self.objective = get_objective(objective)
        self.objective_options = self.objective.resolve(clip_epsilon, objective_options)
        self.proximal, self.mismatch = proximal, make_mismatch(mismatch)
        self.off_policy_delta = check_off_policy_delta(off_policy_delta)
        self.high_entropy_only = high_entropy_only
        self.kl_to_ref_coeff, self.kl_to_inference_coeff = kl_to_ref_coeff, kl_to_inference_coeff
        self.kl_estimator = check_kl_estimator(kl_estimator)
        self.entropy_coeff = entropy_coeff
        self._check_combination()

    def _check_combination(self) -> None:
        """Refuse options that leave each other without effect."""
        if self.mismatch is not None and self.proximal == "sampled":
            raise ValueError(
                f"mismatch={dict(self.mismatch.bounds)} corrects for the gap between the proximal "
                "and the sampling policy, which are the same with proximal='sampled'; set "
                "proximal='current' (one step a rollout) or 'scored'")
        for name in ("mismatch", "off_policy_delta", "high_entropy_only"):
            if self.objective.scope == "group" and getattr(self, name):
                raise ValueError(f"{name} weighs single tokens, but objective="
                                 f"{self.objective.name!r} has one term a sequence; remove it")

    @property
    def clip_epsilon(self) -> tuple[float, float] | None:
        """``(low, high)`` of the objective; None where nothing is clipped."""
        options = self.objective_options
        return None if options.get("clip_coeff") == 0 else options.get("clip_epsilon")

    @property
    def scope(self) -> Scope:
        """How many tokens must be known at once to differentiate the loss."""
        by_sequence = (self.off_policy_delta is not None
                       or self.mismatch is not None and self.mismatch.scope == "sequence")
        return "sequence" if by_sequence else self.objective.scope

    @property
    def names(self) -> list[str]:
        """Names of the terms, in the order of :meth:`__call__`."""
        present = {"loss_objective": True, "loss_kl_to_ref": self.kl_to_ref_coeff is not None,
                   "loss_kl_to_inference": self.kl_to_inference_coeff is not None,
                   "loss_entropy": self.entropy_coeff is not None}
        return [name for name, there in present.items() if there]

    def __call__(
        self, log_probs_N: Tensor, entropy_N: Tensor, tokens: BatchTokens
    ) -> dict[str, Tensor]:
        """The terms, each a scalar already normalised by the weights of the tokens.

        The log-probs (with gradient) and entropies (nats) are those of ``tokens``, which are whole
        sequences or groups where :attr:`scope` says so.
        """
        flat, view = tokens.flat, self._view(log_probs_N, tokens)

        def reduce(term_N: Tensor) -> Tensor:
            return (flat["weight"] * term_N).sum()

        def kl_to(other: str) -> Tensor:
            return reduce(kl_estimate(log_probs_N, flat[other], estimator=self.kl_estimator,
                                      log_ratio_N=view.log_ratio_N))

        out = {"loss_objective": reduce(self._objective(view, flat))}
        if self.kl_to_ref_coeff is not None:
            out["loss_kl_to_ref"] = self.kl_to_ref_coeff * kl_to("ref")
        if self.kl_to_inference_coeff is not None:
            out["loss_kl_to_inference"] = self.kl_to_inference_coeff * kl_to("sampled")
        if self.entropy_coeff is not None:
            out["loss_entropy"] = -self.entropy_coeff * reduce(entropy_N)
        return out

    def _objective(self, view: LossTokens, flat: TensorDictBase) -> Tensor:
        """The corrected term of each token, ``[N]``."""
        term_N = self.objective.function(view, **self.objective_options)
        if self.mismatch is not None:
            term_N = term_N * self.mismatch.weights(view.old_log_probs_N - flat["sampled"], view)
        if self.off_policy_delta is not None:
            term_N = term_N * off_policy_sequence_mask(
                flat["sampled"], view, delta=self.off_policy_delta)
        if self.high_entropy_only:
            term_N = term_N * flat["high_entropy"].to(term_N.dtype)
        return term_N

    def _view(self, log_probs_N: Tensor, tokens: BatchTokens) -> LossTokens:
        if self.proximal == "current":
            return tokens.loss_tokens(log_probs_N, log_probs_N.detach())
        old_N = tokens.flat["sampled" if self.proximal == "sampled" else "proximal"]
        return tokens.loss_tokens(log_probs_N, old_N)

    def statistics(
        self, log_probs_N: Tensor, entropy_N: Tensor, tokens: BatchTokens
    ) -> TensorDict:
        """What the diagnostics are made of, ``batch_size [N]``, without gradient."""
        log_probs_N, entropy_N = log_probs_N.detach(), entropy_N.detach()
        flat, view = tokens.flat, self._view(log_probs_N, tokens)
        out = {"log_ratio": view.log_ratio_N, "advantage": view.advantage_N, "entropy": entropy_N,
               "log_prob": log_probs_N, "to_inference": log_probs_N - flat["sampled"]}
        if self.objective.scope != "token":  # what such an objective clips
            out["clipped_log_ratio"] = view.of_row(view.row_mean(view.log_ratio_N))
        if "ref" in flat.keys():
            out["to_ref"] = log_probs_N - flat["ref"]
        if self.mismatch is not None:
            out["gap"] = view.old_log_probs_N - flat["sampled"]
            out["gap_weight"] = self.mismatch.weights(out["gap"], view)
            out["gap_raw_weight"] = self.mismatch.raw_log_weight(out["gap"], view)
        if self.off_policy_delta is not None:
            out["off_policy_mask"] = off_policy_sequence_mask(
                flat["sampled"], view, delta=self.off_policy_delta)
        return TensorDict(out, batch_size=flat.batch_size)
