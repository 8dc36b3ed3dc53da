"""docs/adding.md: every program is short, and every command runs with the files that it names."""

from __future__ import annotations

import re
import shlex

import pytest
import torch

from grpo.config.schema import Config, load_config
from grpo.envs.tasks import Problem
from grpo.objectives import registry

from ..config.configs import composed
from ..support import REPO, commands, environment, several_runs

PAGE = (REPO / "docs" / "adding.md").read_text()
#: Programs by the name of the file that the text before them gives.
FILES = dict(re.findall(r"`(my_\w+\.py)`(?:(?!```|`my_)[\s\S])*```python\n(.*?)```", PAGE,
                        re.DOTALL))
SCRIPT = "python sota-implementations/grpo/grpo.py"
SMALLER = ["model.warm_start_steps=5", "env.num_envs=2", "env.repeats=2",
           "train.total_dialog_turns=8", "train.checkpoint_frequency=0",
           "inference_model.backend=transformers"]
RUNS = [shlex.split(line)[1:] for line in commands(PAGE) if line.startswith(SCRIPT)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With the files, where they are found and write what they write."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, source in FILES.items():
        (tmp_path / name).write_text(source)
    exec(compile(FILES["my_rows.py"], "my_rows.py", "exec"), {})
    return tmp_path


def test_every_program_is_named_and_short_and_every_command_works(folder, monkeypatch):
    monkeypatch.setattr(registry, "_OBJECTIVES", dict(registry._OBJECTIVES))
    assert len(FILES) == PAGE.count("```python") == 6
    assert all(source.count("\n") <= 30 for source in FILES.values())
    others = [line for line in commands(PAGE) if not line.startswith(SCRIPT)]
    assert others == ["python my_rows.py"]
    for run in RUNS:
        assert load_config(composed("grpo", *run[1:])) != Config()


def test_the_functions_do_what_they_say(folder):
    seven, names = Problem(prompt="3+4=", answer="7", id="seven"), {}
    for name in ("my_rewards.py", "my_advantages.py"):
        exec(compile(FILES[name], name, "exec"), names)
    assert [names["near"](text, seven) for text in ("7", "8", "seven")] == [1, 0.5, 0]
    signs = names["signs"](torch.tensor([1.0, 0, 0.5, 0.5, 9]), torch.tensor([0, 0, 1, 1, 1]),
                           torch.tensor([True, True, True, True, False]))
    assert signs.tolist() == [1, -1, 0, 0, 0]
    assert (folder / "parity.jsonl").read_text().count("\n") == 200


@pytest.mark.slow
def test_the_commands_run(folder, cache):
    runs = []
    for script, *arguments in RUNS:
        run = [str(REPO / script), *(argument.replace("parity.jsonl", f"{folder}/parity.jsonl")
                                     for argument in arguments), *SMALLER]
        if "max_tokens" not in " ".join(arguments):  # what a conversation needs
            run.append("inference_model.max_tokens=4")
        if "train.optim_batch_size=128" in arguments:  # half a batch
            run.append("train.optim_batch_size=2")
        runs.append(run)
    output = "".join(several_runs(runs, folder, environment(cache, PYTHONPATH=str(folder))))
    assert output.count("held-out accuracy") == len(runs) == 7
    assert "got no reward" not in output
