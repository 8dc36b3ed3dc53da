"""Where numbers and sample completions go: JSON lines always, W&B and TensorBoard on request.

``metrics.jsonl`` is the record of a run: the report, the curves and a resumed run read it.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from grpo.config.keys import ConfigError
from grpo.report.credentials import without_credentials
from grpo.system.line_file import LineFile

LoggerBackend = Literal["wandb", "tensorboard"]
WandbMode = Literal["online", "offline", "disabled"]

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


@dataclass(frozen=True)
class Sample:
    """One completion of an evaluation, as people want to see it; not trained on, it has no
    advantage."""

    prompt: str
    completion: str
    reward: float  # NaN when the reward function failed
    success: bool  # the verifier's yes or no
    truncated: bool  # whether the length limit cut the completion
    answer: str  # the reference's; empty if the task has none


class MetricLogger:
    """A destination for metrics and samples. Also a context manager that closes itself."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        raise NotImplementedError

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Record sample completions of one step, if there is a place for them."""

    def close(self) -> None:
        """Write what is pending and release resources. Calling it twice is harmless."""

    def __enter__(self) -> MetricLogger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_jsonl(path: Path | str) -> list[dict[str, Any]]:
    """Read the complete lines of a JSON-lines file, oldest first.

    A last line without its newline was being written when the process died, and is left out.
    A missing file has no lines.

    Raises:
        ValueError: if a complete line is not a JSON object.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> _ = path.write_text('{"step": 1, "reward/mean": 0.5}\\n{"step": 2, "rew')
        >>> read_jsonl(path)
        [{'step': 1, 'reward/mean': 0.5}]
    """
    path = Path(path)
    if not path.exists():
        return []
    rows = []
    # Split bytes on "\n" alone: text may hold characters that str.splitlines would split on.
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number} is not a JSON object but {row!r}")
        rows.append(row)
    return rows


def write_atomically(path: Path, text: str, *, errors: str = "backslashreplace") -> None:
    """Replace ``path`` with ``text`` (UTF-8) so that a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8", errors=errors, newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class JsonlLogger(MetricLogger):
    """One JSON object a line, in a :class:`~grpo.system.line_file.LineFile`.

    A metrics line is ``{"step": int, "time": unix seconds, name: number or null, ...}``; a samples
    line is ``step``, ``time`` and the fields of one :class:`Sample`. NaN and infinities become
    ``null``, since JSON has no other word for them.

    Args:
        path: file for metrics; parent folders are made. Samples go to ``samples.jsonl`` beside it.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> with JsonlLogger(path) as logger:
        ...     logger.log(1, {"reward/mean": 0.25, "train/grad_norm": float("nan")})
        >>> [row["train/grad_norm"] for row in read_jsonl(path)]
        [None]
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._open()

    def _open(self) -> None:
        self._metrics = LineFile(self.path)
        self._samples = LineFile(self.path.with_name(SAMPLES_FILE))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line; ValueError if a metric is called ``step`` or ``time``."""
        if taken := {"step", "time"} & metrics.keys():
            raise ValueError(
                f"metric name {min(taken)!r} is reserved for the row itself; rename it")
        self._metrics.append(_dump(_row(step, metrics)))

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Append one line a sample."""
        self._samples.append("".join(_dump(_row(step, asdict(sample))) for sample in samples))

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps from both files, each replaced atomically."""
        self.close()
        for path in (self.path, self.path.with_name(SAMPLES_FILE)):
            kept = [row for row in read_jsonl(path) if row["step"] <= step]
            write_atomically(path, "".join(map(_dump, kept)))
        self._open()

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()


