"""What tasks have in common whose every problem is made from a seed of its own."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from grpo.envs.tasks.answer_text import answer_tag
from grpo.envs.tasks.base import Problem, Task, check_count


class SeededTask(Task):
    """Problems ``make(seed)`` for the seeds of two ranges that do not meet.

    Args:
        make: the problem of a seed, the same each time, and what it asks, in whatever order it is
            written: a training problem that asks what a held-out one does is left out.
        train_seed_start: first seed of the training problems.
        num_train_seeds: how many there are.
        test_seed_start: first seed of the held-out problems.
        num_test_seeds: how many there are.

    Raises:
        ValueError: if the ranges meet.
    """

    default_reward = "verifier"

    def __init__(
        self, make: Callable[[int], tuple[Problem, Hashable]], *, train_seed_start: int,
        num_train_seeds: int, test_seed_start: int, num_test_seeds: int,
    ) -> None:
        train, test = (seed_range(f"env.task.{start_name}", start, f"env.task.{count_name}", count)
                       for start_name, start, count_name, count in (
                           ("train_seed_start", train_seed_start,
                            "num_train_seeds", num_train_seeds),
                           ("test_seed_start", test_seed_start,
                            "num_test_seeds", num_test_seeds)))
        if train and test and train.start < test.stop and test.start < train.stop:
            raise ValueError(f"seeds {train.start} to {train[-1]} for training and {test.start} to "
                             f"{test[-1]} held out have problems in common; change "
                             "env.task.train_seed_start or env.task.test_seed_start")
        held_out = [make(seed) for seed in test]
        asked = {content for _, content in held_out}
        # Small problems repeat, whatever their seed is.
        training = [problem for problem, content in map(make, train) if content not in asked]
        super().__init__(train=training, test=[problem for problem, _ in held_out],
                         source=f"seeds of {self.name}")


def seed_range(start_name: str, start: int, count_name: str, count: int) -> range:
    """The seeds, checked."""
    check_count(start_name, start)
    check_count(count_name, count)
    return range(start, start + count)


def messages(system_prompt: str | None, question: str) -> tuple[dict[str, str], ...]:
    """A chat of an optional first message and the question."""
    system = () if system_prompt is None else ({"role": "system", "content": system_prompt},)
    return (*system, {"role": "user", "content": question})


def said(completion: str, *, longest: int = 2_000) -> str | None:
    """What a completion answers: its first ``<answer>`` block; None if there is none, or it is
    longer than any answer could be."""
    answer = answer_tag(completion)
    return answer if answer is not None and len(answer) <= longest else None
