from __future__ import annotations

import json
import math
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.report import loggers
from grpo.report.loggers import JsonlLogger, make_loggers, read_jsonl

from .samples import sample

needs_wandb = pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
needs_tensorboard = pytest.mark.skipif(
    find_spec("tensorboard") is None, reason="tensorboard is not installed")
metrics = st.dictionaries(st.text().filter(lambda name: name not in ("step", "time")),
                          st.floats() | st.integers(-(2**60), 2**60))


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(metrics, max_size=5))
def test_every_line_is_strict_json_and_finite_values_survive(rows):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        with JsonlLogger(path) as logger:
            for step, metrics in enumerate(rows):
                logger.log(step, metrics)

        def refuse(constant):
            raise AssertionError(f"{constant} is not JSON")

        lines = path.read_bytes().split(b"\n")
        assert lines.pop() == b""
        read = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [row["step"] for row in read] == list(range(len(rows)))
    for row, metrics in zip(read, rows, strict=True):
        expected = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        assert {k: v for k, v in row.items() if k not in ("step", "time")} == expected


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=())))
def test_any_text_survives_in_samples_even_lone_surrogates(text):
    with tempfile.TemporaryDirectory() as folder:
        with JsonlLogger(Path(folder) / "metrics.jsonl") as logger:
            logger.log_samples(3, [sample(completion=text)])
        (row,) = read_jsonl(Path(folder) / "samples.jsonl")
    # JSON reads an escaped surrogate pair as the one character it stands for.
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    assert row["completion"] == joined
    assert row["step"] == 3


def test_a_failed_reward_is_null_in_samples(tmp_path):
    with JsonlLogger(tmp_path / "metrics.jsonl") as logger:
        logger.log_samples(1, [sample(reward=math.nan)])
    assert read_jsonl(tmp_path / "samples.jsonl")[0]["reward"] is None


def test_lines_are_readable_before_close(tmp_path):
    with JsonlLogger(tmp_path / "deep" / "metrics.jsonl") as logger:
        logger.log(1, {"reward/mean": 0.5})
        assert read_jsonl(logger.path)[0]["reward/mean"] == 0.5
        logger.close()  # and once more at the end


@pytest.mark.parametrize("name", ["step", "time"])
def test_a_metric_may_not_take_the_name_of_a_row_field(tmp_path, name):
    with JsonlLogger(tmp_path / "metrics.jsonl") as logger, pytest.raises(ValueError, match=name):
        logger.log(1, {name: 0.0})


@settings(max_examples=40, deadline=None)
@given(last=st.integers(0, 8), keep=st.integers(-1, 10), torn=st.booleans())
def test_truncate_after_keeps_exactly_the_earlier_steps(last, keep, torn):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        with JsonlLogger(path) as logger:
            for step in range(last + 1):
                logger.log(step, {"reward/mean": step / 8})
                logger.log_samples(step, [sample(), sample()])
        if torn:
            with open(path, "a") as file:
                file.write('{"step": 0, "reward/me')
        with JsonlLogger(path) as logger:
            logger.truncate_after(keep)
            logger.log(99, {"reward/mean": 0.0})
        expected = list(range(min(last, keep) + 1))
        assert [row["step"] for row in read_jsonl(path)] == [*expected, 99]
        steps = [row["step"] for row in read_jsonl(Path(folder) / "samples.jsonl")]
        assert steps == sorted(expected * 2)
        assert sorted(p.name for p in Path(folder).iterdir()) == ["metrics.jsonl", "samples.jsonl"]


def test_appending_after_a_crash_does_not_join_the_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 0.0}\n{"step": 2, "ti')
    with JsonlLogger(path) as logger:
        logger.log(2, {})
    assert [row["step"] for row in read_jsonl(path)] == [1, 2]


def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnot json\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_jsonl(path)


def test_a_resumed_run_drops_later_rows_and_a_new_run_refuses_an_old_folder(tmp_path):
    with make_loggers([], run_dir=tmp_path, config={}) as logger:
        for step in (1, 2, 3):
            logger.log(step, {"reward/mean": 0.0})
    with pytest.raises(FileExistsError, match="resume"):
        make_loggers([], run_dir=tmp_path, config={})
    with make_loggers([], run_dir=tmp_path, config={}, resume_step=1) as logger:
        logger.log(2, {"reward/mean": 1.0})
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["reward/mean"]) for row in rows] == [(1, 0.0), (2, 1.0)]


