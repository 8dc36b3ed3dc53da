"""Sizes of public models, so that a plan needs no download: those of their ``config.json`` on the
Hugging Face hub, of the families' own pages there (Qwen2.5, Qwen3, Llama 3)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from grpo.config.keys import ConfigError
from grpo.policies.model_source import look_for

#: hidden size, feed-forward width, layers, heads, heads of keys and values, whether the output
#: matrix is that of the embeddings.
_QWEN2 = {
    "0.5B": (896, 4864, 24, 14, 2, True), "1.5B": (1536, 8960, 28, 12, 2, True),
    "3B": (2048, 11008, 36, 16, 2, True), "7B": (3584, 18944, 28, 28, 4, False),
    "14B": (5120, 13824, 48, 40, 8, False), "32B": (5120, 27648, 64, 40, 8, False),
    "72B": (8192, 29568, 80, 64, 8, False)}
_QWEN3 = {
    "0.6B": (1024, 3072, 28, 16, 8, True), "1.7B": (2048, 6144, 28, 16, 8, True),
    "4B": (2560, 9728, 36, 32, 8, True), "8B": (4096, 12288, 36, 32, 8, False),
    "14B": (5120, 17408, 40, 40, 8, False), "32B": (5120, 25600, 64, 64, 8, False)}
_LLAMA = {
    "3.2-1B": (2048, 8192, 16, 32, 8, True), "3.2-3B": (3072, 8192, 28, 24, 8, True),
    "3.1-8B": (4096, 14336, 32, 32, 8, False), "3.1-70B": (8192, 28672, 80, 64, 8, False)}
_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "tie_word_embeddings")


def _sizes() -> dict[str, tuple[str, dict[str, Any]]]:
    """Class of the configuration and its arguments, by hub id without what it was tuned for."""
    found = {"embedded": ("Qwen2Config", dict(zip(_KEYS, (128, 256, 2, 4, 2, True), strict=True),
                                              vocab_size=258, max_position_embeddings=2048))}
    for name, sizes in _QWEN2.items():
        found[f"Qwen/Qwen2.5-{name}"] = ("Qwen2Config", dict(
            zip(_KEYS, sizes, strict=True), max_position_embeddings=32_768,
            vocab_size=151_936 if sizes[-1] else 152_064))
    for name, sizes in _QWEN3.items():
        found[f"Qwen/Qwen3-{name}"] = ("Qwen3Config", dict(
            zip(_KEYS, sizes, strict=True), max_position_embeddings=40_960, head_dim=128,
            vocab_size=151_936))
    for name, sizes in _LLAMA.items():
        found[f"meta-llama/Llama-{name}"] = ("LlamaConfig", dict(
            zip(_KEYS, sizes, strict=True), max_position_embeddings=131_072, vocab_size=128_256,
            head_dim=64 if name == "3.2-1B" else 128))
    return found


SIZES = _sizes()


def shape_folder(name: str, folder: Path) -> str:
    """Where the ``config.json`` of a model is: its folder, one that is written into ``folder``, or
    its hub id.

    Raises:
        ConfigError: if it is in none of these places.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"model.name={name}: there is no config.json in that folder; give a "
                              "folder with one, or a hub id")
        return str(path)
    known = SIZES.get(re.sub("-(Instruct|Base)(-2507)?$", "", name))
    if known is None:
        look_for(name, key="model.name")
        return name
    import transformers

    getattr(transformers, known[0])(**known[1]).save_pretrained(folder)
    return str(folder)
