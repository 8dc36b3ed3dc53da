"""Proof after each update that the engine generates with the trainer's weights.

The engine continues a few fixed prompts, and the trainer's model scores the same tokens. That goes
through both systems' whole forward pass, so it also catches what a comparison of weights cannot:
stale key-value caches, a different temperature, a model that is computed differently. When it
fails, :mod:`grpo.weights.diagnosis` finds out why.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from grpo import data
from grpo.objectives.scorer import TokenScorer
from grpo.policies.base import Policy
from grpo.policies.scoring import evaluating
from grpo.weights.diagnosis import diagnose
from grpo.weights.replay import ReplayedScorer
from grpo.weights.shared import WeightSync, some_names
from grpo.weights.tolerance import CanaryReport, canary_tolerance

# Share of the longest prompt's length that the shortest must have for all to be cut to its length.
_NEARLY = 0.75


class StaleWeightsError(RuntimeError):
    """The engine does not generate with the trainer's weights."""


class Canary:
    """Compare engine and trainer on fixed prompts after every weight update.

    Args:
        policy: what generates the rollouts.
        scorer: what the loss scores tokens with.
        weights: names the parameters that differ when the check fails.
        prompts: token ids of a few prompts, at most as long as the policy's own; cut from the left
            to the length of the shortest if they are nearly of one length.
        max_tokens: tokens generated for each prompt. Two check prefill and decoding; each more
            costs another pass of the engine.
        tolerance: ``(mean, max)`` in nats; by default chosen by the weights' dtype.

    Attributes:
        failures: checks that failed so far.

    Raises:
        StaleWeightsError: from a check if a parameter is no longer shared or the difference is past
            tolerance, with what differs, why, and what to do.
    """

    def __init__(self, policy: Policy, scorer: TokenScorer, weights: WeightSync, *,
                 prompts: list[list[int]], max_tokens: int = 2,
                 tolerance: tuple[float, float] | None = None) -> None:
        self.policy = policy.with_sampling(max_tokens=max_tokens)
        self.scorer, self.weights = scorer, weights
        self._fast = ReplayedScorer(scorer) if isinstance(scorer, TokenScorer) else scorer
        param = next(scorer.model.parameters())
        self.tolerance = tolerance or canary_tolerance(param.dtype, param.device)
        # Of one length if they nearly are, so that no attention mask has to be made for the scorer.
        # Long prompts stay long: the engine's prefix cache knows whole blocks of tokens only.
        sizes = [*map(len, prompts)]
        if min(sizes) >= _NEARLY * max(sizes):
            prompts = [prompt[-min(sizes):] for prompt in prompts]
        self.prompts = policy.pad_prompts(prompts)
        self.failures = 0
        self._sampled: Callable[[], TensorDictBase] | None = None

    def check(self) -> CanaryReport:
        """Generate, score, compare; NaN where the engine has older weights on purpose."""
        if self.weights.pending:
            return CanaryReport(math.nan, math.nan)
        self.start()
        return self.finish()

    def start(self) -> None:
        """Begin a check; an engine elsewhere generates until :meth:`finish`."""
        if moved := self.weights.unshared():
            raise StaleWeightsError(
                f"policy version {self.weights.version}: {some_names(moved)} no longer lies in the "
                "engine's memory, so its updates do not reach the engine. Something replaced the "
                "parameter's storage; write into parameters in place instead")
        self._sampled = self.policy.start(self.prompts.clone())

    def finish(self) -> CanaryReport:
        """Score and compare; the trainer's weights must be those of :meth:`start`."""
        sampled, self._sampled = self._sampled, None
        report = CanaryReport.of(self.differences(self._to_score(sampled()), scorer=self._fast))
        if not self.agrees(report):
            self.failures += 1
            with evaluating(self.scorer.model):
                cause = diagnose(self)
            raise StaleWeightsError(
                f"policy version {self.weights.version}: engine and trainer disagree on the same "
                f"tokens by {report.mean_abs_diff:.2e} mean, {report.max_abs_diff:.2e} max nats "
                f"(allowed {self.tolerance[0]:.0e}, {self.tolerance[1]:.0e}); {cause}")
        return report

    def agrees(self, report: CanaryReport) -> bool:
        """Whether a difference is within the tolerance; NaN is not."""
        return (report.mean_abs_diff <= self.tolerance[0]
                and report.max_abs_diff <= self.tolerance[1])

    def compare(self, prompts: TensorDict) -> CanaryReport:
        """Let the policy continue ``prompts`` and score the tokens it sampled."""
        return CanaryReport.of(self.differences(self.sample(prompts)))

    def sample(self, prompts: TensorDict) -> TensorDict:
        """Let the policy continue prompts."""
        return self._to_score(self.policy(prompts.clone()))

    def _to_score(self, sampled: TensorDictBase) -> TensorDictBase:
        """What the scorer reads, on the scorer's device."""
        batch = sampled.select(
            data.TOKENS, data.ATTENTION_MASK, data.ASSISTANT_MASK, data.LOG_PROBS)
        return data.trim(batch).to(next(self.scorer.model.parameters()).device)

    @torch.no_grad()
    def differences(self, batch: TensorDictBase, *, scorer: TokenScorer | None = None) -> Tensor:
        """Trainer's minus engine's log-prob of each sampled token, in nats, float32 ``[N]``.

        Args:
            batch: from :meth:`sample`.
            scorer: None takes the trainer's own, which replays nothing.
        """
        mask_BT = batch[data.ASSISTANT_MASK]
        # Engines have no dropout. A replay has none either, and needs no walk through the modules.
        with nullcontext() if scorer else evaluating(self.scorer.model):
            log_probs_BT, _ = (scorer or self.scorer)(
                batch[data.TOKENS], batch[data.ATTENTION_MASK], mask_BT)
        return (log_probs_BT - batch[data.LOG_PROBS])[mask_BT]
