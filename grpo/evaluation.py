"""How good the policy is on problems it never trains on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDictBase

from grpo import data
from grpo.envs.verifiable import VerifiableEnv
from grpo.policies.base import Policy


@dataclass(frozen=True)
class Evaluation:
    """Result on a held-out split.

    Attributes:
        accuracy: share of problems whose verifier said yes.
        reward: mean reward over the problems that have one.
        errors: problems without a reward; they count as not solved.
        batch: prompts, responses and rewards of the first batch, for showing.
        problems: the problems of ``batch``.
    """

    accuracy: float
    reward: float
    errors: int
    batch: TensorDictBase
    problems: list

    def metrics(self) -> dict[str, float]:
        """Under the names of ``metrics.jsonl``."""
        return {"eval/accuracy": self.accuracy, "eval/reward": self.reward,
                "eval/errors": float(self.errors)}


class Evaluator:
    """Greedy accuracy on every problem of a split, once each.

    Args:
        env: with ``group_size=1`` and ``shuffle=False`` over the held-out prompts.
        policy: what generates; it is asked for greedy decoding.

    Raises:
        ValueError: if the environment would repeat or reorder problems.
    """

    def __init__(self, env: VerifiableEnv, policy: Policy) -> None:
        if env.group_size != 1 or env.stream.shuffle:
            raise ValueError("evaluation needs an environment with group_size=1 and shuffle=False")
        self.env, self.policy = env, policy.with_sampling(temperature=0.0)

    @torch.no_grad()
    def run(self) -> Evaluation:
        """Evaluate with the weights as they are now."""
        total = len(self.env.stream.prompts)
        self.env.stream.load_state_dict({"epoch": 0, "position": 0})
        solved, rewards, errors, seen = 0, 0.0, 0, 0
        first: tuple[TensorDictBase, list] | None = None
        while seen < total:
            batch = self.env.step(self.policy(self.env.reset()))
            # The last batch wraps around to the first problems, which are not counted twice.
            rows = min(self.env.batch_size[0], total - seen)
            part = batch[:rows]
            solved += int(part[data.SUCCESS].sum())
            errors += int(part[data.REWARD_ERROR].sum())
            rewards += float(part[data.REWARD].sum())
            first = first or (part, self.env.current_problems[:rows])
            seen += rows
        scored = max(1, total - errors)
        return Evaluation(solved / total, rewards / scored, errors, *first)