def test_unknown_backend_is_named(tmp_path):
    with pytest.raises(ValueError, match="logging.backends contains 'mlflow'"):
        make_loggers(["mlflow"], run_dir=tmp_path, config={})


@pytest.mark.parametrize("backend", ["wandb", "tensorboard"])
def test_missing_package_says_what_to_install_and_touches_nothing(tmp_path, monkeypatch, backend):
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=f"pip install {backend}.*logging.backends"):
        make_loggers([backend], run_dir=tmp_path / "run", config={})
    assert not (tmp_path / "run").exists()


def test_group_closes_every_logger_even_if_one_fails():
    closed = []

    class Recorder(loggers.MetricLogger):
        def close(self):
            closed.append(self)
            if len(closed) == 2:
                raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        loggers.LoggerGroup([Recorder(), Recorder(), Recorder()]).close()
    assert len(set(closed)) == 3


@pytest.mark.slow
@needs_tensorboard
def test_tensorboard_holds_scalars_and_samples(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with loggers.TensorBoardLogger(tmp_path) as logger:
        logger.log(1, {"reward/mean": 0.25})
        logger.log(2, {"reward/mean": 0.75})
        logger.log_samples(2, [sample(completion="**not bold**")])
    events = EventAccumulator(str(tmp_path)).Reload()
    scalars = [(e.step, e.value) for e in events.Scalars("reward/mean")]
    assert scalars == [(1, 0.25), (2, 0.75)]
    (event,) = events.Tensors("samples/0/text_summary")
    assert b"    **not bold**" in event.tensor_proto.string_val[0]


@needs_wandb
def test_wandb_mode_is_checked_before_anything_starts(tmp_path):
    with pytest.raises(ValueError, match="mode='cloud'"):
        make_loggers(["wandb"], run_dir=tmp_path, config={}, wandb_mode="cloud")


@pytest.mark.slow
@needs_wandb
def test_wandb_offline_needs_no_network_and_remembers_its_run(tmp_path):
    options = {"run_dir": tmp_path, "config": {"seed": 42}, "wandb_mode": "offline"}
    with make_loggers(["wandb"], **options) as logger:
        logger.log(1, {"reward/mean": 0.25})
        logger.log_samples(1, [sample()])
    run_id = (tmp_path / "wandb_run_id").read_text()
    with make_loggers(["wandb"], resume_step=1, **options) as logger:
        logger.log(2, {"reward/mean": 0.5})
    assert (tmp_path / "wandb_run_id").read_text().split() == [run_id.strip(), "1"]
    assert list(tmp_path.glob(f"wandb/offline-run-*-{run_id.strip()}/run-*.wandb"))
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]


@needs_wandb
def test_wandb_gets_the_configuration_without_credentials(tmp_path, monkeypatch):
    import wandb

    sent = []
    monkeypatch.setattr(wandb, "init", lambda **options: sent.append(options["config"]) or (
        SimpleNamespace(id="a", define_metric=lambda *names, **more: None, finish=lambda: None)))
    config = {"seed": 1, "env": {"task": {"args": {"judge_api_key": "sk-1", "n": 2}}}}
    make_loggers(["wandb"], run_dir=tmp_path, config=config).close()
    assert sent == [{"seed": 1, "env": {"task": {"args": {"judge_api_key": "(hidden)", "n": 2}}}}]


@needs_wandb
def test_steps_that_a_resumed_run_repeats_are_sent_to_wandb_once(tmp_path, monkeypatch):
    import wandb

    sent = []
    # Without a process of its own.
    monkeypatch.setattr(wandb, "init", lambda **options: SimpleNamespace(
        id="abc123", define_metric=lambda *names, **more: None, finish=lambda: None,
        log=lambda values: sent.append(values["step"])))

    def run(steps, resume_step=None):
        with make_loggers(["wandb"], run_dir=tmp_path, config={},
                          resume_step=resume_step) as logger:
            for step in steps:
                logger.log(step, {"reward/mean": 0.5})
                logger.log_samples(step, [sample()])

    run(range(0, 11))
    run(range(7, 9), resume_step=6)  # dies before it gets as far as the first
    run(range(7, 13), resume_step=6)
    assert sent == [step for step in range(13) for _ in "ab"]  # metrics and samples
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(13))
