"""Tokenizer folders that transformers 4 and 5 both read.

Atropos environments run on transformers 4 and tokenize with the files that a trainer on
transformers 5 wrote. Two entries of ``tokenizer_config.json`` stand in the way: a class that exists
in 5 only, and the list of further special tokens, whose old name both know.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_CONFIG = "tokenizer_config.json"


def save_tokenizer(tokenizer: Any, folder: str | Path) -> None:
    """Write a fast tokenizer so that ``AutoTokenizer`` of transformers 4 and 5 loads the same one.

    Args:
        tokenizer: Hugging Face tokenizer.
        folder: where its files go; may hold a model.

    Examples:
        >>> import tempfile
        >>> from grpo.envs.embedded import byte_tokenizer
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_tokenizer(byte_tokenizer(), folder)
        ...     json.loads(Path(folder, "tokenizer_config.json").read_text())["tokenizer_class"]
        'PreTrainedTokenizerFast'
    """
    tokenizer.save_pretrained(folder)
    path = Path(folder) / _CONFIG
    path.write_text(json.dumps(portable_config(json.loads(path.read_text())), indent=2) + "\n")


def portable_config(config: dict[str, Any]) -> dict[str, Any]:
    """The content of ``tokenizer_config.json`` in terms that transformers 4 knows as well.

    Examples:
        >>> portable_config({"tokenizer_class": "TokenizersBackend",
        ...                  "extra_special_tokens": ["<tool>"], "eos_token": "<eos>"})
        ... # doctest: +NORMALIZE_WHITESPACE
        {'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': '<eos>',
         'additional_special_tokens': ['<tool>']}
    """
    config = dict(config)
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):  # 4 has a mapping under this name
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    return config


def environment_tokenizer(model: str | Path, folder: str | Path) -> Path:
    """Copy a model's tokenizer to ``folder`` in the form that environments load.

    Args:
        model: folder or hub id, as for ``AutoTokenizer.from_pretrained``.
        folder: made if it is not there.

    Returns:
        ``folder``, for ``--env.tokenizer_name`` and ``--openai.tokenizer_name``.
    """
    from transformers import AutoTokenizer

    save_tokenizer(AutoTokenizer.from_pretrained(model), folder)
    return Path(folder)
