"""The site: it is built without a warning, has what people import, and needs no other host."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from ..support import REPO, environment, finished

REFERENCE = "\n".join(path.read_text() for path in (REPO / "docs" / "reference").glob("*.md"))
#: Modules whose public names are all on a page of the reference.
DOCUMENTED = ("grpo.objectives", "grpo.envs.tasks", "grpo.envs.rewards", "grpo.data")
#: Of grpo.envs.tasks and .rewards, what pages have no use for.
_HELPERS = {"RewardFn", "options_of", "task_class"}


@pytest.fixture
def hooks(monkeypatch):
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    monkeypatch.syspath_prepend(str(REPO / "tools"))
    return import_module("docs_hooks")


def public(module: str) -> set[str]:
    """``__all__`` of a package, without importing it."""
    tree = ast.parse((REPO / module.replace(".", "/") / "__init__.py").read_text())
    (names,) = [node.value for node in tree.body if isinstance(node, ast.Assign)
                and node.targets[0].id == "__all__"]
    return set(ast.literal_eval(names))


def test_every_public_name_is_in_the_reference():
    listed = set(re.findall(r"^::: ([\w.]+)$", REFERENCE, re.MULTILINE))
    names = {path.rpartition(".")[2] for path in listed}
    assert public("grpo") <= names
    for module in DOCUMENTED:
        missing = {f"{module}.{name}" for name in public(module) - _HELPERS} - listed
        assert not missing


def test_make_builds_it_so_that_warnings_are_errors():
    planned = subprocess.run(["make", "--dry-run", "docs"], cwd=REPO, capture_output=True,
                             text=True, timeout=60)
    assert "mkdocs build --strict" in planned.stdout, planned.stderr


def build(folder: Path, *, expect: int = 0) -> str:
    """What `make docs` says in a folder, where the site must be built or must not."""
    return finished([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", "site"],
                    folder, environment(NO_MKDOCS_2_WARNING="1"), expect=expect)


@pytest.fixture
def copy(tmp_path):
    """The repository with pages that a test may change."""
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    for path in REPO.iterdir():
        if path.name in ("grpo", "tools", "mkdocs.yml"):
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(REPO / "docs", tmp_path / "docs")
    return tmp_path


def test_the_site_is_built_without_a_warning_and_asks_no_other_host(copy):
    assert "WARNING" not in build(copy)
    pages = {str(path.relative_to(copy / "site")): path.read_text()
             for path in (copy / "site").rglob("*.html")}
    assert 'href="site.css"' in pages["index.html"]
    assert "grpo.objectives.GRPOLoss" in pages["reference/objectives.html"]
    assert pages["objectives.html"].count("<math") > 100
    for name, html in pages.items():
        # What a browser fetches by itself; links are for those who click on them.
        assert not re.findall(r'(?:src|<link[^>]*href)="https?://', html), name
        text = re.sub(r"<pre.*?</pre>|<code.*?</code>", "", html, flags=re.DOTALL)
        assert not re.search(r"FORMULA\d|:(?:class|func|math):|\.\. math::", text), name


@pytest.mark.slow
@pytest.mark.parametrize(("text", "message"), [
    ("[a](gone.md)", "docs/memory.md has a link to gone.md, but there is no docs/gone.md"),
    ("[a](scale.md#nowhere)", "does not contain an anchor '#nowhere'"),
    ("::: grpo.objectives.Gone", "grpo.objectives.Gone")])
def test_what_leads_nowhere_ends_the_build(copy, text, message):
    page = copy / "docs" / "memory.md"
    page.write_text(f"{page.read_text()}\n\n{text}\n")
    assert message in build(copy, expect=1)


@pytest.mark.parametrize(("text", "on_the_site", "with_an_address"), [
    ("[a](objectives.md#3-objectives)", None, None),
    ("[a](../README.md#in-your-own-loop)", "[a](index.md#in-your-own-loop)", None),
    ("[a](../examples/atropos/README.md)", "[a](atropos.md)", None),
    ("[a](../setup.py)", "a", "[a](there/blob/HEAD/setup.py)"),
    ("[a](../config/preset)", "a", "[a](there/tree/HEAD/config/preset)"),
    ("[a](#here)", None, None),
])
def test_links_lead_to_pages_and_into_the_repository(hooks, text, on_the_site, with_an_address):
    found = hooks.LINK.match(text)
    assert hooks.link(found, "docs/tasks.md", warn=pytest.fail) == (on_the_site or text)
    assert hooks.link(found, "docs/tasks.md", address="there",
                      warn=pytest.fail) == (with_an_address or on_the_site or text)


@pytest.mark.parametrize("text", ["[async.md](async.md)", "[`docs/async.md`](async.md)"])
def test_links_that_name_a_file_name_the_page_on_the_site(hooks, text):
    found = hooks.LINK.match(text)
    assert hooks.link(found, "docs/tasks.md") == "[Asynchronous training](async.md)"


def test_formulas_have_room_after_functions_and_a_scroll_bar_where_they_stand_alone(hooks):
    inline, block = (hooks._formula(r"\log p", display) for display in ("inline", "block"))
    assert '<mi>log</mi><mspace width="0.17em" /><mi>p</mi>' in inline
    assert "formula" not in inline and block.startswith('<span class="formula"><math')


def test_links_of_pages_from_elsewhere_lead_to_the_same_files(hooks):
    readme = hooks.LINK.match("![a](docs/images/overview.svg)")
    assert hooks.link(readme, "README.md") == "![a](images/overview.svg)"
    atropos = hooks.LINK.match("[a](../../docs/commands.md#atropos)")
    assert hooks.link(atropos, "examples/atropos/README.md") == "[a](commands.md#atropos)"
