"""The guide in examples/atropos: its numbers are those of the ledger, its messages are ours."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from transformers import Qwen2Config

from grpo.policies.model_shape import LoRA, ModelShape
from grpo.report.legacy_names import LEGACY_NAMES
from grpo.run.cli import atropos, launch
from grpo.run.cli.flags import FLAGS, ONE_PROCESS, to_config
from grpo.server import serve

REPO = Path(__file__).resolve().parents[2]
FOLDER = REPO / "examples" / "atropos"
GUIDE = (FOLDER / "README.md").read_text(encoding="utf-8")
SMALL = Qwen2Config(vocab_size=151936, hidden_size=1536, intermediate_size=8960,
                    num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
                    tie_word_embeddings=True)
LARGE = Qwen2Config(vocab_size=152064, hidden_size=3584, intermediate_size=18944,
                    num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
                    tie_word_embeddings=False)


def rows(heading: str) -> list[list[str]]:
    """Cells of the tables below a heading, without the headers."""
    text = GUIDE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_environment_of_the_folder_is_listed():
    listed = set(re.findall(r"^\| `(\w+\.py)`", GUIDE, flags=re.MULTILINE))
    assert listed == {path.name for path in FOLDER.glob("*_env.py")}


def test_the_memory_table_is_exact():
    tables = [row for row in rows("Memory") if len(row) == 7 and row[4].isdigit()]
    assert [int(row[4]) for row in tables] == [18, 20, 2, 4]
    for row in tables:
        for cell, config in zip(row[5:], (SMALL, LARGE), strict=True):
            size = int(row[4]) * ModelShape.of(config).parameters / 2**30
            assert float(cell) == pytest.approx(size, abs=0.05)
    adapters = sum(ModelShape.of(SMALL).adapter_sizes(LoRA(rank=16))) / 1e6
    assert f"{adapters:.1f} million parameters at rank 16" in GUIDE


@pytest.mark.parametrize("message", [
    "the interpreter of the environments, ", "; install it there: ", "cannot be forwarded: ",
    "s ago or earlier, but no request has come to the engine", "s and given no group",
    "the engine died",
    "masks the wrong tokens", "is not registered at",
    "the hub's queue is full", "cannot be used: ", "--env.data_path must be a folder",
    "the chat template changed the first turn when the second was added"])
def test_our_messages_in_the_guide_are_those_of_the_code(message):
    assert any(message in row[0] for row in rows("When something goes wrong"))
    sources = [*(REPO / "grpo").rglob("*.py"), *FOLDER.glob("*.py")]
    # Long messages are split over several literals.
    joined = (re.sub(r'"\s+f?"', "", path.read_text(encoding="utf-8")) for path in sources)
    assert any(message in text for text in joined)


@pytest.fixture(scope="module")
def trainer(python) -> Path:
    """Folder of the trainer that comes with atroposlib."""
    where = "import importlib.util as u; print(*u.find_spec('example_trainer')." \
            "submodule_search_locations)"
    return Path(subprocess.check_output([python, "-c", where], text=True).strip())


@pytest.fixture
def theirs(trainer, monkeypatch) -> dict[str, object]:
    """Its flags and their defaults, of its own parser."""
    package = ModuleType("example_trainer")
    package.__path__ = [str(trainer)]  # without its __init__, which imports the whole trainer
    monkeypatch.setitem(sys.modules, "example_trainer", package)
    for name in ("cli", "config"):
        monkeypatch.delitem(sys.modules, f"example_trainer.{name}", raising=False)
    actions = importlib.import_module("example_trainer.cli").create_full_parser()._actions
    return {name: action.default for action in actions for name in action.option_strings
            if action.dest not in ("help", "model_name")}


def test_defaults_that_differ_from_those_of_atroposlibs_trainer_are_listed(theirs):
    listed = {row[0].strip("`"): row[1] for row in rows("One command")
              if len(row) == 4 and row[0].startswith("`--")
              and row[2] not in ("ignored", "refused")}
    ours = {name: flag.default for flag in FLAGS for name in flag.names}
    ours["--weight-bridge-mode"] = atropos.parser().get_default("weight_bridge_mode")
    ours["--use-wandb"] = False
    differ = set()
    for name, default in theirs.items():
        if name in ONE_PROCESS:
            continue
        here = ours[name]  # each of their flags is one of ours
        same = here == default or not (here or default) or (
            isinstance(default, str) and Path(default) == Path(str(here)))
        if not same and name != "--vllm-gpu-memory-utilization":  # a second name
            differ.add(name)
            assert str(default) in listed[name], name
    # Of these None stands for something else there and here.
    assert listed.keys() == differ | {"--lora-target-modules"}


def test_what_becomes_of_a_flag_that_is_not_read_is_listed():
    found = {name: row[2] for row in rows("One command")
             if len(row) == 4 and row[2] in ("ignored", "refused")
             for name in re.findall(r"`(--[\w-]+)`", row[0])}
    expected = {flag.names[0]: "ignored" if flag.idle else "refused"
                for flag in FLAGS if flag.modes or flag.needs}
    expected |= dict.fromkeys(ONE_PROCESS, "ignored")
    expected |= dict.fromkeys(("--adafactor-scale-parameter", "--adafactor-relative-step"),
                              "refused")
    assert found == expected


def test_the_lines_of_their_guide_can_be_typed(trainer, caplog):
    text = (trainer / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^(?:\w+=\S+\s+)*python -m example_trainer\.(\w+) (.*--.*)$", text,
                       re.MULTILINE)
    lines = [(name, shlex.split(rest)) for name, rest in lines if "..." not in rest]
    assert [name for name, _ in lines] == ["vllm_api_server", "grpo", "vllm_api_server", "grpo",
                                           "run"]
    for name, words in lines:
        if name == "vllm_api_server":
            model = serve.parser().parse_args(words).model
        else:
            command = {"grpo": atropos, "run": launch}[name]
            model = to_config(command.parser().parse_intermixed_args(words)).model.name
        assert model == "NousResearch/Hermes-3-Llama-3.1-8B"
    assert {said.split()[0] for said in caplog.messages} == {
        "--vllm-restart-interval", "--wandb-project"}


def test_legacy_names_are_those_of_their_trainer(trainer):
    source = (trainer / "training.py").read_text(encoding="utf-8")
    for name in LEGACY_NAMES["atropos"]:
        assert f'"{name}"' in source or (
            'f"train/{key}"' in source and f'"{name.removeprefix("train/")}"' in source), name
