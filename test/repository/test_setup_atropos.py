"""The environments' virtual environment: what goes in, when it is made anew, what errors say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import setup_atropos  # noqa: E402


@pytest.fixture
def commands(monkeypatch):
    """The commands that would run; making a virtual environment makes its folder."""
    seen = []

    def run(*command, what):
        seen.append([str(part) for part in command])
        if "venv" in seen[-1]:
            Path(command[-1]).mkdir(exist_ok=True)
            Path(command[-1], "pyvenv.cfg").touch()
        return "atroposlib 0.4.0, transformers 4.57.6\n"

    monkeypatch.setattr(setup_atropos, "run", run)
    return seen


def test_what_is_imported_goes_in_and_no_torch(commands, tmp_path, capsys):
    setup_atropos.main(["--venv", str(tmp_path / "new")])
    made, atroposlib, imported, verified = commands
    assert made[1:3] == ["-m", "venv"]
    assert atroposlib[-2:] == ["--no-deps", "atroposlib==0.4.0"]
    names = {Requirement(line).name for line in imported[4:]}
    assert {"transformers", "aiohttp", "openai", "fastapi"} <= names and "torch" not in names
    assert all(command[0] == str(tmp_path / "new/bin/python") for command in commands[1:])
    assert "atroposlib.envs.base" in verified[-1]
    assert capsys.readouterr().out.splitlines()[-1].endswith("transformers 4.57.6")


def test_all_leaves_the_choice_to_atroposlib_but_not_that_of_transformers(commands, tmp_path):
    setup_atropos.main(["--venv", str(tmp_path / "new"), "--all"])
    assert commands[1][4:] == ["atroposlib==0.4.0", "transformers>=4.50,<5"]


def test_it_is_kept_for_the_same_interpreter_and_made_anew_for_another(commands, tmp_path):
    venv = tmp_path / "new"
    for _ in range(2):
        setup_atropos.prepare_venv(venv)
    assert len(commands) == 1
    (venv / "kind").write_text("Python 3.1")
    (venv / "old").touch()
    setup_atropos.prepare_venv(venv)
    assert len(commands) == 2 and not (venv / "old").exists()


@pytest.mark.parametrize("names", [["thesis.tex"], ["pyvenv.cfg"], ["kind", "thesis.tex"]])
def test_a_folder_that_was_not_made_here_is_not_removed(commands, tmp_path, names):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(setup_atropos.SetupError, match="was not made by this set-up.*name another "
                                                       "folder with --venv, or remove it yourself"):
        setup_atropos.main(["--venv", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == names and not commands


def test_a_file_is_not_removed_either(commands, tmp_path):
    (tmp_path / "notes").touch()
    with pytest.raises(setup_atropos.SetupError, match="was not made by this set-up"):
        setup_atropos.prepare_venv(tmp_path / "notes")
    assert (tmp_path / "notes").exists()


def test_one_that_was_cut_short_is_made_anew(commands, tmp_path, monkeypatch):
    venv = tmp_path / "deeper" / "new"

    def killed(*command, what):
        (venv / "half").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(setup_atropos, "run", killed)
        setup_atropos.prepare_venv(venv)
    setup_atropos.prepare_venv(venv)
    assert len(commands) == 1 and not (venv / "half").exists()


def test_a_failing_step_shows_the_end_of_its_output():
    with pytest.raises(setup_atropos.SetupError, match=r"what it imports failed \(exit 3\):\n"
                                                       r"    no such package\n(.|\n)*network"):
        setup_atropos.run("sh", "-c", "echo no such package >&2; exit 3", what="what it imports")
