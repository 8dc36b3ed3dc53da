"""Evaluations of several completions a problem and of several tasks, beside the greedy one.

They leave no trace in a run: samples have seeds of their own, the same each time, and the process's
random numbers are put back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from grpo import data
from grpo.envs.rewards.answers import answer_tag, normalize_number
from grpo.envs.verifiable import VerifiableEnv
from grpo.policies.base import Policy
from grpo.report.at_k import Samples
from grpo.report.eval_file import TaskScores, record_of
from grpo.training.checkpoint import random_state, restore_random_state
from grpo.training.evaluation import (
    Evaluation,
    Evaluator,
    Listener,
    answered,
    texts_of,
    told,
)

if TYPE_CHECKING:
    from grpo.training.harness import HarnessEvaluator

#: Is told of each completion: ``task``, ``id`` of the problem, number of the ``sample`` (None: the
#: greedy one), ``completion``, ``reward`` (None without one), ``success``.
Told = Callable[[dict[str, Any]], None]


def answer_of(completion: str) -> str | None:
    """What a completion answers, for counting equal answers: its first ``<answer>`` block, else
    what follows the last ``####``, else all of it; numbers in one notation. None if empty.

    Examples:
        >>> [answer_of(text) for text in ("so <answer>1,080</answer>", "6*7 #### 42.0", " 8 ", "")]
        ['1080', '42', '8', None]
    """
    tagged = answer_tag(completion)
    text = completion.rpartition("####")[2] if tagged is None else tagged
    return normalize_number(text) or None


class Sampler:
    """``n`` samples of every problem of a split.

    Args:
        env: with ``group_size=n`` and ``shuffle=False`` over the held-out prompts.
        policy: what generates.
        temperature, seed: of the samples.
        seeds_rows: give each row a seed, because the engine draws in another process. In this one
            it draws from the seeds of the call.
        max_reward_errors: greatest share of the samples for which reward functions may fail.

    Raises:
        ValueError: if the environment would reorder problems.
    """

    def __init__(
        self, env: VerifiableEnv, policy: Policy, *, temperature: float, seed: int,
        seeds_rows: bool = False, max_reward_errors: float = 0.5,
    ) -> None:
        if env.stream.shuffle:
            raise ValueError("evaluation needs an environment with shuffle=False")
        self.env, self.max_reward_errors = env, max_reward_errors
        self.policy = policy.with_sampling(temperature=temperature, seed=seed)
        if seeds_rows and hasattr(self.policy, "seeded"):
            self.policy.seeded = True

    @torch.no_grad()
    def run(self, listen: Listener | None = None) -> tuple[Samples, int]:
        """The samples, and how many of them have no reward; ``listen`` is told of each batch.

        Raises:
            RewardsFailed: as soon as reward functions failed for too many.
        """
        self.policy.calls, n = 0, self.env.group_size
        correct, rewards, answers, errors = [], [], [], 0
        for part, problems in answered(self.env, self.policy,
                                       max_reward_errors=self.max_reward_errors):
            correct += part[data.SUCCESS].flatten().tolist()
            rewards += part[data.REWARD].masked_fill(part[data.REWARD_ERROR], torch.nan
                                                     ).flatten().tolist()
            errors += int(part[data.REWARD_ERROR].sum())
            answers += map(answer_of, texts_of(self.env, len(part), last_turn=True))
            if listen is not None:
                listen(problems, *told(self.env, part))
        groups = [answers[first:first + n] for first in range(0, len(answers), n)]
        return Samples(np.array(correct).reshape(-1, n), np.array(rewards).reshape(-1, n),
                       groups), errors


@dataclass(frozen=True)
class TaskEvaluator:
    """One task: its greedy accuracy, and its samples if there are any.

    Args:
        name: of the task.
        greedy, sampler: of its problems.
        asked: what its results say of how it was asked.
    """

    name: str
    greedy: Evaluator
    sampler: Sampler | None = None
    asked: Mapping[str, Any] = field(default_factory=dict)

    def run(self, listen: Told | None = None) -> TaskScores:
        """Both; ``listen`` is told of each completion."""
        return self.sampled(self.greedy.run(listen and self._telling(listen)), listen)

    def sampled(self, greedy: Evaluation, listen: Told | None = None) -> TaskScores:
        """The samples, beside a greedy evaluation that is there already."""
        scores = TaskScores(self.name, greedy.ids, greedy.solved, errors=greedy.errors,
                            asked=self.asked)
        if self.sampler is None:
            return scores
        samples, errors = self.sampler.run(
            listen and self._telling(listen, self.sampler.env.group_size))
        return replace(scores, samples=samples, errors=scores.errors + errors)

    def _telling(self, listen: Told, n: int | None = None) -> Listener:
        def tell(problems: list, texts: list[str], rewards: list[float | None],
                 right: list[bool]) -> None:
            for row, (problem, text, reward, solved) in enumerate(zip(
                    problems, texts, rewards, right, strict=True)):
                listen({"task": self.name, "id": problem.id, "sample": n and row % n,
                        "completion": text, "reward": reward, "success": solved})

        return tell


class Evaluations:
    """The run's own task, samples of it and benchmarks, in the place of an
    :class:`~grpo.training.evaluation.Evaluator`.

    Args:
        own: of the run's task.
        benchmarks: of further tasks.
        harness: those of lm-eval.
        ks: of pass@k and its relatives.
        seed: of samples and bootstrap.
        at_checkpoints: leave benchmarks to the evaluations of checkpoints.
        model: name of what is evaluated, for the record.
    """

    def __init__(
        self, own: TaskEvaluator, benchmarks: Sequence[TaskEvaluator] = (), *,
        harness: Sequence[HarnessEvaluator] = (), ks: Sequence[int] = (), seed: int = 0,
        at_checkpoints: bool = False, model: str = "",
    ) -> None:
        self.own, self.benchmarks, self.harness = own, list(benchmarks), list(harness)
        self.ks, self.seed, self.at_checkpoints = list(ks), seed, at_checkpoints
        self.model = model

    @property
    def policy(self) -> Policy:
        """That of the greedy evaluation, whose calls a checkpoint has."""
        return self.own.greedy.policy

    @torch.no_grad()
    def run(self, *, checkpoint: bool = False) -> Evaluation:
        """Evaluate with the weights as they are now, which at a ``checkpoint`` are kept.

        Raises:
            RewardsFailed: as soon as reward functions failed for too many completions.
        """
        with without_trace(self.seed):
            greedy = self.own.greedy.run()
            tasks, lm_eval = [self.own.sampled(greedy)], {}
            if checkpoint or not self.at_checkpoints:
                tasks += [task.run() for task in self.benchmarks]
                lm_eval = self.run_harness()
        return replace(greedy, more=self._metrics(tasks) | lm_eval_metrics(lm_eval),
                       record=self._record(tasks, lm_eval))

    def run_harness(self) -> dict[str, dict[str, Any]]:
        """What the tasks of lm-eval found, see :class:`~grpo.training.harness.HarnessEvaluator`."""
        return {name: found for task in self.harness for name, found in task.run().items()}

    def _metrics(self, tasks: Sequence[TaskScores]) -> dict[str, float]:
        found: dict[str, float] = {}
        for task in tasks:
            own = task.name == self.own.name
            place = "eval/" if own else f"eval/{task.name}/"
            values = {name: float(values.mean())
                      for name, values in task.per_problem(self.ks).items()}
            if own:  # which has a name of old, and errors of greedy completions alone
                del values["accuracy"]
            else:
                values["errors"] = float(task.errors)
            found |= {place + name: value for name, value in values.items()}
        return found

    def _record(
        self, tasks: Sequence[TaskScores], lm_eval: dict[str, dict[str, Any]]
    ) -> dict[str, Any]:
        sampler = self.own.sampler
        return record_of(tasks, ks=self.ks, seed=self.seed, model=self.model, temperature=(
            sampler and sampler.policy.sampling.temperature), lm_eval=lm_eval)


def lm_eval_metrics(found: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Of tasks of lm-eval, under the names of ``metrics.jsonl``."""
    return {f"eval/{task}/{name}{end}": value for task, one in found.items()
            for name, metric in one["metrics"].items()
            for end, value in (("", metric["value"]), ("_stderr", metric["stderr"]))
            if value is not None}


@contextmanager
def without_trace(seed: int) -> Iterator[None]:
    """Random numbers of the process from a seed, such as those of reward functions; afterwards
    they go on where they were."""
    state = random_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        restore_random_state(state)
