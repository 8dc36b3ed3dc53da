"""Token ids of plain text, as a model is used to seeing it begin."""

from __future__ import annotations

from typing import Any

_PROBE = "a"  # any text without special tokens would do


def text_tokens(text: str, tokenizer: Any) -> list[int]:
    """Token ids of a text that the model is to continue.

    The tokens that the tokenizer puts before a text, such as ``<s>`` or ``<|begin_of_text|>``, are
    added, as vLLM and Transformers do: a model that was trained with them answers differently
    without. A text that already begins with them does not get them twice. Those that a tokenizer
    appends, such as ``</s>``, are not: they would tell the model that the text is over.

    A text that a chat template has rendered brings its own special tokens, and is tokenized with
    ``add_special_tokens=False`` instead.

    Raises:
        ValueError: if the tokenizer's special tokens are not a prefix and a suffix of the text's.

    Examples:
        >>> from grpo.envs.embedded import byte_tokenizer
        >>> text_tokens("1+2=", byte_tokenizer())  # it adds nothing
        [18, 12, 19, 30]
    """
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    before = tokens_before(tokenizer)
    return tokens if tokens[: len(before)] == before else before + tokens


def tokens_before(tokenizer: Any) -> list[int]:
    """What a tokenizer puts before every text.

    Raises:
        ValueError: see :func:`text_tokens`.
    """
    probe = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    whole = tokenizer(_PROBE)["input_ids"]
    for start in range(len(whole)):
        if whole[start : start + len(probe)] == probe:
            return whole[:start]
    raise ValueError(f"the tokenizer makes {whole} of {_PROBE!r} and {probe} of it without special "
                     "tokens, so what it puts before a text is unknown; use chat messages, or give "
                     "token ids")
