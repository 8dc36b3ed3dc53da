"""Which completions of an evaluation are shown, also of a run that goes on with other numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from grpo.envs.tasks.base import Problem
from grpo.report.reporter import Reporter


class Kept(list):
    """A logger and a console that keep the samples they are given."""

    def log_samples(self, step, samples) -> None:
        self.append(samples)

    def samples_table(self, samples, *, step) -> None:
        assert samples is self[-1]

    def warn(self, text) -> None:
        raise AssertionError(text)


def batch(*solved: bool) -> TensorDict:
    """One token a row, which is the row's number."""
    rows = len(solved)
    tokens_BT, mask_BT = torch.arange(rows)[:, None], torch.ones(rows, 1, dtype=torch.bool)
    return TensorDict({
        "tokens": {"full": tokens_BT, "prompt": tokens_BT},
        "masks": {"all_attention_mask": mask_BT, "prompt_attention_mask": mask_BT},
        "next": {"reward": torch.zeros(rows, 1), "success": torch.tensor(solved)[:, None],
                 "reward_error": ~mask_BT, "truncated": ~mask_BT}}, [rows])


def shown(reporter, kept, *solved) -> list[str]:
    problems = [Problem(prompt="", answer=str(row), id=str(row)) for row in range(len(solved))]
    reporter.samples(1, batch(*solved), problems)
    return [sample.answer for sample in kept[-1]] if kept else []


@pytest.fixture
def make(tmp_path):
    def reporter(num_samples: int, rows: list[int] | None):
        kept = Kept()
        tokenizer = SimpleNamespace(decode=lambda tokens, **_: str(tokens))
        made = Reporter(kept, kept, tokenizer, run_dir=tmp_path, num_samples=num_samples)
        made.sample_rows = rows  # as a checkpoint has them
        return made, kept
    return reporter


def test_the_same_rows_are_shown_whatever_is_solved_later(make):
    reporter, kept = make(2, None)
    assert shown(reporter, kept, True, True, False) == ["2", "0"]
    assert shown(reporter, kept, False, False, True) == ["2", "0"]
    again, kept = make(2, reporter.sample_rows)
    assert shown(again, kept, True, True, True) == ["2", "0"]


@pytest.mark.parametrize(("num_samples", "rows", "chosen"), [
    (2, [7, 0], ["1", "0"]),  # of an evaluation that had more problems
    (3, [2, 0], ["1", "0", "2"]), (1, [2, 0], ["1"]), (0, [2, 0], []),  # another number is asked
    (6, [2], ["1", "0", "2"]), (6, [2, 0, 1], ["2", "0", "1"])])
def test_rows_of_a_checkpoint_that_do_not_fit_are_chosen_anew(make, num_samples, rows, chosen):
    reporter, kept = make(num_samples, rows)
    assert shown(reporter, kept, True, False, True) == chosen
