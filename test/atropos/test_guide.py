"""The guide in examples/atropos: its numbers are those of the ledger, its messages are ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import Qwen2Config

from grpo.policies.model_shape import LoRA, ModelShape

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