def _dump(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def _row(step: int, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"step": int(step), "time": time.time()} | {k: _plain(v) for k, v in values.items()}


def _plain(value: Any) -> str | bool | int | float | None:
    if isinstance(value, str | bool | int):
        return value
    number = float(value)  # also takes NumPy and torch scalars
    return number if math.isfinite(number) else None


class WandbLogger(MetricLogger):
    """Weights & Biases. ``mode="offline"`` needs no network; ``wandb sync`` uploads it later.

    Args:
        run_dir: folder of the run, for W&B's own files and for the id of W&B's run: a resumed run
            continues the same one behind the last step that it has, since W&B can add to a run
            but not take back.
        mode: ``online``, ``offline`` or ``disabled``.
        earlier: steps that the run's metrics have already.
        **options: ``project``, ``name``, ``group`` and ``config`` of ``wandb.init``.

    Raises:
        ImportError: if wandb is not installed.
        ConfigError: if nobody is logged in, or W&B cannot be reached.
        ValueError: if ``mode`` is none of the three.
    """

    def __init__(
        self, run_dir: Path, *, mode: WandbMode, earlier: Sequence[int] = (), **options: Any
    ) -> None:
        if mode not in get_args(WandbMode):
            raise ValueError(f"mode={mode!r} is not one of {', '.join(get_args(WandbMode))}")
        import wandb

        id_file = run_dir / "wandb_run_id"
        # A run that was resumed before may have got further than its metrics say now.
        run_id, *before = id_file.read_text().split() if id_file.exists() else [None]
        self._logged = max([*map(int, before), *earlier], default=None) if run_id else None
        self._wandb = wandb
        try:
            self._run = wandb.init(
                dir=str(run_dir), mode=mode, id=run_id,
                resume="allow" if run_id and mode == "online" else None,
                # W&B's capture of stdout would fight with the live progress display.
                settings=wandb.Settings(console="off"), **options)
        except wandb.errors.Error as error:  # not logged in, no network, no such project
            raise ConfigError(
                f"logging.backends contains 'wandb', but W&B does not start: {error}; run `wandb "
                "login` or set WANDB_API_KEY, or set logging.wandb_mode=offline, or remove "
                "'wandb'") from error
        # W&B's own step may only grow, so a resumed run would lose the steps it repeats.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        known = [self._run.id] if self._logged is None else [self._run.id, str(self._logged)]
        write_atomically(id_file, "\n".join(known) + "\n")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._logged is None or step > self._logged:
            self._run.log({"step": step, **metrics})

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        columns = [field.name for field in fields(Sample)]
        rows = [list(asdict(sample).values()) for sample in samples]
        self.log(step, {"samples": self._wandb.Table(columns=columns, data=rows)})

    def close(self) -> None:
        self._run.finish()


class TensorBoardLogger(MetricLogger):
    """TensorBoard event files: scalars, and samples as text.

    Args:
        dir: folder for event files.
        purge_step: of a resumed run, the first step to be logged anew; older records from there on
            are hidden.
    """

    def __init__(self, dir: Path | str, *, purge_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(dir), purge_step=purge_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), global_step=step)
        self._writer.flush()

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        for i, sample in enumerate(samples):
            text = f"{sample.prompt}\n\n--- completion ---\n{sample.completion}"
            # TensorBoard renders text as Markdown; four spaces make a literal block.
            body = "\n".join("    " + line for line in text.splitlines())
            self._writer.add_text(f"samples/{i}", f"**reward {sample.reward:.3g}**\n\n{body}",
                                  global_step=step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class LoggerGroup(MetricLogger):
    """Several loggers behind one. ``close`` closes all of them, even if one fails."""

    def __init__(self, loggers: Sequence[MetricLogger]) -> None:
        self.loggers = tuple(loggers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for logger in self.loggers:
            logger.log(step, metrics)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        for logger in self.loggers:
            logger.log_samples(step, samples)

    def close(self) -> None:
        with ExitStack() as stack:
            for logger in self.loggers:
                stack.callback(logger.close)


def make_loggers(
    backends: Sequence[LoggerBackend], *, run_dir: Path | str, config: Mapping[str, Any],
    project: str = "grpo", name: str | None = None, group: str | None = None,
    wandb_mode: WandbMode = "online", resume_step: int | None = None,
) -> LoggerGroup:
    """Build the loggers of a run. JSON lines are always written, to ``run_dir/metrics.jsonl``.

    Args:
        backends: further destinations, any of ``wandb`` and ``tensorboard``.
        run_dir: folder of the run.
        config: resolved configuration, for backends that store it.
        project: of W&B, like the next three.
        name: of the run, by default that of ``run_dir``.
        group: of the run.
        wandb_mode: ``online``, ``offline`` or ``disabled``.
        resume_step: last step of the checkpoint the run goes on from; later lines are dropped. None
            starts a new run.

    Raises:
        ValueError: if a backend is unknown.
        ImportError: if the package of a backend is not installed.
        FileExistsError: if a new run would be written over an older one.

    Examples:
        >>> import tempfile
        >>> run_dir = Path(tempfile.mkdtemp())
        >>> with make_loggers([], run_dir=run_dir, config={"seed": 42}) as logger:
        ...     logger.log(1, {"reward/mean": 0.25})
        >>> len(read_jsonl(run_dir / "metrics.jsonl"))
        1
    """
    for backend in backends:
        if backend not in get_args(LoggerBackend):
            raise ValueError(
                f"logging.backends contains {backend!r}, which is not one of "
                f"{', '.join(get_args(LoggerBackend))} (JSON lines are always written)")
        if find_spec(backend) is None:
            raise ImportError(
                f"logging.backends contains {backend!r} but the package is not installed: run "
                f"`pip install {backend}`, or remove {backend!r} from logging.backends")
    run_dir = Path(run_dir)
    earlier = [row["step"] for row in read_jsonl(run_dir / METRICS_FILE)]
    if resume_step is None and earlier:
        raise FileExistsError(
            f"{run_dir} already holds the metrics of a run: resume it from its checkpoint, "
            "or choose another run directory")
    jsonl, purge_step = JsonlLogger(run_dir / METRICS_FILE), None
    loggers: list[MetricLogger] = [jsonl]
    if resume_step is not None:
        jsonl.truncate_after(resume_step)
        purge_step = resume_step + 1
    if "tensorboard" in backends:
        loggers.append(TensorBoardLogger(run_dir / "tensorboard", purge_step=purge_step))
    if "wandb" in backends:
        loggers.append(WandbLogger(
            run_dir, mode=wandb_mode, earlier=earlier, project=project, name=name or run_dir.name,
            group=group, config=without_credentials(config)))
    return LoggerGroup(loggers)
