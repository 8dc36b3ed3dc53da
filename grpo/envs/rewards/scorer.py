"""How a batch of completions is scored: side by side, with deadlines, and never with a silent 0."""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from grpo import data
from grpo.envs.rewards.batch import RewardBatch, Row, Unusable, row_without
from grpo.envs.rewards.generators import GlobalGenerators
from grpo.envs.rewards.pool import call_pool, is_async
from grpo.envs.rewards.registry import RewardFn, RewardResult, name_of
from grpo.envs.tasks.base import Problem
from grpo.system.deadline import call_with_deadline

#: Seconds that a call of a reward function may take, and how many are made at a time.
DEFAULT_TIMEOUT, DEFAULT_WORKERS = 30.0, 16

_FLOAT32_MAX = torch.finfo(torch.float32).max
logger = logging.getLogger(__name__)

#: What a call returned, or the exception that it raised.
_Outcome: TypeAlias = Any


@dataclass(eq=False)
class _Function:
    """A reward function, and what is known about it."""

    call: RewardFn
    weight: float
    in_order: bool
    tried: bool = False


class RewardScorer:
    """Score completions with one or several reward functions.

    Calls run side by side in the threads and the event loop of a
    :class:`~grpo.envs.rewards.pool.CallPool`. A function that draws from the random generators of
    the process (``random``, NumPy, PyTorch) would then make a run that cannot be repeated, and some
    libraries work in the main thread only. The first call of each function therefore runs alone:
    where it shows one of the two, the function is called in the order of the completions, one at a
    time, when the rewards are waited for.

    A failure is never a silent 0: where a function raises, takes longer than ``timeout``, returns
    None (skip this sample), a value that is not finite in float32, or no number, the row is marked
    in :attr:`RewardBatch.error`.

    The success of a row is that of the first function which returns a :class:`RewardResult`; if
    none does, a row succeeds when the first function gives at least 1.

    Args:
        functions: with their finite weights in the sum, at least one. Each is called with a
            completion and its problem, or with lists, see
            :func:`~grpo.envs.rewards.registry.batch_reward`.
        timeout: seconds that a call may take, greater than 0.
        workers: calls at a time; 1: in order, as above.
        names: of the functions, for metrics; None: their own.
        try_first: False leaves out the trial of the first call, for environments beside an engine
            that draws random numbers itself.

    Raises:
        ValueError: if there is no function, or a number is out of its range.

    Examples:
        >>> from grpo.envs.rewards import get_reward
        >>> problem = Problem(prompt="6*7=", answer="42", id="p0")
        >>> score = RewardScorer(
        ...     [(get_reward("exact_match"), 1.0), (lambda completion, problem: 1.0, 0.5)])
        >>> wait = score.start(["42", "41"], [problem, problem])
        >>> wait().reward.tolist()
        [1.5, 0.5]
    """

    def __init__(
        self, functions: Sequence[tuple[RewardFn, float]], *, timeout: float = DEFAULT_TIMEOUT,
        workers: int = DEFAULT_WORKERS, names: Sequence[str] | None = None, try_first: bool = True,
    ) -> None:
        if not functions:
            raise ValueError("fns_with_weights is empty; give at least one (function, weight)")
        for fn, weight in functions:
            if not math.isfinite(weight):
                raise ValueError(f"weight={weight} of reward {name_of(fn)} must be finite")
        if not timeout > 0:
            raise ValueError(f"timeout={timeout} must be a positive number of seconds")
        self.labels = labels(names or [name_of(fn).strip("'") for fn, _ in functions])
        self.timeout, self.workers, self.try_first = timeout, workers, try_first
        self._functions = [_Function(fn, weight, workers == 1) for fn, weight in functions]

    def __call__(self, completions: Sequence[str], problems: Sequence[Problem]) -> RewardBatch:
        """Score and wait for it; see :meth:`start`."""
        return self.start(completions, problems)()

    def start(
        self, completions: Sequence[str], problems: Sequence[Problem]
    ) -> Callable[[], RewardBatch]:
        """Begin to score texts without their prompts, each for its own problem; what is returned
        waits for the rewards, as long as the deadlines allow.

        Raises:
            ValueError: if the lengths differ.
        """
        if len(completions) != len(problems):
            raise ValueError(
                f"{len(completions)} completions but {len(problems)} problems; give one for each")
        waits = [self._begin(fn, list(completions), list(problems)) for fn in self._functions]

        def wait() -> RewardBatch:
            columns = [wait_for_one() for wait_for_one in waits]
            rows = [self._row([column[i] for column in columns], problem)
                    for i, problem in enumerate(problems)]
            return RewardBatch.of_rows(rows, self.labels)

        return wait

    def _begin(self, fn: _Function, completions: list[str], problems: list[Problem]
               ) -> Callable[[], list[_Outcome]]:
        """Make the calls of one function; what is returned waits for an outcome a row."""
        if not completions:
            return list
        if getattr(fn.call, "takes_lists", False):
            wait = self._make(fn, [(completions, problems)])
            return lambda: _spread(wait()[0], len(completions))
        return self._make(fn, list(zip(completions, problems, strict=True)))

    def _make(self, fn: _Function, calls: list[tuple]) -> Callable[[], list[_Outcome]]:
        if getattr(fn.call, "quick", False):
            outcomes = [_outcome(fn.call, *args) for args in calls]
            return lambda: outcomes
        first = []
        if self.try_first and not (fn.tried or fn.in_order):
            first = [self._try(fn, calls[0])]
        if fn.in_order:
            return lambda: [self._call_in_order(fn, args) for args in calls]
        futures = first + [self._submit(fn, args) for args in calls[len(first):]]
        return lambda: [_outcome_of(future) for future in futures]

    def _submit(self, fn: _Function, args: tuple) -> Future:
        return call_pool(self.workers).submit(fn.call, *args, seconds=self.timeout)

    def _try(self, fn: _Function, args: tuple) -> Future:
        """The first call, alone. If it drew random numbers, they are given back."""
        fn.tried = True
        generators = GlobalGenerators()
        future = self._submit(fn, args)
        outcome = _outcome_of(future)
        if generators.drawn():
            generators.restore()
            fn.in_order = True
            logger.warning(
                "reward %s draws from the random generators of the process; so that the run can be "
                "repeated, it is called in the order of the completions, one at a time and after "
                "generation. With a generator of its own, random.Random(SEED), it runs side by "
                "side", name_of(fn.call))
        elif isinstance(outcome, ValueError) and "only works in main thread" in str(outcome):
            fn.in_order = True
            logger.warning(
                "reward %s sets signals, which only works in the main thread; it is called there, "
                "one completion at a time and after generation. env.reward_timeout limits it "
                "without a timeout of its own", name_of(fn.call))
        return future

    def _call_in_order(self, fn: _Function, args: tuple) -> _Outcome:
        if is_async(fn.call):
            return _outcome_of(self._submit(fn, args))
        return _outcome(call_with_deadline, fn.call, *args, seconds=self.timeout)

    def _row(self, outcomes: list[_Outcome], problem: Problem) -> Row:
        """Weighted sum of one row, or why it has none."""
        total, parts = 0.0, []
        for fn, value in zip(self._functions, outcomes, strict=True):
            who = f"reward {name_of(fn.call)}, problem {problem.id!r}"
            if isinstance(value, Exception):
                return row_without(value, who)
            if value is None:
                return Row(fault=data.FAULT_SKIPPED,
                           message=f"{who}: returned None, the sample is skipped")
            reward = value.reward if isinstance(value, RewardResult) else value
            if not isinstance(reward, numbers.Real):
                return row_without(Unusable(
                    f"returned {value!r:.80}; return a float, a RewardResult or None"), who)
            if not abs(reward) <= _FLOAT32_MAX:  # also true of NaN
                return row_without(Unusable(
                    f"returned {reward!r:.80}, which is not finite in float32"), who)
            parts.append(float(reward))
            total += fn.weight * float(reward)
        if not abs(total) <= _FLOAT32_MAX:
            return row_without(Unusable(f"the weighted sum {total} is not finite in float32"),
                               f"problem {problem.id!r}")
        verdicts = [bool(value.success) for value in outcomes if isinstance(value, RewardResult)]
        return Row(total, verdicts[0] if verdicts else parts[0] >= 1.0, parts=parts)


