"""How a batch of completions is scored: side by side, with deadlines, and never with a silent 0."""

from __future__ import annotations

import functools
import logging
import math
import pickle
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from grpo import data
from grpo.envs.rewards.batch import RewardBatch, Row, Unusable, row_without
from grpo.envs.rewards.generators import GlobalGenerators
from grpo.envs.rewards.outcomes import (
    FLOAT32_MAX,
    Outcome,
    called,
    number_of,
    outcome_of,
    spread,
    verdict_of,
)
from grpo.envs.rewards.pool import call_pool, is_async
from grpo.envs.rewards.registry import (
    RewardFn,
    RewardResult,
    get_reward,
    name_of,
    options_of,
    path_of,
)
from grpo.envs.rewards.trl import as_trl_reward, is_trl_reward
from grpo.envs.tasks.base import Problem
from grpo.system.apart import CallsApart
from grpo.system.deadline import LateError, call_with_deadline

#: Seconds that a call of a reward function may take, and how many are made at a time.
DEFAULT_TIMEOUT, DEFAULT_WORKERS = 30.0, 16
#: Seconds that another process may take to begin and to end; its calls have deadlines of their own.
_AROUND_A_CALL = 180.0

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Function:
    """A reward function, and what is known about it."""

    call: RewardFn
    weight: float
    in_order: bool
    tried: bool = False
    path: str | None = None  # by which other processes find it, if it is called there
    verdict: _Function | None = None  # what says whether a completion is right, if it asks that

    def mark(self, name: str, default: Any = None) -> Any:
        """See :func:`~grpo.envs.rewards.registry.register_reward`."""
        return getattr(self.call, name, default)


