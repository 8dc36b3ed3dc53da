"""docs/troubleshooting.md: the messages that it quotes are said by the library, or by vLLM."""

from __future__ import annotations

import ast
import functools
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from ..support import REPO, code_in
from .schema_keys import unknown_keys

PAGE = (REPO / "docs" / "troubleshooting.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")]
        for line in PAGE.splitlines() if line.startswith("| `")]
LIBRARY = sorted((REPO / "grpo").rglob("*.py"))
OURS = [row[0] for row in ROWS if not re.search(r"\((?:vLLM|PyTorch|NCCL)\)", row[0])]


@functools.cache
def texts(*sources: Path) -> tuple[str, ...]:
    """Every text of programs but docstrings, with ``\\0`` for what is filled in."""
    found = []
    for path in sources:
        tree = ast.parse(path.read_text())
        described = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "\0"
                                     for part in node.values))
            elif (isinstance(node, ast.Constant) and isinstance(node.value, str)
                  and id(node) not in described):
                found.append(re.sub(r"%(?:s|d|r|g)", "\0", node.value))
    return tuple(found)


def said(quoted: str, sources: tuple[str, ...]) -> bool:
    """Whether a text has the parts of a quotation, in order."""
    pattern = ".*".join(re.escape(part.strip()) for part in quoted.split("..."))
    return any(re.search(pattern, text, re.DOTALL) for text in sources)


@pytest.mark.parametrize("cell", OURS)
def test_a_message_of_the_library_is_in_its_source(cell):
    (quoted,) = code_in(cell)
    assert said(quoted, texts(*LIBRARY))


def test_a_message_that_nobody_says_is_found_out():
    assert not said("the engine ... is fast", texts(*LIBRARY))


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_variables_of_vllm_on_pages_are_read_by_it_or_by_the_library():
    read = (Path(find_spec("vllm").submodule_search_locations[0]) / "envs.py").read_text()
    read += "".join(path.read_text() for folder in ("grpo", "examples", "tools", "benchmarks")
                    for path in sorted((REPO / folder).rglob("*.*")) if path.suffix in (
                        ".py", ".sh", ".sbatch"))
    pages = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
    named = {name for page in pages for name in re.findall(r"\bVLLM_[A-Z_]+", page.read_text())}
    assert len(named) > 5
    assert [name for name in sorted(named) if not re.search(rf"\b{name}\b", read)] == []


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_messages_of_vllm_are_in_its_source():
    folder = Path(find_spec("vllm").submodule_search_locations[0]) / "v1"
    sources = texts(*(folder / name for name in (
        "engine/utils.py", "worker/utils.py", "core/kv_cache_utils.py")))
    quoted = [code_in(row[0])[0] for row in ROWS if "(vLLM)" in row[0]]
    assert len(quoted) == 4
    assert [text for text in quoted if not said(text, sources)] == []


def test_every_row_names_cause_and_fix_and_every_key_is_one():
    assert all(len(row) == 3 and all(row) for row in ROWS) and len(OURS) > 20
    assert not unknown_keys(PAGE)