def labels(names: Sequence[str]) -> tuple[str, ...]:
    """What rewards are called in metrics: the function's name, and all of it where two share that.

    Examples:
        >>> labels(["exact_match", "my_rewards:brevity"])
        ('exact_match', 'brevity')
        >>> labels(["one:score", "other:score"])
        ('one:score', 'other:score')
    """
    short = [name.rpartition(":")[2] for name in names]
    chosen = [name if short.count(last) > 1 else last
              for name, last in zip(names, short, strict=True)]
    return tuple(f"{name}_{chosen[:i].count(name) + 1}" if chosen.count(name) > 1 else name
                 for i, name in enumerate(chosen))


def _outcome(fn: Callable[..., Any], *args: Any, **options: Any) -> _Outcome:
    # The function is the user's code and may raise anything. One bad completion must cost its own
    # row, not the run; the row is masked and the message reported, so nothing is hidden.
    try:
        return fn(*args, **options)
    except Exception as error:
        return error


def _outcome_of(future: Future) -> _Outcome:
    """The outcome of a call in the pool; interrupts are raised here."""
    error = future.exception()
    if error is not None and not isinstance(error, Exception):
        raise error
    return future.result() if error is None else error


def _spread(outcome: _Outcome, count: int) -> list[_Outcome]:
    """The outcomes of the rows of a function that takes lists."""
    if isinstance(outcome, Exception):
        return [outcome] * count
    values = outcome.tolist() if hasattr(outcome, "tolist") else outcome
    listed = isinstance(values, list | tuple) and not isinstance(values, RewardResult)
    if listed and len(values) == count:
        return list(values)
    got = f"{len(values)} rewards" if listed else f"{outcome!r:.80}"
    return [Unusable(f"returned {got} for {count} completions; a function that takes lists "
                     "returns a list with one reward for each")] * count
