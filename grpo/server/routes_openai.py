"""OpenAI's completions and chat completions, with token ids and policy versions besides."""

from __future__ import annotations

import asyncio
import inspect
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import jinja2
from fastapi import APIRouter, Request, Response

from grpo.server.api import ChatRequest, CompletionRequest
from grpo.server.generation import Answer, Generation, Sample
from grpo.server.request_template import render_apart
from grpo.server.routes_generate import before, stream_json, token_ids_of, while_connected
from grpo.system.json_api import ApiError, json_response, read_body

router = APIRouter()
_RENDER_SECONDS = 20.0  # for the model's own template, and for tokenizing what it makes
# Of what `apply_chat_template` is asked, this is the request's; the rest is how it does its work.
_TEMPLATE_OPTIONS = ("tools", "documents")
# What a template does not expect: in its own words, in Python's, or in the tokenizer's.
_REFUSALS = (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError,
             ArithmeticError, RecursionError)
Choice = Callable[[int, Sample], dict[str, Any]]


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The model, and the LoRA adapters that requests can name."""
    versioned = request.app.state.versioned
    length = request.app.state.generation.max_model_len
    names = [(versioned.model_names[0], None)]
    names += [(name, versioned.model_names[0]) for name in versioned.adapters]
    return json_response({"object": "list", "data": [
        {"id": name, "object": "model", "owned_by": "grpo", "parent": parent,
         "max_model_len": length} for name, parent in names]})


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """OpenAI's completions; choice ``row * n + i`` is sample ``i`` of prompt ``row``."""
    body = await read_body(request, CompletionRequest)
    generation: Generation = request.app.state.generation
    prompts = await token_ids_of(generation, *body.prompts())
    parameters = [generation.parameters(body, row=row, streamed=body.stream,
                                        logprobs=body.logprobs) for row in range(len(prompts))]

    said: Counter[int] = Counter()  # characters of each choice, in the pieces before

    def choice(row: int, sample: Sample) -> dict[str, Any]:
        index = row * body.n + sample.index
        logprobs = _completion_logprobs(sample, generation.tokenizer, said[index])
        said[index] += len(sample.text)
        return {"index": index, "text": sample.text, "logprobs": logprobs,
                **_common(sample, None if body.stream else prompts[row])}

    return await _respond(request, body, prompts, parameters, "cmpl", "text_completion",
                          "text_completion", choice)


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """OpenAI's chat completions; the prompt is rendered with the model's chat template.

    One that comes with the request (``chat_template_kwargs.chat_template``) is refused, unless the
    server was started to run such ones apart (:mod:`grpo.server.request_template`).
    """
    body = await read_body(request, ChatRequest)
    generation: Generation = request.app.state.generation
    prompt = generation.token_ids(
        await _render(body, generation.tokenizer,
                      trusted=getattr(request.app.state, "trust_templates", False)),
        where="messages")
    parameters = [generation.parameters(
        body, row=0, streamed=body.stream, logprobs=body.top_logprobs if body.logprobs else None)]
    kind = "delta" if body.stream else "message"

    def choice(row: int, sample: Sample) -> dict[str, Any]:
        return {"index": sample.index, kind: {"role": "assistant", "content": sample.text},
                "logprobs": _chat_logprobs(sample, generation.tokenizer, body.top_logprobs),
                **_common(sample, None if body.stream else prompt)}

    return await _respond(request, body, [prompt], parameters, "chatcmpl", "chat.completion",
                          "chat.completion.chunk", choice)


async def _render(body: ChatRequest, tokenizer: Any, *, trusted: bool) -> list[int]:
    own = body.chat_template_kwargs
    template = own.get("chat_template")
    if template is not None and not trusted:
        raise ApiError("chat_template comes with the request, and a template is a program; start "
                       "the engine server with --trust-request-chat-template to run those of "
                       "strangers, or leave it out", status=403, type="forbidden",
                       param="chat_template_kwargs")
    reserved = sorted(own.keys() & _reserved(tokenizer))
    if reserved:
        raise ApiError(f"chat_template_kwargs.{reserved[0]} is not the request's to choose; leave "
                       "it out", param="chat_template_kwargs")
    try:
        if template is not None:
            return await _render_own(body, tokenizer)
        return await before(asyncio.to_thread(_render_models, body, tokenizer), _RENDER_SECONDS,
                            "the chat template", advice="send fewer or shorter messages")
    except _REFUSALS as error:
        raise ApiError(f"the chat template refuses these messages: {error}",
                       param="messages") from error


