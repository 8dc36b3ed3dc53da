"""What is trained on: that of the command line, not that of a recipe file behind it."""

from __future__ import annotations

import pytest

from grpo.run.cli.trl_names import with_trl_names

MIXTURE = "dataset_mixture: {datasets: [{id: a/b}]}"


def keys_of(arguments):
    return dict(text.partition("=")[::2] for text in with_trl_names(arguments) if "=" in text)


@pytest.mark.parametrize("in_the_file, gone", [
    ("env: gsm8k", "env=gsm8k"), ("env: {dataset: countdown, num_envs: 3}",
                                  "env.dataset=countdown"),
    ("env.path: a/b", "env.path=a/b"), (MIXTURE, "dataset_mixture={datasets:[{id:a/b}]}"),
    ("datasets: [{path: a/b}]\ntest_split_size: 0.1",
     "datasets=[{path:a/b}] test_split_size=0.1"),
])
def test_a_data_set_that_is_typed_takes_the_place_of_the_one_of_the_file(
        in_the_file, gone, tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{in_the_file}\ndataset_prompt_column: q\n")
    keys = keys_of(["--config", str(path), "--dataset_name", "my/d"])
    assert (keys["env"], keys["env.path"], keys["env.prompt_column"]) == ("dataset", "my/d", "q")
    assert "env.dataset_mixture" not in keys
    assert (f"dataset_name takes the place of what the file says of what is trained on: {gone}\n"
            in capsys.readouterr().out)


def test_a_mixture_that_is_typed_takes_the_place_of_a_data_set_and_of_another(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{MIXTURE}\ndataset_name: c/d\ntest_split_size: 0.1\n")
    keys = keys_of(["--config", str(path), "datasets=[{path:e/f}]"])
    assert keys["env.dataset_mixture"] == "{datasets:[{id:e/f}],test_split_size:0.1}"
    assert "env.path" not in keys


@pytest.mark.parametrize("swept, left", [
    ("env=gsm8k,countdown", {"env"}),
    ("env.path=c/d,e/f", {"env", "env.path", "env.prompt_column", "env.task.chat"})])
def test_data_sets_of_a_sweep_take_the_place_of_the_one_of_the_file(swept, left, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("dataset_name: a/b\n")
    keys = keys_of(["-m", "--config", str(path), swept])
    assert {key for key in keys if key.startswith("env")} - {"env.num_envs", "env.repeats"} == left
    assert keys[swept.partition("=")[0]] == swept.partition("=")[2]
