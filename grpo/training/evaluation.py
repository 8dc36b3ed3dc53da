"""How good the policy is on problems it never trains on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDictBase

from grpo import data
from grpo.envs.rewards.batch import check_failures, first_failures
from grpo.envs.verifiable import VerifiableEnv
from grpo.policies.base import Policy
from grpo.policies.converse import respond

#: Is told of a batch: its problems, the text, reward (None without one) and success of each row.
Listener = Callable[[list, list[str], list[float | None], list[bool]], None]


@dataclass(frozen=True)
class Evaluation:
    """Result on a held-out split."""

    accuracy: float  # share of problems whose verifier said yes
    reward: float  # mean over the problems that have one
    errors: int  # problems without a reward; they count as not solved
    batch: TensorDictBase  # the first one, for showing
    problems: list  # of that batch
    #: Mean of each of several rewards over the problems that it is for, if there are any.
    parts: dict[str, float] = field(default_factory=dict)
    ids: list[str] = field(default_factory=list)  # of all problems
    solved: list[bool] = field(default_factory=list)  # each of them
    #: Of samples and benchmarks, under the names of ``metrics.jsonl``.
    more: dict[str, float] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)  # see grpo.report.eval_file

    def metrics(self) -> dict[str, float]:
        """Under the names of ``metrics.jsonl``."""
        return {"eval/accuracy": self.accuracy, "eval/reward": self.reward,
                "eval/errors": float(self.errors),
                **{f"eval/reward/{name}/mean": mean for name, mean in self.parts.items()},
                **self.more}


class Evaluator:
    """Greedy accuracy on every problem of a split, once each.

    Args:
        env: with ``group_size=1`` and ``shuffle=False`` over the held-out prompts.
        policy: what generates; it is asked for greedy decoding.
        max_reward_errors: greatest share of the problems for which reward functions may fail.

    Attributes:
        at_checkpoints: whether some of it waits for checkpoints.

    Raises:
        ValueError: if the environment would repeat or reorder problems.
    """

    at_checkpoints = False

    def __init__(
        self, env: VerifiableEnv, policy: Policy, *, max_reward_errors: float = 0.5
    ) -> None:
        if env.group_size != 1 or env.stream.shuffle:
            raise ValueError("evaluation needs an environment with group_size=1 and shuffle=False")
        self.env, self.policy = env, policy.with_sampling(temperature=0.0)
        self.max_reward_errors = max_reward_errors

    @torch.no_grad()
    def run(self, listen: Listener | None = None) -> Evaluation:
        """Evaluate with the weights as they are now; ``listen`` is told of each batch.

        Raises:
            RewardsFailed: as soon as reward functions failed for too many problems.
        """
        rewards, errors = 0.0, 0
        parts: dict[str, list[float]] = {name: [] for name in self.env.several_rewards}
        ids, solved = list[str](), list[bool]()
        first: tuple[TensorDictBase, list] | None = None
        for part, problems in answered(self.env, self.policy,
                                       max_reward_errors=self.max_reward_errors):
            ids += [problem.id for problem in problems]
            solved += part[data.SUCCESS].flatten().tolist()
            errors += int(part[data.REWARD_ERROR].sum())
            rewards += float(part[data.REWARD].sum())
            for name in parts:
                given = part[(*data.REWARD_PARTS, name)][~part[data.REWARD_ERROR]]
                parts[name] += given[~given.isnan()].tolist()
            first = first or (part, problems)
            if listen is not None:
                listen(problems, *told(self.env, part))
        total = len(self.env.stream.prompts)
        scored = max(1, total - errors)
        return Evaluation(sum(solved) / total, rewards / scored, errors, *first,
                          {name: sum(given) / len(given) for name, given in parts.items() if given},
                          ids, solved)


def answered(
    env: VerifiableEnv, policy: Policy, *, max_reward_errors: float
) -> Iterator[tuple[TensorDictBase, list]]:
    """Scored rows and their problems, batch by batch, each problem of an environment that keeps
    their order once; ``env.responses`` has the tokens of a batch until the next one.

    Raises:
        RewardsFailed: as soon as reward functions failed for more than a share of the rows.
    """
    total, seen, faults = len(env.stream.prompts), 0, []
    failures: dict[str, str] = {}
    env.stream.load_state_dict({"epoch": 0, "position": 0})
    while seen < total:
        batch = env.step(respond(policy, env, env.reset()))
        # The last batch wraps around to the first problems, which are not counted twice.
        groups = min(env.num_prompts, total - seen)
        part = batch[:groups * env.group_size]
        faults.append(part[data.REWARD_FAULT].flatten())
        failures = first_failures([failures, env.failures])
        check_failures(torch.cat(faults), failures, limit=max_reward_errors, when="evaluation")
        yield part, env.current_problems[:len(part)]
        seen += groups


def told(
    env: VerifiableEnv, part: TensorDictBase
) -> tuple[list[str], list[float | None], list[bool]]:
    """Texts, rewards and successes of the rows of a batch, as a :data:`Listener` is told them."""
    rewards = [None if error else reward for error, reward in zip(
        part[data.REWARD_ERROR].flatten().tolist(), part[data.REWARD].flatten().tolist(),
        strict=True)]
    return texts_of(env, len(part)), rewards, part[data.SUCCESS].flatten().tolist()


def texts_of(env: VerifiableEnv, rows: int, *, last_turn: bool = False) -> list[str]:
    """Texts of an environment's last responses: all behind the prompts, or the last turn alone."""
    tokens = [row.tokens if last_turn or row.talk is None else row.talk
              for row in env.responses[:rows]]
    return env.tokenizer.batch_decode(tokens, skip_special_tokens=True)