class RewardScorer:
    """Score completions with one or several reward functions.

    Calls run side by side in the threads and the event loop of a
    :class:`~grpo.envs.rewards.pool.CallPool`; a thread may hand its call to another process, see
    ``processes``. There the random generators that all code of a process shares are seeded by the
    sample, so that the result is the same whoever is called when.

    In this process, a function that draws from the random generators of
    the process (``random``, NumPy, PyTorch) would then make a run that cannot be repeated, and some
    libraries work in the main thread only. The first call of each function therefore runs alone:
    where it shows one of the two, the function is called in the order of the completions, one at a
    time, when the rewards are waited for.

    A failure is never a silent 0: where a function raises, takes longer than ``timeout``, returns
    None (skip this sample), a value that is not finite in float32, or no number, the row is marked
    in :attr:`RewardBatch.error`.

    The success of a row is that of the first function which returns a :class:`RewardResult`; if
    none does, a row succeeds when the first function that is for it gives at least 1.

    Args:
        functions: with their finite weights in the sum, at least one. Each is called with a
            completion and its problem, or with lists, see
            :func:`~grpo.envs.rewards.registry.batch_reward`.
        timeout: seconds that a call may take, greater than 0.
        workers: calls at a time; 1: in order, as above.
        names: of the functions, for metrics; None: their own.
        try_first: False leaves out the trial of the first call, for environments beside an engine
            that draws random numbers itself.
        processes: in which functions are called that can be imported there; they are ended with
            all they have started when a call is late. 0: in this process, but for functions that
            are registered as ``apart``, which get as many as there are workers.
        memory: bytes that a call in another process may take; None: what there is.

    Raises:
        ValueError: if there is no function, a number is out of its range, or nothing says whether
            completions are right where a function asks.

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
        processes: int = 0, memory: int | None = None,
    ) -> None:
        if not functions:
            raise ValueError("fns_with_weights is empty; give at least one (function, weight)")
        for fn, weight in functions:
            if not math.isfinite(weight):
                raise ValueError(f"weight={weight} of reward {name_of(fn)} must be finite")
        if not timeout > 0:
            raise ValueError(f"timeout={timeout} must be a positive number of seconds")
        names = names or [name_of(fn).strip("'") for fn, _ in functions]
        self.labels = labels(names)
        self.timeout, self.workers, self.try_first = timeout, workers, try_first
        self.processes = processes
        self._verdicts: dict[str, _Function] = {}
        self._functions = [self._function(fn, weight, name)
                           for (fn, weight), name in zip(functions, names, strict=True)]
        for fn in self._functions:
            if fn.mark("judged"):
                fn.verdict = self._verdict_of(fn, names)
        apart = [fn for fn in (*self._functions, *self._verdicts.values()) if fn.path]
        self._apart = None if not apart else _calls_apart(
            processes or workers, memory, tuple(dict.fromkeys(
                module for fn in apart for module in (fn.path.partition(":")[0],
                                                      *fn.mark("imports", ())))))

    def _function(self, call: RewardFn, weight: float, name: str) -> _Function:
        fn = _Function(call, weight, self.workers == 1)
        apart = fn.mark("apart")
        if not (fn.mark("quick") or is_async(call) or apart is False) and (
                apart or self.processes):
            plain = call.func if isinstance(call, functools.partial) else call
            fn.path = path_of(plain, name)
        return fn

    def _verdict_of(self, fn: _Function, names: Sequence[str]) -> _Function:
        """What a function asks whether completions are right: the run's reward of that name, with
        its options, which is then called once for both; else one without options."""
        asked = options_of(fn.call)["verdict"]
        if asked is None:
            raise ValueError(f"reward {name_of(fn.call)} needs the option verdict: the name of "
                             "the reward that says whether a completion is right")
        if asked not in self._verdicts:
            own = next((one for name, one in zip(names, self._functions, strict=True)
                        if name == asked), None)
            if own is None:
                call = get_reward(asked)
                call = as_trl_reward(call, asked) if is_trl_reward(call) else call
                own = self._function(call, 0.0, asked)
            self._verdicts[asked] = own
        if self._verdicts[asked].mark("judged"):
            raise ValueError(f"verdict={asked} of the reward {name_of(fn.call)} asks another one "
                             "itself; name one that says whether a completion is right")
        return self._verdicts[asked]

    @property
    def quick(self) -> bool:
        """Whether all functions are called on the spot, where they take microseconds."""
        return all(fn.mark("quick", False) for fn in (*self._functions, *self._verdicts.values()))

    @property
    def calls_apart(self) -> bool:
        """Whether a function is called in another process."""
        return self._apart is not None

    @property
    def compares(self) -> tuple[str, ...]:
        """The functions that compare a completion with the problem's answer."""
        return tuple(name_of(fn.call).strip("'") for fn in (
            *self._functions, *self._verdicts.values()) if fn.mark("compares"))

    @property
    def in_order(self) -> bool:
        """Whether a function is known to need the main thread, or the order of the completions."""
        return any(fn.in_order for fn in (*self._functions, *self._verdicts.values()))

    def prepare(self) -> None:
        """Begin to start what other processes need, so that the first rewards do not wait for
        it."""
        if self._apart is not None:
            self._apart.prepare()

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
        rows = list(completions), list(problems)
        # Several may wait for one that says what is right, which is called once all the same.
        said = {fn: functools.cache(self._begin(fn, *rows)) for fn in self._verdicts.values()}
        waits = [functools.partial(_judged, fn, *rows, said[fn.verdict]) if fn.verdict is not None
                 else said.get(fn) or self._begin(fn, *rows) for fn in self._functions]

        def wait() -> RewardBatch:
            columns = [wait_for_one() for wait_for_one in waits]
            rows = [self._row([column[i] for column in columns], problem)
                    for i, problem in enumerate(problems)]
            return RewardBatch.of_rows(rows, self.labels)

        return wait

    def _begin(self, fn: _Function, completions: list[str], problems: list[Problem]
               ) -> Callable[[], list[Outcome]]:
        """Make the calls of one function; what is returned waits for an outcome a row."""
        if not completions:
            return list
        if getattr(fn.call, "takes_lists", False):
            wait = self._make(fn, [(completions, problems)])
            return lambda: spread(wait()[0], len(completions))
        return self._make(fn, list(zip(completions, problems, strict=True)))

    def _make(self, fn: _Function, calls: list[tuple]) -> Callable[[], list[Outcome]]:
        if getattr(fn.call, "quick", False):
            outcomes = [called(fn.call, *args) for args in calls]
            return lambda: outcomes
        if fn.path is not None and not fn.tried:
            fn.tried = True
            self._try_to_send(fn, calls[0])
        if fn.path is not None:
            futures = [self._send(fn, i, args) for i, args in enumerate(calls)]
            return lambda: [_in_time(fn, outcome_of(future)) for future in futures]
        first = []
        if self.try_first and not (fn.tried or fn.in_order):
            first = [self._try(fn, calls[0])]
        if fn.in_order:
            return lambda: [self._call_in_order(fn, args) for args in calls]
        futures = first + [self._submit(fn, args) for args in calls[len(first):]]
        return lambda: [outcome_of(future) for future in futures]

    def _submit(self, fn: _Function, args: tuple) -> Future:
        share = fn.mark("share")
        of_share = {} if share is None else {"share": share(**options_of(fn.call))}
        return call_pool(self.workers).submit(fn.call, *args, seconds=self.timeout, **of_share)

    def _send(self, fn: _Function, row: int, args: tuple) -> Future:
        """Begin a call in another process."""
        options = fn.call.keywords if isinstance(fn.call, functools.partial) else {}
        sample = f"{row} {args[0]}".encode(errors="surrogatepass")
        call = functools.partial(
            self._apart.call, fn.path, args, options, within=self.timeout,
            computing=fn.mark("computing"), seed=zlib.crc32(sample))
        pool = call_pool(self.processes or self.workers)
        return pool.submit(call, seconds=self.timeout + _AROUND_A_CALL)

    def _try_to_send(self, fn: _Function, args: tuple) -> None:
        """Whether problems can go to another process; those with a partner or a rule that is no
        function of a module cannot."""
        try:
            pickle.dumps(args)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            fn.path, fn.tried = None, False
            logger.warning("reward %s is called in the run's own process, because its problems "
                           "cannot be sent to another: %s", name_of(fn.call), error)

    def _try(self, fn: _Function, args: tuple) -> Future:
        """The first call, alone. If it drew random numbers, they are given back."""
        fn.tried = True
        generators = GlobalGenerators()
        future = self._submit(fn, args)
        outcome = outcome_of(future)
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

    def _call_in_order(self, fn: _Function, args: tuple) -> Outcome:
        if is_async(fn.call):
            return outcome_of(self._submit(fn, args))
        return called(call_with_deadline, fn.call, *args, seconds=self.timeout)

    def _row(self, outcomes: list[Outcome], problem: Problem) -> Row:
        """Weighted sum of one row, or why it has none."""
        total, parts = 0.0, []
        some = any(value is not None for value in outcomes)
        for fn, value in zip(self._functions, outcomes, strict=True):
            if value is None and some and fn.mark("none_is_absent"):  # the others count
                parts.append(math.nan)
                continue
            who = f"reward {name_of(fn.call)}, problem {problem.id!r}"
            if isinstance(value, Exception):
                return row_without(value, who)
            if value is None:
                return Row(fault=data.FAULT_SKIPPED,
                           message=f"{who}: returned None, the sample is skipped")
            reward = number_of(value)
            if isinstance(reward, Unusable):
                return row_without(reward, who)
            parts.append(reward)
            total += fn.weight * reward
        if not abs(total) <= FLOAT32_MAX:
            return row_without(Unusable(f"the weighted sum {total} is not finite in float32"),
                               f"problem {problem.id!r}")
        verdicts = [bool(value.success) for value in outcomes if isinstance(value, RewardResult)]
        first = next(part for part in parts if not math.isnan(part))
        return Row(total, verdicts[0] if verdicts else first >= 1.0, parts=parts)


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


