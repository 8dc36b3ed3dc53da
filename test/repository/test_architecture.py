"""The pages on the rooms name what is there: rooms in their order, functions, files."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "examples/atropos/README.md",
         *(f"docs/{path.name}" for path in (REPO / "docs").glob("*.md")))
ROOMS = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)


def layers() -> list[str]:
    """The rooms of the contract, the one that all others import first."""
    settings = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["importlinter"]
    return settings["contracts"][0]["layers"][::-1]


def test_the_rooms_are_those_of_the_contract_and_of_the_package():
    page = (REPO / "docs/architecture.md").read_text()
    assert ROOMS.findall(page) == layers()
    assert re.findall(r'(\w+)\["\1:', page) == layers()
    folders = {path.name for path in (REPO / "grpo").iterdir() if (path / "__init__.py").exists()}
    assert folders == set(layers()) and len(folders) <= 13


def test_no_file_is_two_ideas_or_half_of_one():
    sizes = {path: len(path.read_text().splitlines()) for path in (REPO / "grpo").rglob("*.py")}
    assert not {path for path, lines in sizes.items() if lines > 400}
    assert not {path for path, lines in sizes.items()
                if lines < 15 and path.name != "__init__.py"}


def test_nothing_lies_loose_at_the_top_of_the_package():
    assert [path.name for path in (REPO / "grpo").glob("*.py")] == ["__init__.py"]


@pytest.mark.parametrize("page", PAGES)
def test_each_name_on_the_page_exists(page):
    names = re.findall(r"`(grpo(?:\.\w+)+)`", (REPO / page).read_text())
    for name in set(names) - {"grpo.py"}:
        parts = name.split(".")
        for count in range(len(parts), 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:count]))
            except ModuleNotFoundError:
                continue
            break
        for part in parts[count:]:
            found = getattr(found, part)


def test_the_way_of_a_batch_names_a_function_in_each_of_ten_steps():
    page = (REPO / "docs/architecture.md").read_text().partition("## The way of a batch")[2]
    steps = re.split(r"^\d+\. ", page, flags=re.MULTILINE)[1:]
    assert len(steps) == 10 and all("`grpo." in step for step in steps)


@pytest.mark.parametrize("page", PAGES)
def test_each_path_on_the_page_exists(page):
    paths = re.findall(r"`((?:grpo|test|docs|benchmarks|tools|examples|config|\.ci)/[\w/.]+)`",
                       (REPO / page).read_text())
    assert not [path for path in paths if not (REPO / path).exists() and "GPUS" not in path]
