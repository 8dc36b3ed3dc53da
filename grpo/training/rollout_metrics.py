"""What a rollout says of rewards, lengths and advantages."""

from __future__ import annotations

from tensordict import TensorDictBase

from grpo import data
from grpo.objectives.maxent import weight_entropy
from grpo.objectives.shaping import informative_groups

_FAULTS = {"skipped": data.FAULT_SKIPPED, "timeouts": data.FAULT_LATE, "raised": data.FAULT_FAILED,
           "invalid": data.FAULT_INVALID, "ended": data.FAULT_ENDED}


def rollout_metrics(rollout: TensorDictBase) -> dict[str, float]:
    """Rewards and lengths of a rollout; rows without a reward are counted, not averaged in.

    ``reward/errors`` counts all of them: those that a function left out by None (``skipped``), for
    which it took too long (``timeouts``), raised (``raised``), returned what is no reward
    (``invalid``), or ended its process (``ended``). Of several rewards each has its mean, before
    its weight, over the rows that it is for.
    """
    valid = ~rollout[data.REWARD_ERROR].flatten()
    sampled_BT = rollout[data.ASSISTANT_MASK]
    sizes = sampled_BT.sum(-1).float()
    turns = (sampled_BT[:, 1:] & ~sampled_BT[:, :-1]).sum(-1).float()
    metrics = {
        "reward/errors": (~valid).sum().item(),
        "tokens/response_mean": sizes.mean().item(),
        "tokens/response_max": sizes.max().item(),
        "tokens/turns_mean": turns.mean().item(),
        "tokens/total": rollout[data.ATTENTION_MASK].sum().item(),
        "tokens/truncated_fraction": rollout[data.TRUNCATED].float().mean().item(),
    }
    if (fault := rollout.get(data.REWARD_FAULT, None)) is not None:
        metrics |= {f"reward/{name}": (fault == code).sum().item()
                    for name, code in _FAULTS.items()}
    if valid.any():
        for name, part in rollout.get(data.REWARD_PARTS, {}).items():
            given = part.flatten()[valid]
            given = given[~given.isnan()]
            if len(given):
                metrics[f"reward/{name}/mean"] = given.mean().item()
        rewards = rollout[data.REWARD].flatten()[valid]
        metrics["reward/mean"] = rewards.mean().item()
        metrics["reward/std"] = rewards.std(correction=0).item()
        metrics["reward/success_rate"] = (
            rollout[data.SUCCESS].flatten()[valid].float().mean().item())
    return metrics


def advantage_metrics(rollout: TensorDictBase) -> dict[str, float]:
    """How many groups carry no signal, and what shaping and filters did, where they are on."""
    group_B, valid_B = rollout[data.GROUP_ID], ~rollout[data.REWARD_ERROR].flatten()
    # Not from shaped rewards, which a KL makes differ everywhere, nor from the advantages: a
    # teacher or the batch's mean may speak where rewards are equal.
    useful_B = informative_groups(rollout[data.REWARD].flatten(), group_B, valid_B)
    groups = len(group_B.unique())
    metrics = {"reward/zero_variance_groups": 1 - len(group_B[useful_B].unique()) / groups}
    if data.SHAPED_REWARD in rollout.keys(True) and valid_B.any():
        metrics["reward/shaped_mean"] = rollout[data.SHAPED_REWARD][valid_B].mean().item()
    if data.TEACHER_LOG_PROBS in rollout.keys(True):
        # The k1 estimate of KL(policy || teacher), nats a token.
        gap_BT = rollout[data.LOG_PROBS] - rollout[data.TEACHER_LOG_PROBS]
        metrics["policy/kl_to_teacher"] = gap_BT[rollout[data.ASSISTANT_MASK]].mean().item()
    if data.ROW_MASK in rollout.keys():
        metrics["reward/rows_in_loss"] = rollout[data.ROW_MASK].float().mean().item()
    if data.LISTWISE_WEIGHT in rollout.keys():
        entropy_G, size_G = weight_entropy(rollout[data.LISTWISE_WEIGHT].flatten(), group_B,
                                           valid_B=valid_B)
        if (size_G > 1).any():  # a single row has nothing to share
            metrics["advantage/weight_entropy"] = entropy_G[size_G > 1].mean().item()
    return metrics


def advantage_counts(rollout: TensorDictBase) -> dict[str, float]:
    """How many rows are made more likely and how many less; those of several signs are neither.

    An advantage below 1e-9 is what rounding leaves of equal rewards, and counts as 0.
    """
    if data.ADVANTAGE not in rollout.keys():
        return {}
    low_B, high_B = (value_B.where(value_B.abs() > 1e-9, 0.0)
                     for value_B in rollout[data.ADVANTAGE].aminmax(dim=-1))
    zero_B = (low_B == 0) & (high_B == 0)
    return {"advantage/zero_fraction": zero_B.float().mean().item(),
            "advantage/positive_rows": ((high_B > 0) & (low_B >= 0)).sum().item(),
            "advantage/negative_rows": ((low_B < 0) & (high_B <= 0)).sum().item()}
