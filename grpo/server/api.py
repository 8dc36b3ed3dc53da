"""What the engine server reads: request models and their checks."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from grpo.policies.neutral import altering
from grpo.system.json_api import ApiError, Body

Prompt = str | list[int] | dict[str, Any]
# JSON has no infinity. OpenAI's format writes this for a token that cannot be sampled.
IMPOSSIBLE = -9999.0


class SamplingFields(Body):
    """How tokens are drawn; names and neutral values are vLLM's."""

    n: int = Field(1, ge=1, le=4096)
    max_tokens: int | None = Field(16, ge=1)
    min_tokens: int = Field(0, ge=0)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0)
    seed: int | None = Field(None, ge=0, lt=2**62)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None

    def altered_by(self) -> list[str]:
        """Fields that make the sampled distribution another one than softmax(logits / T)."""
        return altering(dict(self))

    def sampling_options(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's ``SamplingParams``."""
        options = {name: getattr(self, name) for name in SamplingFields.model_fields}
        if self.logit_bias is not None:
            try:
                options["logit_bias"] = {int(k): v for k, v in self.logit_bias.items()}
            except ValueError:
                raise ApiError(f"logit_bias has keys {list(self.logit_bias)}; they must be token "
                               "ids", param="logit_bias") from None
        return options


class GenerateRequest(SamplingFields):
    """``POST /generate``.

    ``prompt`` is a text, a list of token ids, ``{"prompt_token_ids": [...]}``, or a list of these;
    ``prompt_token_ids`` is one list of token ids or several.
    """

    prompt: str | dict[str, Any] | list[Any] | None = None
    prompt_token_ids: list[int] | list[list[int]] | None = None
    logprobs: int | None = Field(None, ge=0)
    prompt_logprobs: int | None = Field(None, ge=0)
    flat_logprobs: bool = False
    return_text: bool = True
    stream: bool | Literal["answers"] = False
    model: str | None = None

    @model_validator(mode="after")
    def _check(self) -> GenerateRequest:
        if (self.prompt is None) == (self.prompt_token_ids is None):
            raise ValueError("give exactly one of prompt and prompt_token_ids")
        if self.flat_logprobs and self.logprobs != 0:
            raise ValueError("flat_logprobs=true returns the sampled token's log-prob alone: it "
                             "needs logprobs=0")
        if self.stream is True and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs come with the whole answer: set stream=false")
        if not self.return_text and self.stop:
            raise ValueError("stop needs the text: set return_text=true, or use stop_token_ids")
        return self

    def prompts(self) -> tuple[list[Prompt], bool]:
        """The prompts, and whether the request was for a list of them."""
        if self.prompt_token_ids is not None:
            return one_or_many(self.prompt_token_ids)
        return one_or_many(self.prompt)


class _OpenAIFields(SamplingFields):
    # `user` names the caller for accounting; it cannot change an answer.
    model: str | None = None
    stream: bool = False
    user: str | None = None


class CompletionRequest(_OpenAIFields):
    """``POST /v1/completions``."""

    prompt: str | list[Any]
    logprobs: int | None = Field(None, ge=0)
    echo: Literal[False] = False

    def prompts(self) -> tuple[list[Prompt], bool]:
        return one_or_many(self.prompt)


class ChatRequest(_OpenAIFields):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if self.max_completion_tokens is not None:
            if self.max_tokens is not None:
                raise ValueError("max_completion_tokens and max_tokens are the same limit; give "
                                 "one of them")
            self.max_tokens = self.max_completion_tokens
        return self


class PauseRequest(Body):
    """``POST /bridge/pause``."""

    mode: Literal["keep", "wait", "abort"] = "keep"
    clear_cache: bool = True
    timeout: float = Field(60.0, gt=0)


class SleepRequest(Body):
    """``POST /bridge/sleep``: 0 only pauses, 1 moves the weights to the host, 2 drops them."""

    level: Literal[0, 1, 2] = 1
    timeout: float = Field(60.0, gt=0)


class DeadlineRequest(Body):
    """Body of the calls that take nothing but a deadline, in seconds."""

    timeout: float = Field(60.0, gt=0)


class VersionRequest(Body):
    """``POST /bridge/version``."""

    version: int = Field(ge=0)


class RpcRequest(Body):
    """``POST /bridge/rpc``."""

    method: str
    args: list[Any] = Field(default_factory=list)
    timeout: float = Field(60.0, gt=0)


class LoraLoadRequest(Body):
    """``POST /lora/load``; ``version`` is the policy version of the adapter.

    ``adapter_id`` instead of a folder names an adapter that the workers have in memory already.
    """

    adapter_path: str | None = Field(None, min_length=1)
    adapter_id: int | None = Field(None, ge=1)
    adapter_name: str | None = Field(None, min_length=1)
    version: int | None = Field(None, ge=0)
    timeout: float = Field(60.0, gt=0)

    @model_validator(mode="after")
    def _check(self) -> LoraLoadRequest:
        if (self.adapter_path is None) == (self.adapter_id is None):
            raise ValueError("give exactly one of adapter_path and adapter_id")
        return self


class AdapterNameRequest(Body):
    """``POST /v1/unload_lora_adapter``."""

    lora_name: str = Field(min_length=1)


class AdapterFolderRequest(AdapterNameRequest):
    """``POST /v1/load_lora_adapter``."""

    lora_path: str = Field(min_length=1)


def one_or_many(value: Any) -> tuple[list[Prompt], bool]:
    """Tell one prompt from a list of prompts.

    Examples:
        >>> one_or_many([5, 6])
        ([[5, 6]], False)
        >>> one_or_many([[5], "text"])
        ([[5], 'text'], True)
    """
    if not isinstance(value, list) or (value and all(type(token) is int for token in value)):
        return [value], False
    if not value:
        raise ApiError("prompt is empty; it needs at least one token", param="prompt")
    return value, True
