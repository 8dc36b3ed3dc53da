"""Metrics under the names that an earlier trainer gave them, beside those of this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from grpo.report.loggers import MetricLogger, Sample

LegacyNames = Literal["atropos"]

#: Trainer -> its name, in W&B, for a metric -> the metric here. Of atroposlib 0.4.0's example
#: trainer ``train/grad_norm`` and ``train/lr`` are the same in both; ``train/pos_logp`` and
#: ``train/neg_logp``, sums that grow with the batch, have no counterpart.
LEGACY_NAMES: dict[LegacyNames, dict[str, str]] = {"atropos": {
    "train/loss": "loss/total",
    "grpo/mean_ratio": "policy/ratio_mean",
    "grpo/clipped_fraction": "policy/clip_fraction",
    "logprobs/training_mean": "policy/log_prob_mean",
    "logprobs/training_std": "policy/log_prob_std",
    "logprobs/inference_mean": "policy/sampled_log_prob_mean",
    "logprobs/inference_std": "policy/sampled_log_prob_std",
    "alignment/diff_mean": "policy/log_prob_diff_mean",
    "alignment/diff_abs_mean": "policy/log_prob_diff_abs_mean",
    "alignment/diff_max": "policy/log_prob_diff_abs_max",
    "train/step_time": "time/step",
    "train/sync_time": "time/sync",
    "train/data_fetch_time": "time/reward",
}}


class WithLegacyNames(MetricLogger):
    """Another logger, which gets those metrics under both names.

    Examples:
        >>> from grpo.report.loggers import JsonlLogger, read_jsonl
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> with WithLegacyNames(JsonlLogger(path), "atropos") as logger:
        ...     logger.log(1, {"policy/ratio_mean": 1.5})
        >>> sorted(read_jsonl(path)[0].keys() - {"step", "time"})
        ['grpo/mean_ratio', 'policy/ratio_mean']
    """

    def __init__(self, logger: MetricLogger, trainer: LegacyNames) -> None:
        self._logger, self._names = logger, LEGACY_NAMES[trainer]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._logger.log(step, {**metrics, **{theirs: metrics[ours] for theirs, ours in
                                              self._names.items() if ours in metrics}})

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._logger.log_samples(step, samples)

    def close(self) -> None:
        self._logger.close()