@functools.cache
def _calls_apart(processes: int, memory: int | None, imports: tuple[str, ...]) -> CallsApart:
    """The process's children of a kind, which all scorers share."""
    return CallsApart(processes, imports=imports, memory=memory)


def _in_time(fn: _Function, outcome: Outcome) -> Outcome:
    """What a call is worth that was late, where the function says so."""
    late = fn.mark("late")
    return late if late is not None and isinstance(outcome, LateError) else outcome


def _judged(fn: _Function, completions: list[str], problems: list[Problem],
            wait: Callable[[], list[Outcome]]) -> list[Outcome]:
    """The rewards of a quick function that asks whether completions are right."""
    said = [verdict_of(outcome) for outcome in wait()]
    # Rows of which that is not known have no reward, for that reason, and are nobody's peers.
    known = [i for i, one in enumerate(said) if isinstance(one, bool)]
    columns = [[column[i] for i in known] for column in (completions, problems, said)]
    if getattr(fn.call, "takes_lists", False):
        rewards = spread(called(fn.call, *columns), len(known))
    else:
        rewards = [called(fn.call, *row) for row in zip(*columns, strict=True)]
    outcomes = list(said)
    for i, reward in zip(known, rewards, strict=True):
        outcomes[i] = reward
    return outcomes


