"""Which sampling options leave the distribution that of the model at a temperature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Option -> its values that change nothing; names and values are vLLM's.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,), "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,), "repetition_penalty": (1.0,), "min_tokens": (0,),
    "logit_bias": ({},), "allowed_token_ids": (), "bad_words": ([],)}


def altering(options: Mapping[str, Any]) -> list[str]:
    """Options that make the sampled distribution another one than softmax(logits / T).

    Args:
        options: of sampling, by name; None stands for what is not set, other names are passed over.

    Examples:
        >>> altering({"temperature": 0.7, "top_p": 0.8, "top_k": -1, "min_p": None})
        ['top_p']
    """
    return [name for name, values in _NEUTRAL.items()
            if options.get(name) is not None and options[name] not in values]
