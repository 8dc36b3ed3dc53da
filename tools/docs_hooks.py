"""What the site needs besides docs/: pages from elsewhere, links into the repository, formulas.

The pages are written for a reader of the repository, with links between files and formulas as
GitHub takes them. mkdocs calls the functions named ``on_...`` of this file (`hooks` in mkdocs.yml).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path, PurePosixPath
from typing import Any

from latex2mathml.converter import convert
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
#: Files of the repository that are pages of the site, too.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md",
         "examples/atropos/README.md": "atropos.md", "benchmarks/README.md": "benchmarks.md",
         "sota-implementations/grpo/README.md": "scripts.md"}

#: A link, or an image, in Markdown: "!" or nothing, label, target.
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\(([^)\s]+)\)")

logger = get_plugin_logger("docs")  # whose warnings end a strict build


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that do not lie in docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Lead links where they lead in the repository, and set formulas aside."""
    page.formulas = []
    at = next((source for source, name in PAGES.items() if name == page.file.src_uri),
              f"docs/{page.file.src_uri}")

    def outside_code(text: str) -> str:
        text = re.sub(r"\$`([^`]+)`\$", lambda found: _aside(page, found[1], "inline"), text)
        return LINK.sub(lambda found: link(found, at, address=repository(), warn=logger.warning),
                        text)

    # What is between fences is code.
    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = map(outside_code, parts[::2])
    for number, part in enumerate(parts[1::2]):
        if formula := re.fullmatch(r"```math\n(.*)```", part, re.DOTALL):
            parts[1 + 2 * number] = _aside(page, formula[1], "block")
        elif part.startswith("```mermaid"):
            parts[1 + 2 * number] = _chain(part)
    return "".join(parts)


def on_page_content(html: str, page: Page, config: Any, files: Files) -> str:
    """Put formulas in their places, as MathML, and read what docstrings have of Sphinx."""
    html = re.sub(r":math:<code>([^<]+)</code>",
                  lambda found: convert(unescape(found[1]), display="inline"), html)
    # Python-Markdown takes an indented formula for a paragraph's end, or for code behind it.
    html = re.sub(r"<p>\.\. math::(?:\n(.*?)</p>|</p>\s*<div.*?<code>(.*?)</code></pre></div>)",
                  lambda found: _formula(unescape(re.sub("<.*?>", "", found[1] or found[2])),
                                         "block"), html, flags=re.DOTALL)
    html = re.sub(r":(?:attr|class|data|exc|func|meth|mod):<code>~?([^<]+)</code>",
                  r"<code>\1</code>", html)
    html = html.replace("::</p>", ":</p>")
    for number, formula in enumerate(page.formulas):
        html = html.replace(_place(number), formula)
    return html


def _chain(diagram: str) -> str:
    """A diagram without branches as text, because what draws it would come from another host."""
    labels = re.findall(r'\["(.*?)"\]', diagram)
    if len(labels) != diagram.count("-->") + 1:
        logger.warning("a diagram with branches is not shown on the site: %s", diagram)
    return "```text\n{}\n```".format("\n  \u2193\n".join(labels))


def _formula(formula: str, display: str) -> str:
    html = re.sub(r"(<mi>(?:log|exp|min|max)</mi>)(?=<m(?:i|sub|row|frac)>)",
                  r'\1<mspace width="0.17em" />', convert(formula.strip(), display=display))
    # MathML has no scroll bar of its own where a formula is wider than the page.
    return f'<span class="formula">{html}</span>' if display == "block" else html


def _place(number: int) -> str:
    return f"FORMULA{number}HERE"


def _aside(page: Page, formula: str, display: str) -> str:
    page.formulas.append(_formula(formula, display))
    return _place(len(page.formulas) - 1)


def repository() -> str:
    """Where the repository is, as setup.py says it; "": nowhere that links can lead to."""
    return re.search(r'^REPOSITORY = "(.*)"$', (ROOT / "setup.py").read_text("utf-8"),
                     re.MULTILINE)[1]


def title(path: str) -> str:
    """The first heading of a page, without a full stop."""
    return re.search(r"^# (.+?)\.?$", (ROOT / path).read_text("utf-8"), re.MULTILINE)[1]


def link(found: re.Match, at: str, *, address: str = "",
         warn: Callable[[str], None] = print) -> str:
    """A link of a page as the site has it.

    Args:
        found: what :data:`LINK` has matched.
        at: the page's path in the repository.
        address: of the repository, to which links to files that are no pages lead. Without one
            such a link becomes its label.
        warn: is told of a target that is not there.
    """
    image, label, target = found.groups()
    path, _, anchor = target.partition("#")
    if re.match(r"[a-z]+:", target) or not path:
        return found[0]
    wanted = os.path.normpath(PurePosixPath(at).parent / path)
    if not (ROOT / wanted).exists():
        warn(f"{at} has a link to {target}, but there is no {wanted}")
        return label
    page = PAGES.get(wanted) or (wanted.removeprefix("docs/") if wanted.startswith("docs/") else "")
    if page:
        if re.fullmatch(r"`?[\w./-]+\.md`?", label):  # a reader of the site knows pages by title
            label = title(wanted)
        here = PurePosixPath(PAGES.get(at) or at.removeprefix("docs/")).parent
        return f"{image}[{label}]({os.path.relpath(page, here)}{'#' * bool(anchor)}{anchor})"
    if not address:
        return label
    kind = "tree" if (ROOT / wanted).is_dir() else "blob"
    return f"{image}[{label}]({address}/{kind}/HEAD/{wanted}{'#' * bool(anchor)}{anchor})"
