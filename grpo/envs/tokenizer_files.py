"""Tokenizer folders that transformers 4 and 5 both read.

Atropos environments run on transformers 4 and tokenize with the files that a trainer on
transformers 5 wrote.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def save_tokenizer(tokenizer: Any, folder: str | Path) -> None:
    """Write a fast tokenizer so that ``AutoTokenizer`` of transformers 4 and 5 loads the same one;
    the folder may hold a model.

    Examples:
        >>> import tempfile
        >>> from grpo.envs.embedded import byte_tokenizer
        >>> tokenizer, folder = byte_tokenizer(), Path(tempfile.mkdtemp())
        >>> _ = tokenizer.add_tokens(["<tool>"], special_tokens=True)
        >>> tokenizer.extra_special_tokens = ["<tool>"]
        >>> save_tokenizer(tokenizer, folder)
        >>> config = json.loads((folder / "tokenizer_config.json").read_text())
        >>> config["tokenizer_class"], config["additional_special_tokens"]
        ('PreTrainedTokenizerFast', ['<tool>'])
    """
    tokenizer.save_pretrained(folder)
    path = Path(folder, "tokenizer_config.json")
    config = json.loads(path.read_text())
    if config.get("tokenizer_class") == "TokenizersBackend":  # which 5 alone has
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):  # 4 has a mapping under this name
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    path.write_text(json.dumps(config, indent=2) + "\n")


def environment_tokenizer(model: str | Path, folder: str | Path) -> Path:
    """Copy the tokenizer of a model, a folder or hub id, in the form that environments load:
    ``folder``, which is returned, is for ``--env.tokenizer_name`` and ``--openai.tokenizer_name``.
    """
    from transformers import AutoTokenizer

    save_tokenizer(AutoTokenizer.from_pretrained(model), folder)
    return Path(folder)
