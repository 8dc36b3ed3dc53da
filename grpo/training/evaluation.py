"""How good the policy is on problems it never trains on."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from tensordict import TensorDictBase

from grpo import data
from grpo.envs.rewards.batch import check_failures, first_failures
from grpo.envs.verifiable import VerifiableEnv
from grpo.policies.base import Policy
from grpo.policies.converse import respond


@dataclass(frozen=True)
class Evaluation:
    """Result on a held-out split."""

    accuracy: float  # share of problems whose verifier said yes
    reward: float  # mean over the problems that have one
    errors: int  # problems without a reward; they count as not solved
    batch: TensorDictBase  # the first one, for showing
    problems: list  # of that batch
    parts: dict[str, float] = field(default_factory=dict)  # mean of each of several rewards

    def metrics(self) -> dict[str, float]:
        """Under the names of ``metrics.jsonl``."""
        return {"eval/accuracy": self.accuracy, "eval/reward": self.reward,
                "eval/errors": float(self.errors),
                **{f"eval/reward/{name}/mean": mean for name, mean in self.parts.items()}}


class Evaluator:
    """Greedy accuracy on every problem of a split, once each.

    Args:
        env: with ``group_size=1`` and ``shuffle=False`` over the held-out prompts.
        policy: what generates; it is asked for greedy decoding.
        max_reward_errors: greatest share of the problems for which reward functions may fail.

    Raises:
        ValueError: if the environment would repeat or reorder problems.
    """

    def __init__(
        self, env: VerifiableEnv, policy: Policy, *, max_reward_errors: float = 0.5
    ) -> None:
        if env.group_size != 1 or env.stream.shuffle:
            raise ValueError("evaluation needs an environment with group_size=1 and shuffle=False")
        self.env, self.policy = env, policy.with_sampling(temperature=0.0)
        self.max_reward_errors = max_reward_errors

    @torch.no_grad()
    def run(self) -> Evaluation:
        """Evaluate with the weights as they are now.

        Raises:
            RewardsFailed: as soon as reward functions failed for too many problems.
        """
        total = len(self.env.stream.prompts)
        self.env.stream.load_state_dict({"epoch": 0, "position": 0})
        solved, rewards, errors, seen = 0, 0.0, 0, 0
        parts, faults = dict.fromkeys(self.env.several_rewards, 0.0), []
        failures: dict[str, str] = {}
        first: tuple[TensorDictBase, list] | None = None
        while seen < total:
            batch = self.env.step(respond(self.policy, self.env, self.env.reset()))
            # The last batch wraps around to the first problems, which are not counted twice.
            rows = min(self.env.batch_size[0], total - seen)
            part = batch[:rows]
            solved += int(part[data.SUCCESS].sum())
            errors += int(part[data.REWARD_ERROR].sum())
            rewards += float(part[data.REWARD].sum())
            for name in parts:
                parts[name] += float(part[(*data.REWARD_PARTS, name)].sum())
            faults.append(part[data.REWARD_FAULT].flatten())
            failures = first_failures([failures, self.env.failures])
            check_failures(torch.cat(faults), failures, limit=self.max_reward_errors,
                           when="evaluation")
            first = first or (part, self.env.current_problems[:rows])
            seen += rows
        scored = max(1, total - errors)
        return Evaluation(solved / total, rewards / scored, errors, *first,
                          {name: value / scored for name, value in parts.items()})
