"""Tiny random models of the architectures whose weights the engine can share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

# Not a multiple of the 64 rows to which vLLM pads; the byte tokenizer's size.
VOCABULARY = 258
# Heads of 32 values are the smallest that vLLM's CPU kernels take everywhere.
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "initializer_range": 0.1}
# All heads together are wider than the model.
_WIDE = {"hidden_size": 64, "head_dim": 32}
_LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32}
# Windows shorter than a long prompt; the scale of attention is not that of the head's size.
_GEMMA = {**_WIDE, "tie_word_embeddings": True, "sliding_window": 16, "query_pre_attn_scalar": 20,
          "layer_types": ["sliding_attention", "full_attention"]}

# An inner width that is no multiple of the 32 to which vLLM's own CPU kernel would pad.
_MOE = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2,
        "tie_word_embeddings": False}

#: Name -> what Transformers calls the architecture, and the options that set the model apart.
#: Those with experts come first: a process that has had a dense engine cannot start one of them.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("qwen3_moe", {**_MOE, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen2-moe": ("qwen2_moe", {**_MOE, "shared_expert_intermediate_size": 32}),
    "olmoe": ("olmoe", {**_MOE, "intermediate_size": 48}),
    "mixtral": ("mixtral", {**_MOE, "intermediate_size": 48, "num_local_experts": 8,
                            "sliding_window": None}),
    "llama": ("llama", {"tie_word_embeddings": False, "rope_parameters": _LLAMA3_ROPE}),
    "llama-biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True,
                               "mlp_bias": True}),
    "mistral": ("mistral", {**_WIDE, "tie_word_embeddings": False, "sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**_WIDE, "tie_word_embeddings": False}),
    "qwen3-tied": ("qwen3", {**_WIDE, "tie_word_embeddings": True}),
    "gemma": ("gemma", {**_WIDE, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", _GEMMA),
    "phi3": ("phi3", {"tie_word_embeddings": False}),
}


def make_family(name: str, *, seed: int = 0) -> Any:
    """The random float32 model of ``FAMILIES[name]``, norms and biases included."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, options = FAMILIES[name]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **{**_SIZES, **options}), dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:  # otherwise all zero or all one: two of them could be swapped
                param.add_(0.2 * torch.randn_like(param))
    return model.eval()


def save_family(name: str, folder: Path) -> Path:
    """Write the model with the byte tokenizer; returns ``folder``."""
    from grpo.envs.embedded import byte_tokenizer

    make_family(name).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def load_family(folder: str | Path) -> Any:
    """The saved model in float32, with the attention of Transformers that caps logits (Gemma 2)."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                attn_implementation="eager").eval()
