"""Two models on the same problems: is one better, or were these problems lucky for it?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from grpo.config.keys import ConfigError
from grpo.config.unread import typed
from grpo.report.at_k import Estimate, estimates, mcnemar
from grpo.report.eval_file import TaskScores


@dataclass(frozen=True)
class Comparison:
    """What was found on the problems of one task; differences are second minus first."""

    task: str
    problems: int
    both: int  # solved greedily
    only_first: int
    only_second: int
    neither: int
    p_value: float  # of McNemar's exact test on the greedy completions
    differences: dict[str, Estimate]  # of accuracy and of pass@k and its relatives

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return vars(self) | {"differences": {
            name: value._asdict() for name, value in self.differences.items()}}


def compare(
    first: Mapping[str, TaskScores], second: Mapping[str, TaskScores], *,
    ks: Sequence[int] | None = None, seed: int = 0,
) -> list[Comparison]:
    """Compare two evaluations, task by task, on the tasks that both have.

    Greedy completions are compared by McNemar's exact test, which looks at problems that one of the
    two alone solved. Differences have intervals of a bootstrap over problems that takes both
    results of a problem together.

    Args:
        first, second: by the names of tasks.
        ks: of pass@k and its relatives, as far as both have as many samples; None: 1 and as many as
            both have.
        seed: of the bootstrap.

    Raises:
        ConfigError: if they have no task in common, or in one other problems, rewards, turns,
            lengths of a response or temperatures of samples.
    """
    common = [name for name in first if name in second]
    if not common:
        raise ConfigError(f"the two have no task in common: {', '.join(first)}, and "
                          f"{', '.join(second)}; evaluate both on the same")
    return [_compare(first[name], second[name], ks, seed) for name in common]


def _compare(
    first: TaskScores, second: TaskScores, ks: Sequence[int] | None, seed: int
) -> Comparison:
    if missing := {*first.ids} ^ {*second.ids} or list(first.ids) != list(second.ids):
        named = f"; {sorted(missing)[0]} is one of them" if isinstance(missing, set) else ""
        raise ConfigError(f"{first.name}: the two were asked other problems ({len(first.ids)} and "
                          f"{len(second.ids)}{named}); evaluate both with the same options of env")
    _check_asked_the_same(first, second)
    a, b = np.array(first.greedy, dtype=bool), np.array(second.greedy, dtype=bool)
    most = 0 if None in (first.samples, second.samples) else min(
        first.samples.n, second.samples.n)
    ks = [k for k in sorted({*(ks or (1, most))}) if 1 <= k <= most]
    ours, theirs = first.per_problem(ks), second.per_problem(ks)
    differences = {name: theirs[name] - ours[name] for name in ours if name in theirs and (
        name.partition("@")[0] in ("accuracy", "pass", "coverage", "majority"))}
    only_first, only_second = int((a & ~b).sum()), int((b & ~a).sum())
    return Comparison(
        first.name, len(a), int((a & b).sum()), only_first, only_second, int((~a & ~b).sum()),
        mcnemar(only_first, only_second), estimates(differences, seed=seed))


def _check_asked_the_same(first: TaskScores, second: TaskScores) -> None:
    """Refuse what cannot be compared, as far as both results say it; older ones do not."""
    hashes = [one.asked.get("hashes") for one in (first, second)]
    if None not in hashes and (others := [
            name for name, a, b in zip(first.ids, *hashes, strict=True) if a != b]):
        raise ConfigError(f"{first.name}: the two were asked other problems under the same ids, "
                          f"{len(others)} of {len(first.ids)}, such as {others[0]}; evaluate both "
                          "with the same options of env")
    ours, theirs = ({**one.asked.get("env", {}), **one.asked} for one in (first, second))
    for key in ("max_tokens", "temperature", "reward", "reward_options", "step", "max_steps"):
        if key in ours and key in theirs and ours[key] != theirs[key]:
            raise ConfigError(f"{first.name}: {key} is {typed(ours[key])} of the one and "
                              f"{typed(theirs[key])} of the other; evaluate both with the same")


def comparison_tables(found: Sequence[Comparison], names: tuple[str, str]) -> Iterator[Table]:
    """A table of each task for the terminal."""
    for one in found:
        table = Table("", "second - first", "95 % interval", box=box.SIMPLE_HEAD, title=(
            f"{one.task}: {one.problems:,} problems, greedily solved by both {one.both}, by the "
            f"first alone {one.only_first}, by the second alone {one.only_second}, by neither "
            f"{one.neither}; McNemar's exact p = {one.p_value:.3g}"),
            caption=f"first: {names[0]}\nsecond: {names[1]}", title_justify="left",
            caption_justify="left", title_style="bold")
        for name, value in one.differences.items():
            table.add_row(name, f"{value.value:+.3f}", rf"\[{value.low:+.3f}, {value.high:+.3f}]")
        yield table
