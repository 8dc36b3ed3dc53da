"""Running ``grpo.py`` as its users do: as a command, in a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "sota-implementations" / "grpo" / "grpo.py"


class Runner:
    """Start the script with overrides; read what it wrote.

    Args:
        folder: where the script runs, so where ``outputs/`` appears.
        cache: kept between tests, so that one warm start serves all.
    """

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen] = []
        self.environment = os.environ | {"XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1",
                                         "COLUMNS": "100"}

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
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]


@pytest.fixture(scope="session")
def compose():
    """``compose(config_name, overrides)``: the values of a command."""
    from hydra import compose, initialize_config_dir

    def composed(name: str, overrides: list[str]):
        with initialize_config_dir(str(REPO / "config"), version_base=None):
            return compose(name, overrides)

    return composed


@pytest.fixture
def runner(tmp_path, cache) -> Iterator[Runner]:
    runner = Runner(tmp_path, cache)
    yield runner
    runner.close()
