"""The files of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor


def write_model(model: Any, folder: Path, weights: dict[str, Tensor]) -> None:
    """Write a model's weights, configuration and generation configuration.

    Transformers refuses to save a ``generation_config.json`` that it has read without complaint,
    such as Vicuna's with a ``temperature`` but no ``do_sample``. What a model came with is none of
    the trainer's business, so it is written as it was.

    The weights are whole tensors on the CPU, by the names of the model's ``state_dict()``.
    """
    from transformers import GenerationConfig
    from transformers.utils import GENERATION_CONFIG_NAME

    generation = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(folder, state_dict=weights)
    finally:
        model.generation_config = generation
    generation.to_json_file(folder / GENERATION_CONFIG_NAME)
