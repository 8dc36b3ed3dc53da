"""The scores of a batch, with the reasons of those that are missing."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from tensordict import TensorDictBase
from torch import Tensor

from grpo import data
from grpo.system import deadline
from grpo.system.apart import ApartError, EndedError
from grpo.system.deadline import LateError

# How many different failures are kept to be shown, and how many frames of each.
_FAILURES, _FRAMES = 3, 4
#: Files of this package that make the calls; their frames say nothing about the function.
_CALLERS = {deadline.__file__,
            *(str(Path(__file__).with_name(f"{name}.py"))
              for name in ("outcomes", "pool", "scorer"))}


class Unusable(ValueError):
    """What a reward function returned is no reward."""


#: What is told from a function that raised, the first that fits.
_FAULTS = ((LateError, data.FAULT_LATE), (Unusable, data.FAULT_INVALID),
           (EndedError, data.FAULT_ENDED))


@dataclass(frozen=True)
class Row:
    """What a row of :class:`RewardBatch` is made of.

    Attributes:
        message: why there is no reward, as a sentence.
        failure: what tells it from other failures, and the message with the place in the code.
        parts: what each function gave, NaN for none; empty without a reward.
    """

    reward: float = 0.0
    success: bool = False
    fault: int = data.FAULT_NONE
    message: str | None = None
    failure: tuple[str, str] | None = None
    parts: Sequence[float] = ()


def row_without(error: Exception, who: str) -> Row:
    """The row of a function that raised, was late, or returned no reward; ``who`` names it and the
    problem."""
    fault = next((code for kind, code in _FAULTS if isinstance(error, kind)), data.FAULT_FAILED)
    function = who.partition(",")[0]
    if fault != data.FAULT_FAILED:
        message = f"{who}: {error}"
        return Row(fault=fault, message=message, failure=(f"{function} {fault}", message))
    frames = error.frames if isinstance(error, ApartError) else [
        (frame.filename, frame.lineno, frame.name, frame.line)
        for frame in traceback.extract_tb(error.__traceback__)]
    place = "{}:{}".format(*frames[-1]) if frames else "its call"
    reason = str(error) if isinstance(error, ApartError) else f"{type(error).__name__}: {error}"
    lines = ["{}:{} in {}: {}".format(*frame) for frame in frames
             if frame[0] not in _CALLERS][-_FRAMES:]
    return Row(fault=fault, message=f"{who}: {reason} ({place})",
               failure=(f"{function} {reason.partition(':')[0]} {place}",
                        "\n     ".join([f"{who}: {reason}", *lines])))


@dataclass(frozen=True)
class RewardBatch:
    """Scores of ``B`` completions.

    Attributes:
        reward: float32 ``[B]``, weighted sum over the functions; 0 where ``error``.
        success: bool ``[B]``; False where ``error``.
        fault: int64 ``[B]``, why a row has no reward: a ``FAULT_*`` of :mod:`grpo.data`.
        parts: float32 ``[B]`` by function, without its weight; 0 where ``error``, NaN where the
            function gave none and the others count.
        messages: one sentence a row in ``error``: which function, which problem, why.
        failures: of up to three different ones, the message with the place in the code, by what
            tells them apart. Samples that a function skips by None are none.
    """

    reward: Tensor
    success: Tensor
    fault: Tensor
    parts: dict[str, Tensor]
    messages: list[str]
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def error(self) -> Tensor:
        """bool ``[B]``, True where there is no reward. Such a row has to be masked."""
        return self.fault != data.FAULT_NONE

    @classmethod
    def of_rows(cls, rows: Sequence[Row], labels: Sequence[str]) -> RewardBatch:
        """The batch of rows whose ``parts`` are those of ``labels``."""
        parts = [row.parts or [0.0] * len(labels) for row in rows]
        table = torch.tensor(parts, dtype=torch.float32).reshape(len(rows), len(labels))
        return cls(
            reward=torch.tensor([row.reward for row in rows], dtype=torch.float32),
            success=torch.tensor([row.success for row in rows], dtype=torch.bool),
            fault=torch.tensor([row.fault for row in rows], dtype=torch.int64),
            parts=dict(zip(labels, table.unbind(1), strict=True)),
            messages=[row.message for row in rows if row.message is not None],
            failures=first_failures(dict([row.failure]) for row in rows if row.failure))

    @classmethod
    def joined(cls, batches: Sequence[RewardBatch]) -> RewardBatch:
        """Several batches of the same functions as one."""
        def cat(name: str) -> Tensor:
            return torch.cat([getattr(batch, name) for batch in batches])

        return cls(
            cat("reward"), cat("success"), cat("fault"),
            {label: torch.cat([batch.parts[label] for batch in batches])
             for label in batches[0].parts},
            [message for batch in batches for message in batch.messages],
            first_failures(batch.failures for batch in batches))


def first_failures(found: Iterable[dict[str, str]]) -> dict[str, str]:
    """The first failures of different kinds, at most three.

    Examples:
        >>> first_failures([{"a": "1"}, {"a": "2", "b": "3"}])
        {'a': '1', 'b': '3'}
    """
    first: dict[str, str] = {}
    for failures in found:
        for kind, text in failures.items():
            first.setdefault(kind, text)
    return dict(islice(first.items(), _FAILURES))


class RewardsFailed(RuntimeError):
    """Too few completions got a reward; the message says why, with the places in the code."""

    def __init__(self, when: str, fault_B: Tensor, failures: dict[str, str]) -> None:
        count, failed = len(fault_B), int((fault_B >= data.FAULT_FAILED).sum())
        given = int((fault_B == data.FAULT_NONE).sum())
        reason = (f"reward functions failed, or were late, for {failed} (env.max_reward_errors is "
                  "the greatest share for which they may)" if failed else
                  "the reward functions returned None, which leaves a sample out, for all of them")
        shown = [f"\n  {number}. {text}" for number, text in enumerate(failures.values(), 1)]
        super().__init__(f"{when}: {given or 'not one'} of {count} completions got a reward; "
                         + reason + "".join([". The first that differ:", *shown] if shown else []))


def check_failures(
    fault_B: Tensor, failures: dict[str, str], *, limit: float, when: str
) -> None:
    """Refuse scores of which a broken reward function has left too few.

    Args:
        fault_B: as :attr:`RewardBatch.fault`.
        failures: as :attr:`RewardBatch.failures`.
        limit: greatest share of failed and late rows; samples that a function leaves out on purpose
            are neither.
        when: begins the message.

    Raises:
        RewardsFailed: above the limit.
    """
    if (fault_B >= data.FAULT_FAILED).sum() > limit * len(fault_B):
        raise RewardsFailed(when, fault_B, failures)


def check_rewards(
    rollout: TensorDictBase, failures: dict[str, str], *, limit: float, when: str
) -> None:
    """:func:`check_failures` of a rollout, which must have a reward at least.

    Raises:
        RewardsFailed: above the limit, and where no row has a reward, for whatever reason.
    """
    fault_B = rollout.get(data.REWARD_FAULT, rollout[data.REWARD_ERROR].long()).flatten()
    check_failures(fault_B, failures, limit=limit, when=when)
    if rollout[data.REWARD_ERROR].all():
        raise RewardsFailed(when, fault_B, failures)
