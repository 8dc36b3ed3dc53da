"""Fixtures of the trainer's tests."""

from __future__ import annotations

import pytest

from grpo.config.schema import load_config

from . import runs


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory, tokenizer):
    return runs.save_tiny(tmp_path_factory.mktemp("tiny"), tokenizer, seed=0)


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory, tokenizer):
    """Of the same shape, with answers of its own."""
    return runs.save_tiny(tmp_path_factory.mktemp("teacher"), tokenizer, seed=1)


@pytest.fixture(autouse=True)
def reports(monkeypatch, request):
    """Folders a report was asked for; drawing it takes seconds, so only one test does."""
    asked = []
    if "slow" not in request.keywords:
        monkeypatch.setattr("grpo.report.reporter.write_report",
                            lambda run_dir, **kwargs: asked.append(run_dir) or run_dir / "none")
    return asked


@pytest.fixture
def make_config(tiny_folder):
    def make(*, iterations: int = 5, reward: str = "by_text", **changes):
        values = {
            "env": {"num_envs": 2, "repeats": 4, "reward": f"{runs.__name__}:{reward}",
                    "task": {"max_operand": 9, "num_train": 15, "num_test": 5}},
            "model": {"name": str(tiny_folder)},
            "train": {"total_dialog_turns": 8 * iterations, "eval_frequency": 2,
                      "checkpoint_frequency": 2},
            "inference_model": {"backend": "transformers", "max_tokens": 4},
            "optimizer": {"lr": 0.01},
            "logging": {"num_samples": 2},
            "device": "cpu",
        }
        for section, keys in changes.items():
            values[section] = {**values.get(section, {}), **keys}
        return load_config(values)

    return make
