"""What the engine server reads and how it refuses: request models, their checks, JSON errors."""

from __future__ import annotations

import json
import reprlib
from typing import Any, Literal, TypeVar

import orjson
from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import ClientDisconnect

from grpo.policies.neutral import altering

Prompt = str | list[int] | dict[str, Any]
# JSON has no infinity. OpenAI's format writes this for a token that cannot be sampled.
IMPOSSIBLE = -9999.0


class ApiError(Exception):
    """A request that is answered with a JSON error.

    Args:
        message: what is wrong and how to put it right.
        status: HTTP status.
        type: kind of error, a word for programs.
        param: the field to blame, if there is one.

    Examples:
        >>> error = ApiError("n=0 must be at least 1", param="n")
        >>> error.status, error.body()["error"]["type"]
        (400, 'invalid_request_error')
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.type, self.param = message, status, type, param

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param}}

    def response(self) -> Response:
        response = json_response(self.body(), status=self.status)
        if self.status == 408:  # what comes later of the request is not the next one
            response.headers["Connection"] = "close"
        return response


def json_response(value: Any, *, status: int = 200) -> Response:
    """``value`` as JSON; NaN and infinity never leave the server, so none must be in it.

    What a request said may be repeated in an answer: half of a surrogate pair, which has no UTF-8,
    becomes a question mark, and integers may be of any size.
    """
    try:
        raw = orjson.dumps(value)
    except TypeError:
        raw = json.dumps(value, allow_nan=False, ensure_ascii=False).encode("utf-8", "replace")
    return Response(raw, status_code=status, media_type="application/json")


class Body(BaseModel):
    """A JSON object whose fields are all known and of the right type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


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
    stream: bool = False
    model: str | None = None

    @model_validator(mode="after")
    def _check(self) -> GenerateRequest:
        if (self.prompt is None) == (self.prompt_token_ids is None):
            raise ValueError("give exactly one of prompt and prompt_token_ids")
        if self.flat_logprobs and self.logprobs != 0:
            raise ValueError("flat_logprobs=true returns the sampled token's log-prob alone: it "
                             "needs logprobs=0")
        if self.stream and self.prompt_logprobs is not None:
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


Model = TypeVar("Model", bound=Body)


async def read_body(request: Request, model: type[Model]) -> Model:
    """The request's JSON as ``model``; an empty body stands for ``{}``.

    Raises:
        ApiError: naming the first field that is wrong.
    """
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise ApiError("the client went away", status=499, type="client_closed") from None
    try:
        # Strict JSON: NaN and Infinity, which Python's own parser takes, are refused.
        value = orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(f"the body must be a JSON object, not {type(value).__name__}")
    try:
        return model.model_validate(value)
    except ValidationError as errors:
        error = errors.errors(include_url=False)[0]
    field = str(error["loc"][0]) if error["loc"] else None
    if error["type"] == "extra_forbidden":
        raise ApiError(f"unknown field {field!r}; known are {', '.join(model.model_fields)}",
                       param=field)
    where = f"{field}={shorten(value.get(field))}: " if field and field in value else ""
    where = where or (f"{field}: " if field else "")
    raise ApiError(where + error["msg"].removeprefix("Value error, "), param=field)


def shorten(value: Any, limit: int = 80) -> str:
    """``repr`` of a value for an error message, cut to ``limit`` characters.

    It takes no longer for great or deeply nested values.
    """
    text = _BRIEF.repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxlist, _BRIEF.maxdict = 4, 30, 10
_BRIEF.maxstring = _BRIEF.maxlong = _BRIEF.maxother = 100
