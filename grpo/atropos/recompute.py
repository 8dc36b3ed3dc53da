"""Log-probs for tokens whose environment sent none and of which the policy kept no record."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

from tensordict import TensorDictBase

from grpo import data
from grpo.objectives.scorer import TokenScorer
from grpo.policies.scoring import score_rollout


@dataclass(eq=False)
class RecomputeLogProbs:
    """Fill in unknown (NaN) sampling log-probs with those of the trainer's present policy.

    Call it before anything reads ``("log_probs", "full")``, and before the first update on the
    rollout: the ratio of these tokens is then 1. That is exact if the present policy sampled them,
    and the best guess if an older one did.

    Args:
        scorer: the loss's own.
        max_tokens: token budget of a micro-batch.

    Attributes:
        metrics: of the last rollout: ``atropos/recomputed_tokens`` and
            ``atropos/recomputed_rows``, shares of its trained tokens and of its rows.
    """

    scorer: TokenScorer
    _: KW_ONLY
    max_tokens: int
    metrics: dict[str, float] = field(default_factory=dict, init=False)

    def __call__(self, rollout: TensorDictBase) -> TensorDictBase:
        log_probs_BT = rollout[data.LOG_PROBS]
        unknown_BT = log_probs_BT.isnan()
        rows_B = unknown_BT.any(-1)
        trained = max(1, int(rollout[data.ASSISTANT_MASK].sum()))
        self.metrics = {"atropos/recomputed_tokens": int(unknown_BT.sum()) / trained,
                        "atropos/recomputed_rows": rows_B.float().mean().item()}
        if rows_B.any():
            scored_BT = log_probs_BT.clone()
            scored_BT[rows_B], _ = score_rollout(self.scorer, rollout[rows_B],
                                                 max_tokens=self.max_tokens)
            rollout[data.LOG_PROBS] = log_probs_BT.where(~unknown_BT, scored_BT)
        return rollout
