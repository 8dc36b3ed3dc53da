"""What tests of the memory of runs share."""

from __future__ import annotations

import pytest
import torch

from .memory_probe import family
from .test_ledger import BIG


@pytest.fixture(scope="session")
def big_folder(tmp_path_factory) -> str:
    """The configuration of Qwen2.5-1.5B."""
    path = tmp_path_factory.mktemp("shape")
    family("Qwen2Config", **BIG, max_position_embeddings=32_768).save_pretrained(path)
    return str(path)


@pytest.fixture
def small_folder(tmp_path, tokenizer, make_model):
    folder = tmp_path / "model"
    make_model(dtype=torch.float32, vocab_size=len(tokenizer), initializer_range=0.05,
               max_position_embeddings=64).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
