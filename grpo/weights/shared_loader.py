"""An engine that is born in the trainer's memory.

The trainer allocates the weights in the engine's layout, and a vLLM model loader maps them in place
of loading a checkpoint, before anything is compiled or captured. The weights then survive a crash
of the engine, and a restarted engine has the current ones at once.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from grpo.weights import layout
from grpo.weights.handover import (
    Handover,
    HandoverError,
    check_match,
    export_tensors,
    map_tensors,
)

#: ``load_format`` under which the loader is registered with vLLM.
LOAD_FORMAT = "grpo_shared"


def own_weights(model: nn.Module, *, name: str) -> tuple[Handover, dict[str, Tensor]]:
    """Move a trainer's parameters into memory that an engine can map as its own.

    The memory needed is twice that of the weights until this returns, then once.

    Args:
        model: a Hugging Face model; its parameters become views into the new memory.
        name: folder or hub id it was loaded from, for messages.

    Returns:
        The handover to write for the engine (each started engine needs a handover of its own on a
        GPU), and the tensors for :class:`~grpo.weights.shared.SharedCopy`.

    Raises:
        LayoutError: if the model's parameters have names without a rule, or are experts.
        HandoverError: if its memory cannot be shared.

    Examples:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> model = Qwen2ForCausalLM(Qwen2Config(
        ...     vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True))
        >>> handover, tensors = own_weights(model, name="tiny")
        >>> tensors["model.layers.0.self_attn.qkv_proj.weight"].shape
        torch.Size([16, 8])
        >>> tensors["model.norm.weight"].data_ptr() == model.model.norm.weight.data_ptr()
        True
    """
    params = dict(model.named_parameters())
    tensors = engine_tensors(params)
    places = layout.engine_layout(params, tensors)
    handover = export_tensors(tensors, model=name, owner="trainer")
    for param_name, param in params.items():
        param.data = layout.view(places[param_name], tensors)
    return handover, tensors


@torch.no_grad()
def engine_tensors(params: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of a trainer's parameters as a vLLM engine stores them: fused, vocabulary padded.

    Args:
        params: Hugging Face names to tensors, tied ones once.

    Examples:
        >>> fused = engine_tensors({"a.gate_proj.weight": torch.zeros(2, 3),
        ...                         "a.up_proj.weight": torch.ones(2, 3),
        ...                         "embed_tokens.weight": torch.ones(5, 3)})
        >>> {name: tuple(tensor.shape) for name, tensor in fused.items()}
        {'a.gate_up_proj.weight': (4, 3), 'embed_tokens.weight': (64, 3)}
    """
    if any(layout.is_experts(name, param) for name, param in params.items()):
        raise layout.LayoutError(
            "weights that the trainer owns before the engine starts are not supported for "
            "mixture-of-experts models, whose tensors vLLM's versions name differently; let the "
            "engine own them, which inference_model.weight_sync=single_copy does")
    tensors: dict[str, Tensor] = {}
    for name, param in params.items():
        fused, parts = _fused_with(name, params)
        if parts and parts[0] == name:
            tensors[fused] = torch.cat([params[part] for part in parts])
        elif not parts:
            rows = -param.shape[0] % layout.VOCABULARY_BLOCK if (
                name.endswith(layout.VOCABULARY)) else 0
            tensors[name] = torch.cat([param, param.new_zeros(rows, *param.shape[1:])])
    return tensors


def _fused_with(name: str, params: dict[str, Tensor]) -> tuple[str, list[str]]:
    """The engine tensor a parameter is fused into, and all parameters in it; none if it is not."""
    path, _, kind = name.rpartition(".")
    prefix, _, module = path.rpartition(".")
    for fused, modules in layout.FUSED.items():
        parts = [f"{prefix}.{part}.{kind}" for part in modules]
        if module in modules and all(part in params for part in parts):
            return f"{prefix}.{fused}.{kind}", parts
    return name, []


def check_handover(path: str | Path, model_path: str, dtype: torch.dtype) -> None:
    """Check that a handover is what an engine of this model will want to map.

    Asked before the engine starts, because what goes wrong in its process is told in its log only.

    Args:
        path: of the handover.
        model_path: folder or hub id of the engine's model; only its configuration is read.
        dtype: of the engine.

    Raises:
        StaleHandoverError: if the trainer that owns the memory is gone.
        HandoverError: if there is no such file, a field of it is wrong, or naming the tensors that
            do not fit.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    handover = Handover.read(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path),
                                                 dtype=dtype)
    check_match(engine_tensors(dict(model.named_parameters())), handover,
                what=f"an engine of {model_path}")


def register_shared_loader() -> None:
    """Teach vLLM ``load_format="grpo_shared"``; every process of the engine must call it.

    The loader reads the path of the handover from ``model_loader_extra_config["handover"]``.
    """
    from vllm.model_executor import model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    if LOAD_FORMAT in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        return

    @model_loader.register_model_loader(LOAD_FORMAT)
    class SharedLoader(BaseModelLoader):
        def download_model(self, model_config) -> None:
            """There is nothing to download: the trainer has the weights."""

        def load_weights(self, model: nn.Module, model_config) -> None:
            adopt(model, self.load_config.model_loader_extra_config["handover"])


def adopt(model: nn.Module, path: str) -> None:
    """Rebind a model's parameters to the memory that a handover describes.

    Args:
        model: with parameters of the handover's names, shapes and dtypes.
        path: of the handover.

    Raises:
        HandoverError: naming the tensors that do not fit.
    """
    handover = Handover.read(path)
    if handover.tensor_parallel_size != 1:
        raise HandoverError(f"{path}: tensor_parallel_size={handover.tensor_parallel_size}, but "
                            "only an engine of one GPU can hold its weights in a trainer's memory")
    params = dict(model.named_parameters())
    check_match(params, handover, what="the engine")
    tensors = map_tensors(handover)
    for name, param in params.items():
        param.data = tensors[name]
