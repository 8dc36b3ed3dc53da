"""A tiny model, and asynchronous runs whose workers are in this process."""

from __future__ import annotations

import itertools
from contextlib import ExitStack

import pytest

from ..training.runs import save_tiny
from .asynchronous import LocalRay, async_config, make_async_trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    return save_tiny(tmp_path_factory.mktemp("model"), tokenizer, seed=0)


@pytest.fixture
def start(folder, tmp_path, monkeypatch):
    """Builds a run by options, or from a checkpoint; ends it after the test."""
    LocalRay(monkeypatch)
    with ExitStack() as at_end:
        runs = itertools.count()
        yield lambda checkpoint=None, **options: make_async_trainer(
            async_config(folder, **options),
            checkpoint.run_dir if checkpoint else tmp_path / str(next(runs)), at_end, checkpoint)
