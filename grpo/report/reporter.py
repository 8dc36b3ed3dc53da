"""Where a run's numbers go: screen, files, loggers, report."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase

from grpo import data
from grpo.envs.tasks.base import Problem
from grpo.report.console import Console
from grpo.report.eval_file import write_record
from grpo.report.history import History
from grpo.report.learning_signal import SignalWarning, silence_at_end
from grpo.report.loggers import LoggerGroup, MetricLogger, Sample
from grpo.report.page import FAILURES_FILE, write_report
from grpo.system.line_file import LineFile

#: Kinds of failures of reward functions that are kept.
_FAILURES = 12


class Reporter:
    """Console, loggers and the final report behind one object; ``num_samples`` completions are
    shown and saved at each evaluation."""

    def __init__(
        self, console: Console, loggers: MetricLogger, tokenizer: Any, *, run_dir: Path,
        num_samples: int,
    ) -> None:
        self.console, self.tokenizer = console, tokenizer
        self.loggers = LoggerGroup([loggers, SignalWarning(console.warn)])
        self.run_dir, self.num_samples = run_dir, num_samples
        self.sample_rows: list[int] | None = None
        self._failures: set[str] = set()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """A finished iteration."""
        self.loggers.log(step, metrics)
        self.console.update(step, metrics)

    def samples(self, step: int, batch: TensorDictBase, problems: Sequence[Problem]) -> None:
        """Show and save completions of a batch, of the same rows each time.

        The rows are chosen at the first call: as many that failed then as that succeeded, so that
        later calls show what has been learnt and what has been kept. A run that goes on with other
        samples or problems than its checkpoint's chooses them anew.
        """
        success, rows = batch[data.SUCCESS].flatten(), self.sample_rows
        if rows is None or len(rows) != min(self.num_samples, len(success)) or (
                max(rows, default=-1) >= len(success)):
            failed, solved = (~success).nonzero()[:, 0].tolist(), success.nonzero()[:, 0].tolist()
            mixed = [row for pair in zip_longest(failed, solved) for row in pair]
            self.sample_rows = [row for row in mixed if row is not None][: self.num_samples]
        if self.sample_rows:
            chosen = [problems[row] for row in self.sample_rows]
            samples = self._samples(batch[torch.tensor(self.sample_rows)], chosen)
            self.loggers.log_samples(step, samples)
            self.console.samples_table(samples, step=step)

    def evaluation(self, step: int, record: dict[str, Any]) -> None:
        """Keep which problems were solved, where that is known; a full disk costs the file."""
        if record:
            try:
                write_record(self.run_dir, step, record)
            except OSError as error:
                self.console.warn(f"metrics/eval_iter_{step:03d}.json is not written: {error}")

    def failures(self, step: int, failures: Mapping[str, str]) -> None:
        """Keep what reward functions failed by, the first of each kind, for the report."""
        new = [kind for kind in failures if kind not in self._failures]
        if not new or len(self._failures) >= _FAILURES:
            return
        self._failures.update(new)
        file = LineFile(self.run_dir / FAILURES_FILE)
        file.append("".join(json.dumps({"step": step, "failure": failures[kind]}) + "\n"
                            for kind in new))
        file.close()

    def finish(
        self, config: dict[str, Any], *, title: str, headline: str, result: Path,
        early: bool = False,
    ) -> None:
        """Write the report and say where everything lies, the trained ``result`` included.

        A run that ends ``early`` gets no tick; nor does one whose rewards never told completions
        apart, which ends with a warning.
        """
        try:
            report: Path | str = write_report(self.run_dir, title=title, config=config)
        except OSError as error:  # the metrics that it is drawn from are kept
            report = f"not written: {error}"
        silence = silence_at_end(History.read(self.run_dir).rows)
        self.console.finish(
            {"report": report, "model": result,
             "metrics": self.run_dir / "metrics.jsonl", "run": self.run_dir}, headline,
            tick=not (early or silence and silence.whole))
        if silence:
            self.console.warn(str(silence))

    def _samples(self, batch: TensorDictBase, problems: Sequence[Problem]) -> list[Sample]:
        columns_T = torch.arange(batch[data.TOKENS].shape[-1])
        return [Sample(
            prompt=self._text(row[data.PROMPT_TOKENS], row[data.PROMPT_MASK]),
            # With what was said to the model between its turns, if it had several.
            completion=self._text(row[data.TOKENS], row[data.ATTENTION_MASK]
                                  & (columns_T >= row[data.PROMPT_MASK].sum())),
            reward=math.nan if row[data.REWARD_ERROR] else float(row[data.REWARD]),
            success=bool(row[data.SUCCESS]), truncated=bool(row[data.TRUNCATED]),
            answer=problem.answer) for row, problem in zip(batch, problems, strict=True)]

    def _text(self, tokens: torch.Tensor, mask: torch.Tensor) -> str:
        return self.tokenizer.decode(tokens[mask].tolist(), skip_special_tokens=True)
