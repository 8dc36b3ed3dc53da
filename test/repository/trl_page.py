"""The tables of docs/trl.md, made of the table in grpo/config/trl_names.

``python -m test.repository.trl_page`` writes them into the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo.config.aliases import ALIASES
from grpo.config.trl_names import FIELDS
from grpo.config.trl_names.fields import GRPO_CONFIG, SCRIPTS, Field
from grpo.config.trl_names.training import TRAINING

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trl.md"
#: Heading on the page -> the names below it.
TABLES = {
    "GRPOConfig": GRPO_CONFIG,
    "TrainingArguments": {name: one for name, one in TRAINING.items() if name not in GRPO_CONFIG},
    "ModelConfig and the scripts": SCRIPTS,
    "MaxEnt and the KL controller": {
        name: FIELDS[name] for name in ALIASES
        if name not in {*GRPO_CONFIG, *TRAINING, *SCRIPTS}},
}
_HEAD = "| name | default there | here |\n|---|---|---|"


def table(fields: Mapping[str, Field]) -> str:
    """A row a name; names with the same answer that are no keys share one."""
    rows: dict[tuple, list[str]] = {}
    for name, one in fields.items():
        alone = name if one.to or one.rule == "refused" and one.default is not None else ""
        rows.setdefault((alone, one.rule, one.text), []).append(name)
    lines = [_HEAD]
    for (_, _, text), names in rows.items():
        one = fields[names[0]]
        default = shown(one.default) if len(names) == 1 else ""
        said = ", ".join(f"`{name}`" for name in names)
        lines.append(f"| {said} | {default} | {answer(one, text)} |")
    return "\n".join(lines)


def shown(default: Any) -> str:
    if default is None:
        return ""
    return f"`{default}`" if isinstance(default, str) else f"`{json.dumps(default)}`"


def answer(one: Field, text: str) -> str:
    text = text.replace("|", "\\|")
    if one.rule == "refused":
        return f"refused: {text}"
    if one.rule == "no effect":
        return f"no effect: {text}"
    return "; ".join([", ".join(f"`{key}`" for key in one.to), *([text] if text else [])])


def written(page: str) -> str:
    """The page with its tables as they should be."""
    for heading, fields in TABLES.items():
        page = re.sub(rf"(\n### {re.escape(heading)}\n\n.*?)(?=\| name)\| name.*?\n(?=\n|\Z)",
                      lambda match, fields=fields: match[1] + table(fields) + "\n", page,
                      flags=re.DOTALL)
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
