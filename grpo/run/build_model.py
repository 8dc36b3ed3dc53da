"""From the configuration to the trainer's model: loaded, with adapters, ready to be trained."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn, set_num_threads  # kept, because vLLM for CPUs puts another in its place

from grpo.config.schema import Config, ConfigError
from grpo.objectives.agreement import say_once, why_not_capped
from grpo.weights.adapters import load_adapter, make_lora

# Up to this width one thread of a CPU is done with a layer before two have met at its end.
_NARROW = 128
_ALL_THREADS = torch.get_num_threads()


def load_model(path: str, config: Config, *, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A Hugging Face causal language model in ``dtype`` on ``device``.

    Raises:
        ConfigError: for an ``attn_implementation`` that does not compute the model's attention.
    """
    from transformers import AutoModelForCausalLM

    chosen = config.train_model.attn_implementation
    model = AutoModelForCausalLM.from_pretrained(
        os.path.expanduser(path), dtype=dtype, attn_implementation=chosen).to(device)
    if reason := why_not_capped(model):
        if chosen is not None:
            raise ConfigError(f"train_model.attn_implementation={chosen}: {reason}; remove the "
                              "key, or set it to eager")
        say_once(f"train_model.attn_implementation=eager is taken: {reason}")
        model.set_attn_implementation("eager")
    return model


def prepare_model(model: nn.Module, config: Config, *, adapter: Path | None = None) -> None:
    """Training mode, gradient checkpointing, compiled layers and adapters, as configured; threads
    as suit the model's width. ``adapter`` is the folder of adapters to go on with.

    The process's random numbers start here from ``train.seed``: what new adapters and dropout draw
    must not depend on what was drawn to make or find the model.
    """
    from transformers import set_seed

    options = config.train_model
    set_seed(config.train.seed)
    if "OMP_NUM_THREADS" not in os.environ:
        set_num_threads(_threads(model, config))
    model.train()
    model.requires_grad_(True)
    switch_dropout_off(model)
    if options.layer_indices is not None:
        _train_only_layers(model, options.layer_indices)
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if options.lora.enabled:
        make_lora(model, **options.lora.options())
        if adapter is not None:
            load_adapter(model, adapter)
    if options.compile:
        layers = getattr(model.base_model, "layers", None)
        if layers is None:
            raise ConfigError(f"train_model.compile=true: {type(model).__name__} has no list of "
                              "decoder layers to compile; set it to false")
        for layer in layers:  # dynamic at once: a static graph first would be compiled in vain
            layer.forward = torch.compile(layer.forward, dynamic=True)


def _threads(model: nn.Module, config: Config) -> int:
    """Threads of a CPU that suit what it computes."""
    if config.device != "cpu" and torch.cuda.is_available():
        # Small tensors, for which threads would only be woken, and waited for.
        return _ALL_THREADS if config.optimizer.name == "adamw_cpu" else 1
    width = getattr(model.config.get_text_config(), "hidden_size", math.inf)
    return 1 if width <= _NARROW else _ALL_THREADS


def _train_only_layers(model: nn.Module, indices: list[int]) -> None:
    """Freeze everything but some decoder layers."""
    layers = getattr(model.base_model, "layers", None)
    if layers is None:
        raise ConfigError(f"train_model.layer_indices={indices}: {type(model).__name__} has no "
                          "list of decoder layers to choose from; remove it")
    if wrong := [i for i in indices if i >= len(layers)]:
        raise ConfigError(f"train_model.layer_indices: {wrong} are not among the model's layers 0 "
                          f"to {len(layers) - 1}")
    model.requires_grad_(False)
    for index in indices:
        layers[index].requires_grad_(True)


def switch_dropout_off(model: nn.Module) -> None:
    """The engine samples without dropout, so with it on-policy ratios would not be 1."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):  # of functions, layers, experts
                setattr(module, name, 0.0)


def eos_token_ids(path: str, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a response: the tokenizer's, and those of the generation configuration."""
    from transformers import AutoConfig, GenerationConfig

    ids = {tokenizer.eos_token_id}
    try:
        source = GenerationConfig.from_pretrained(path)
    except OSError:  # models without that file
        source = AutoConfig.from_pretrained(path)
    more = source.eos_token_id
    ids |= set(more) if isinstance(more, list) else {more}
    return tuple(sorted(i for i in ids if i is not None))
