"""OpenAI's completions and chat completions, with token ids and policy versions besides."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import jinja2
from fastapi import APIRouter, Request, Response

from grpo.engines.api import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    json_response,
    read_body,
)
from grpo.engines.generation import Answer, Generation, Sample
from grpo.engines.routes_generate import stream_json, while_connected

router = APIRouter()
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
    prompts = generation.all_token_ids(*body.prompts())
    parameters = [generation.parameters(body, row=row, streamed=body.stream,
                                        logprobs=body.logprobs) for row in range(len(prompts))]

    def choice(row: int, sample: Sample) -> dict[str, Any]:
        return {"index": row * body.n + sample.index, "text": sample.text,
                "logprobs": _completion_logprobs(sample, generation.tokenizer),
                **_common(sample, None if body.stream else prompts[row])}

    return await _respond(request, body, prompts, parameters, "cmpl", "text_completion",
                          "text_completion", choice)


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """OpenAI's chat completions; the prompt is rendered with the model's chat template."""
    body = await read_body(request, ChatRequest)
    generation: Generation = request.app.state.generation
    prompt = generation.token_ids(_render(body, generation.tokenizer), where="messages")
    parameters = [generation.parameters(
        body, row=0, streamed=body.stream, logprobs=body.top_logprobs if body.logprobs else None)]
    kind = "delta" if body.stream else "message"

    def choice(row: int, sample: Sample) -> dict[str, Any]:
        return {"index": sample.index, kind: {"role": "assistant", "content": sample.text},
                "logprobs": _chat_logprobs(sample, generation.tokenizer, body.top_logprobs),
                **_common(sample, None if body.stream else prompt)}

    return await _respond(request, body, [prompt], parameters, "chatcmpl", "chat.completion",
                          "chat.completion.chunk", choice)


def _render(body: ChatRequest, tokenizer: Any) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise ApiError("the model's tokenizer has no chat template; POST a text to "
                       "/v1/completions instead", param="messages")
    try:
        return list(tokenizer.apply_chat_template(
            body.messages, tokenize=True, return_dict=False,
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message, **body.chat_template_kwargs))
    except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
        raise ApiError(f"the chat template refuses these messages: {error}",
                       param="messages") from error


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


def _completion_logprobs(sample: Sample, tokenizer: Any) -> dict[str, Any] | None:
    if sample.positions is None:
        return None
    tokens = [tokenizer.decode([token]) for token in sample.token_ids]
    offsets, offset = [], 0
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
