"""Running ``grpo.py`` as its users do: as a command, in a folder of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from grpo.config.schema import load_config
from grpo.report.loggers import read_jsonl
from grpo.run.assemble import assemble
from grpo.training.checkpoint import Checkpoint
from grpo.training.trainer import Trainer

from ..config.configs import composed
from ..support import REPO, environment, wait_until, with_variable
from ..training import runs

SCRIPT = REPO / "sota-implementations" / "grpo" / "grpo.py"
ASYNC = SCRIPT.with_name("grpo-async.py")
#: A run in this process; :func:`train` adds the model.
TINY = ("inference_model.backend=transformers", "env.num_envs=4", "env.repeats=4",
        "env.task.num_train=20", "env.task.num_test=4", "env.task.max_operand=9",
        "train.eval_frequency=0", "train.checkpoint_frequency=0",
        f"env.reward='{runs.__name__}:by_text'")


@pytest.fixture(autouse=True)
def needs_vllm(request) -> None:
    if request.node.get_closest_marker("vllm"):
        pytest.importorskip("vllm")


@pytest.fixture
def train(model_folder, tmp_path, monkeypatch) -> Iterator[Callable[..., Trainer]]:
    """Run the trainer of grpo.py in a folder below ``tmp_path``, from a checkpoint if asked."""
    # Drawing the report takes seconds; that it is drawn is tested with the runs of the command.
    monkeypatch.setattr("grpo.report.reporter.write_report", lambda run_dir, **_: run_dir)

    def run(name: str, *overrides: str, checkpoint: Checkpoint | None = None) -> Trainer:
        config = load_config(composed("grpo", f"model.name={model_folder}", *TINY, *overrides))
        trainer = assemble(config, tmp_path / name, checkpoint, at_end)
        trainer.fit()
        return trainer

    with ExitStack() as at_end:
        yield run


class Runner:
    """Start the script with overrides; read what it wrote.

    Args:
        folder: where the script runs, so where ``outputs/`` appears.
        cache: kept between tests, so that one warm start serves all.
    """

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen] = []
        self.cache, self.environment = cache, environment(cache, COLUMNS="100")

    def start(self, *overrides: str, script: Path = SCRIPT) -> subprocess.Popen:
        self._started.append(subprocess.Popen(
            [sys.executable, str(script), *overrides], cwd=self.folder, env=self.environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return self._started[-1]

    def close(self) -> None:
        """Kill what a test that failed has left running."""
        for process in self._started:
            process.kill()
            process.wait()

    def run(self, *overrides: str, expect: int = 0, script: Path = SCRIPT) -> str:
        """Output of a finished run."""
        process = self.start(*overrides, script=script)
        output, _ = process.communicate(timeout=400)
        assert process.returncode == expect, output[-4000:]
        return output

    @staticmethod
    def metrics(run_dir: Path) -> list[dict]:
        return read_jsonl(run_dir / "metrics.jsonl")

    def wait_for_rows(self, process: subprocess.Popen, run_dir: Path, count: int) -> None:
        """Until a run that has been started has so many rows of metrics."""
        wait_until(lambda: len(self.metrics(run_dir)) >= count, seconds=300.0, alive=process)

    def left_behind(self) -> list[str]:
        """Commands of processes that the runs have started and not ended."""
        return with_variable("XDG_CACHE_HOME", self.cache)


@pytest.fixture
def runner(tmp_path, cache) -> Iterator[Runner]:
    runner = Runner(tmp_path, cache)
    yield runner
    runner.close()
