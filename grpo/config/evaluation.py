"""Section ``eval`` of the configuration: what evaluations are made of beside greedy accuracy."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from grpo.config.section import Section
from grpo.config.unread import Unread, only_with

_SAMPLED = only_with("eval.samples")
_BENCHMARKED = Unread(lambda c: not c.eval.benchmarks,
                      "because eval.benchmarks names none; name some, or")


class EvalConfig(Section):
    """Samples of held-out problems, and further tasks; greedy accuracy on the run's own task is
    always measured, unless ``train.eval_frequency`` is ``never``."""

    only = Unread(lambda c: c.train.eval_frequency == "never",
                  "because train.eval_frequency=never; give that a number, or")

    samples: int | None = Field(None, ge=1)
    """Completions of each problem beside the greedy one; null: none."""
    temperature: Annotated[float, _SAMPLED] = Field(1.0, gt=0)
    """Of the samples."""
    k: Annotated[list[Annotated[int, Field(ge=1)]] | None, _SAMPLED] = Field(None, min_length=1)
    """For which pass@k and its relatives are given; null: 1 and ``eval.samples``."""
    seed: Annotated[int, _SAMPLED] = Field(0, ge=0)
    """Of the samples and of the bootstrap, the same at each evaluation."""
    batch_size: int | None = Field(None, ge=1)
    """Completions at a time; null: those of a batch of training."""
    benchmarks: list[str] | dict[str, dict[str, Any]] | None = None
    """Further tasks, by their recipes in ``config/env``; a table ``{gsm8k: {data_path: ...}}`` has
    keys of section ``env`` that differ from the recipe's."""
    benchmark_max_tokens: Annotated[int | None, _BENCHMARKED] = Field(None, ge=1)
    """Longest answer to their problems; null: ``inference_model.max_tokens``."""
    at_checkpoints: Annotated[bool, _BENCHMARKED, only_with("train.checkpoint_frequency")] = False
    """Ask benchmarks at each checkpoint instead of each evaluation."""

    @model_validator(mode="after")
    def _enough_samples(self) -> EvalConfig:
        if self.samples is not None and (many := [k for k in self.ks if k > self.samples]):
            raise ValueError(f"eval.k={self.k} has {many[0]}, and eval.samples={self.samples}: "
                             "pass@k needs at least k samples of each problem; raise eval.samples, "
                             "or lower eval.k")
        return self

    @model_validator(mode="after")
    def _each_benchmark_once(self) -> EvalConfig:
        if len({*(self.benchmarks or ())}) < len(self.benchmarks or ()):
            raise ValueError(f"eval.benchmarks={self.benchmarks} names a task twice; name each "
                             "once")
        return self

    @property
    def ks(self) -> list[int]:
        """``eval.k``, resolved; none without samples."""
        if self.samples is None:
            return []
        return sorted({*(self.k or (1, self.samples))})

    def changes(self, benchmark: str) -> dict[str, Any]:
        """Keys of section ``env`` that a benchmark has otherwise than its recipe."""
        return self.benchmarks[benchmark] if isinstance(self.benchmarks, dict) else {}
