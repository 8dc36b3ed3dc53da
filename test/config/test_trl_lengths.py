"""How long a run of a recipe file is, where the command line says it in another way."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from grpo.run.cli.trl_names import with_trl_names

from .configs import composed_like


@pytest.mark.parametrize("typed, lengths", [
    ("--max_steps 50", {"max_steps": 50}), ("max_steps=50", {"max_steps": 50}),
    ("iterations=50", {"max_steps": 50}), ("train.max_steps=50", {"max_steps": 50}),
    ("num_train_epochs=2", {"data_epochs": 2.0}), ("train.data_epochs=2", {"data_epochs": 2.0}),
    ("train.total_dialog_turns=64", {"total_dialog_turns": 64}),
])
@pytest.mark.parametrize("in_the_file", ["train.data_epochs: 1", "train: {data_epochs: 1}",
                                         "train.max_steps: 9", "train.total_dialog_turns: 128"])
def test_what_is_typed_wins(typed, lengths, in_the_file, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"env: gsm8k\n{in_the_file}\n")
    train = composed_like(["--config", str(path), *typed.split()]).train
    found = {key: getattr(train, key) for key in ("max_steps", "data_epochs", "total_dialog_turns")}
    assert {key: value for key, value in found.items() if value is not None} == lengths


@pytest.mark.parametrize("typed", ["--max_steps -1", "train.max_steps=null"])
def test_what_is_left_open_is_as_in_the_file(typed, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("env: gsm8k\ntrain.data_epochs: 1\n")
    assert composed_like(["--config", str(path), *typed.split()]).train.data_epochs == 1


@pytest.mark.parametrize("in_the_file", ["max_steps: 9", "train.max_steps: 9",
                                         "num_train_epochs: 1"])
def test_a_sweep_says_it_alone(in_the_file, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"env: gsm8k\n{in_the_file}\n")
    found = with_trl_names(["-m", "--config", str(path), "train.data_epochs=1,2"])
    keys = OmegaConf.from_dotlist([text for text in found if text.startswith("train.")]).train
    assert keys.data_epochs == "1,2" and keys.get("max_steps") is None