def _reserved(tokenizer: Any) -> set[str]:
    names = set(inspect.signature(tokenizer.apply_chat_template).parameters)
    return names - {"chat_template", "kwargs", "options", *_TEMPLATE_OPTIONS}


async def _render_own(body: ChatRequest, tokenizer: Any) -> list[int]:
    """With the template of the request."""
    own = dict(body.chat_template_kwargs)
    template = own.pop("chat_template")
    if not isinstance(template, str):
        raise ApiError("chat_template_kwargs.chat_template must be a text",
                       param="chat_template_kwargs")
    if body.continue_final_message:
        raise ApiError("continue_final_message needs the model's own template; leave one of the "
                       "two out", param="continue_final_message")
    text = await render_apart(template, {
        **tokenizer.special_tokens_map, **own, "messages": body.messages,
        "add_generation_prompt": body.add_generation_prompt})
    return await asyncio.to_thread(
        lambda: list(tokenizer(text, add_special_tokens=False)["input_ids"]))


def _render_models(body: ChatRequest, tokenizer: Any) -> list[int]:
    """With the model's template."""
    if not getattr(tokenizer, "chat_template", None):
        raise ApiError("the model's tokenizer has no chat template; POST a text to "
                       "/v1/completions instead", param="messages")
    return list(tokenizer.apply_chat_template(
        body.messages, tokenize=True, return_dict=False,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message, **body.chat_template_kwargs))


async def _respond(
    request: Request, body: Any, prompts: list[list[int]], parameters: list[Any], prefix: str,
    kind: str, piece_kind: str, choice: Choice,
) -> Response:
    versioned = request.app.state.versioned
    generation: Generation = request.app.state.generation
    adapter = versioned.adapter_named(body.model)
    head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()),
            "model": body.model or (adapter.name if adapter else versioned.model_names[0])}
    if body.stream:
        async def pieces() -> AsyncIterator[dict[str, Any]]:
            async for row, piece in generation.all_pieces(prompts, parameters, model=body.model):
                yield {**head, "object": piece_kind, "choices": [choice(row, piece)]}

        return stream_json(request, pieces(), events=True, last=b"data: [DONE]\n\n")
    answers = await while_connected(
        request, generation.answers(prompts, parameters, model=body.model))
    choices = [choice(row, sample) for row, answer in enumerate(answers)
               for sample in answer.samples]
    return json_response({**head, "object": kind, "choices": choices, "usage": _usage(answers),
                          "altered_by": body.altered_by()})


def _common(sample: Sample, prompt: list[int] | None) -> dict[str, Any]:
    common: dict[str, Any] = {"finish_reason": sample.finish_reason, "token_ids": sample.token_ids,
                              "policy_version": sample.versions}
    if prompt is not None:
        common["prompt_token_ids"] = prompt
    return common


def _usage(answers: list[Answer]) -> dict[str, int]:
    prompt = sum(len(answer.prompt_token_ids) for answer in answers)
    sampled = sum(len(sample.token_ids) for answer in answers for sample in answer.samples)
    return {"prompt_tokens": prompt, "completion_tokens": sampled,
            "total_tokens": prompt + sampled}


def _completion_logprobs(sample: Sample, tokenizer: Any, offset: int) -> dict[str, Any] | None:
    if sample.positions is None:
        return None
    tokens = [tokenizer.decode([token]) for token in sample.token_ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {"tokens": tokens, "token_logprobs": sample.log_probs(), "text_offset": offsets,
            "top_logprobs": [{tokenizer.decode([token]): value for token, value in
                              position.items()} for position in sample.positions]}


def _chat_logprobs(sample: Sample, tokenizer: Any, top: int) -> dict[str, Any] | None:
    if sample.positions is None:
        return None

    def entry(token: int, value: float) -> dict[str, Any]:
        text = tokenizer.decode([token])
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    content = []
    for position in sample.positions:
        entries = [entry(token, value) for token, value in position.items()]
        best = sorted(entries, key=lambda one: -one["logprob"])[:top]
        content.append({**entries[0], "top_logprobs": best})
    return {"content": content}
