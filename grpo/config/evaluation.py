"""Section ``eval`` of the configuration: what evaluations are made of beside greedy accuracy."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from grpo.config.keys import errors_text
from grpo.config.section import Section
from grpo.config.unread import Unread, only_with

#: Before the name of a task of lm-eval.
LM_EVAL = "lm_eval:"
#: What has them, as pip is told; also the extra lm-eval.
LM_EVAL_PACKAGE = "lm-eval>=0.4.13,<0.5"

_SAMPLED = only_with("eval.samples")
_BENCHMARKED = Unread(lambda c: not c.eval.benchmarks,
                      "because eval.benchmarks names none; name some, or")
_LM_EVAL = Unread(lambda c: not any(name.startswith(LM_EVAL) for name in c.eval.benchmarks or ()),
                  f"because eval.benchmarks has no {LM_EVAL}TASK; name one, or")


class LmEvalOptions(Section):
    """How a task of lm-eval is asked: ``eval.benchmarks={"lm_eval:TASK": {num_fewshot: 5}}``."""

    num_fewshot: int | None = Field(None, ge=0)
    """Examples in the prompt; null: the task's own number."""
    limit: int | None = Field(None, ge=1)
    """The first problems alone; null: all."""
    apply_chat_template: bool = False
    """Put prompts and examples into the tokenizer's chat template."""


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
    seed: Annotated[int, _SAMPLED] = Field(0, ge=0, lt=2**32)
    """Of the samples and of the bootstrap, the same at each evaluation."""
    batch_size: int | None = Field(None, ge=1)
    """Completions at a time; null: those of a batch of training."""
    benchmarks: list[str] | dict[str, dict[str, Any]] | None = None
    """Further tasks, by their recipes in ``config/env``; a table ``{gsm8k: {data_path: ...}}`` has
    keys of section ``env`` that differ from the recipe's. ``lm_eval:TASK`` is one of lm-eval, with
    the keys of :class:`LmEvalOptions`."""
    lm_eval_path: Annotated[str | None, _LM_EVAL] = None
    """A folder with YAML files of tasks beside those of lm-eval."""
    benchmark_max_tokens: Annotated[int | None, _BENCHMARKED] = Field(None, ge=1)
    """Longest answer to their problems; null: ``inference_model.max_tokens``. Of tasks of lm-eval
    that do not say; null: 256, as there."""
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

    @model_validator(mode="after")
    def _options_of_lm_eval(self) -> EvalConfig:
        for name in self.benchmarks or ():
            if name.startswith(LM_EVAL):
                try:
                    self.lm_eval_options(name)
                except ValidationError as error:
                    raise ValueError(errors_text([
                        f"eval.benchmarks={name}: {problem['loc'][0]}={problem['input']}: "
                        f"{problem['msg']}; known are {', '.join(LmEvalOptions.model_fields)}"
                        for problem in error.errors()])) from None
        return self

    def lm_eval_options(self, benchmark: str) -> LmEvalOptions:
        """How a task of lm-eval is asked."""
        return LmEvalOptions.model_validate(self.changes(benchmark))

    @property
    def ks(self) -> list[int]:
        """``eval.k``, resolved; none without samples."""
        if self.samples is None:
            return []
        return sorted({*(self.k or (1, self.samples))})

    def changes(self, benchmark: str) -> dict[str, Any]:
        """Keys of section ``env`` that a benchmark has otherwise than its recipe."""
        return self.benchmarks[benchmark] if isinstance(self.benchmarks, dict) else {}
