"""A model folder large enough that CUDA graphs and fused kernels are what computes it."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def gpu_folder(tmp_path_factory, tokenizer):
    """A random four-layer Qwen2 in bfloat16."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=512, intermediate_size=1024, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=512,
        tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=None))
    path = tmp_path_factory.mktemp("model")
    model.to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
