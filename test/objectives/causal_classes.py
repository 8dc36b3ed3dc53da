"""Tiny random models of the causal classes of Transformers, from its own registry."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 97
_MOST_PARAMETERS = 3_000_000

# Set where a configuration has the field. Random weights are wide enough for logits of about 1.
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.2}

_LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8,
           "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
           "v_head_dim": 8, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1,
           "n_shared_experts": 1, "first_k_dense_replace": 1}
_INDEXED = {**_LATENT, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 4}
_SEQ2SEQ = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
            "init_std": 0.2}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1,
           "mamba_expand": 2, "mamba_chunk_size": 8}
_GPT = {"n_positions": 64, "n_ctx": 64, "n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4}
_DECODER = {"is_decoder": True}
_GEMMA4 = {**_SLIDING, "global_head_dim": 8, "num_kv_shared_layers": 0,
           "hidden_size_per_layer_input": 0, "final_logit_softcapping": 5.0, "head_dim": None}

#: What sets a class apart from the common sizes; None leaves a field at its default. Caps and
#: scales are stronger than in published models, so that no class is right by having none.
_OPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu",
                     "longcat_flash", "minicpm3"), _LATENT),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _INDEXED),
    **dict.fromkeys(("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart",
                     "mvp", "pegasus", "plbart", "whisper"), _SEQ2SEQ),
    **dict.fromkeys(("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra",
                     "ernie", "megatron-bert", "rembert", "roberta", "roberta-prelayernorm",
                     "roformer", "xlm-roberta", "xlm-roberta-xl"), _DECODER),
    **dict.fromkeys(("codegen", "gptj"), _GPT),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _GEMMA4),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
                    {**_LINEAR, "linear_num_value_heads": 4,
                     "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1}),
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {**_SLIDING, "logit_scale": 0.5, "sliding_window": 4},
    "cpmant": {"prompt_length": 4, "dim_head": 8, "dim_ff": 48, "init_std": 0.2},
    "ctrl": {"dff": 48},
    "dots1": {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "falcon": {"head_dim": None},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 64, "lm_head_multiplier": 0.3},
    "falcon_mamba": {"state_size": 8},
    "gemma2": {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 0.1},
    "gemma3n_text": {**_SLIDING, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8,
                     "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 8,
                     "altup_num_inputs": 2, "intermediate_size": [48, 48],
                     "activation_sparsity_pattern": [0.0, 0.0], "final_logit_softcapping": 5.0},
    "gemma4": {"text_config": {**_SIZES, **_GEMMA4, "head_dim": 8}},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4},
    "granite": {"logits_scaling": 4.0},
    "granitemoehybrid": {**_MAMBA2, "layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
              "expert_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
              "use_mamba_kernels": False},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_text": {"attention_chunk_size": 4, "intermediate_size_mlp": 48},
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "moshi": {"ffn_dim": 48},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1,
                   "chunk_size": 8, "layers_block_type": ["mamba", "attention"]},
    "olmo_hybrid": _LINEAR,
    "prophetnet": {"num_hidden_layers": None, "num_encoder_layers": 2, "num_decoder_layers": 2,
                   "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
                   "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "is_decoder": True,
                   "add_cross_attention": False, "init_std": 0.2},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 64,
                        "lru_width": 32, "logits_soft_cap": 5.0},
    "reformer": {"is_decoder": True, "attn_layers": ["local", "local"], "axial_pos_embds": False},
    "xlm": {"causal": True, "emb_dim": 32},
    "xlnet": {"max_position_embeddings": None, "d_model": 32, "n_layer": 2, "n_head": 4,
              "d_inner": 48},
    "xlstm": {"hidden_size": 64, "num_heads": 4, "num_blocks": 2, "qk_dim_factor": 1.0,
              "head_dim": None, "output_logit_soft_cap": 5.0},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "zamba": {"layers_block_type": ["hybrid", "mamba", "mamba", "hybrid"], "num_hidden_layers": 4,
              "mamba_d_state": 8, "mamba_dt_rank": 4, "n_mamba_heads": 2,
              "use_mamba_kernels": False},
    "zamba2": {"layer_types": ["mamba", "hybrid"], "layers_block_type": ["mamba", "hybrid"],
               "n_mamba_heads": 4, "mamba_headdim": 16, "mamba_d_state": 8, "mamba_ngroups": 1,
               "chunk_size": 8, "num_mem_blocks": 1, "adapter_rank": 4},
    "zaya": {"num_experts_per_tok": 1},
}

#: Classes that the common sizes do not make small, and why.
NOT_TRIED = {
    "of text with images or sound, whose other parts stay large": {
        "emu3", "gemma3", "gemma3n", "gemma4_unified", "git", "got_ocr2", "llama4", "mllama",
        "musicgen", "musicgen_melody", "phi4_multimodal", "qwen3_5", "qwen3_5_moe", "qwen4_exp"},
    "drafters that need another model's states": {"gemma4_assistant", "gemma4_unified_assistant"},
    "with tables or caches of a fixed size": {"blt", "hy_v4", "kimi_linear", "roc_bert"},
    "whose defaults do not build": {"cohere_compass_text", "dbrx", "qwen4_exp_text"},
}


def names() -> list[str]:
    """Model types with a causal class that is tried here."""
    left_out = set().union(*NOT_TRIED.values())
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in left_out]


def make_class(name: str, *, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """The random model of a model type, norms and biases included.

    Args:
        name: as in ``config.json``.
        dtype: of the weights.
        options: fields of the configuration, before all others.

    Raises:
        ValueError: if it is not tiny.
    """
    kind = CONFIG_MAPPING[name]
    own = {**_OPTIONS.get(name, {}), **options}
    fields = {key: value for key, value in _SIZES.items()
              if key not in own and hasattr(kind(), key)}
    fields |= {key: value for key, value in own.items() if value is not None}
    config = kind(**fields)
    with torch.device("meta"):
        size = sum(param.numel() for param in AutoModelForCausalLM.from_config(config).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"{name} has {size:,} parameters; make it smaller in _OPTIONS, or name it "
                         "in NOT_TRIED")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:  # otherwise all zero or all one, as if it were not there
                param.add_(0.1 * torch.randn_like(param))
    return model
