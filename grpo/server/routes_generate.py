"""Health and ``/generate``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from grpo.server.api import GenerateRequest, Prompt, SamplingFields
from grpo.server.generation import Answer, Generation, Position, Sample
from grpo.system.json_api import ApiError, json_response, read_body

Result = TypeVar("Result")
_LONG_TEXT = 20_000  # characters, which take some milliseconds to tokenize
router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the engine lives; does not wait for anything."""
    request.app.state.versioned.require_alive()
    return json_response({"status": "ok"})


@router.get("/health_generate")
async def health_generate(
    request: Request, timeout: float = Query(30.0, gt=0, le=3600, allow_inf_nan=False)
) -> Response:
    """Sample one token, within ``timeout`` seconds."""
    generation: Generation = request.app.state.generation
    if request.app.state.versioned.paused:
        raise ApiError("the engine is paused; POST /bridge/resume first", status=503,
                       type="paused")
    params = generation.parameters(SamplingFields(max_tokens=1, temperature=0.0), row=0,
                                   streamed=False, logprobs=None, text=False)
    await before(generation.answer([0], params, model=None), timeout, "one token to be sampled")
    return json_response({"status": "ok"})


@router.post("/generate")
async def generate(request: Request) -> Response:
    """Sample from one prompt or a list of them; see :class:`~grpo.server.api.GenerateRequest`.

    One prompt is answered by ``prompt_token_ids``, ``token_ids``, ``finish_reasons``,
    ``policy_version``, the texts ``prompt`` and ``text`` unless ``return_text`` is false, and, if
    asked, ``logprobs`` and ``prompt_logprobs``; a list by ``results`` with one such object a
    prompt. Log-probs are those of the distribution that
    was sampled; ``altered_by`` names the options that make it another one than
    softmax(logits / temperature). ``stream`` answers in pieces, one JSON object a line, or as
    events if the client accepts ``text/event-stream``; ``"stream": "answers"`` sends each prompt's
    object once, with its ``prompt_index``, when it is complete.
    """
    body = await read_body(request, GenerateRequest)
    generation: Generation = request.app.state.generation
    request.app.state.versioned.adapter_named(body.model)
    prompts, several = body.prompts()
    token_ids = await token_ids_of(generation, prompts, several)
    parameters = [
        generation.parameters(body, row=row, streamed=body.stream is True, logprobs=body.logprobs,
                              prompt_logprobs=body.prompt_logprobs, text=body.return_text)
        for row in range(len(prompts))]
    if body.stream == "answers":
        finished = generation.finished_answers(token_ids, parameters, model=body.model)
        return stream_json(request, (
            {"prompt_index": row, **_result(body, prompts[row], answer, generation)}
            async for row, answer in finished))
    if body.stream:
        pieces = generation.all_pieces(token_ids, parameters, model=body.model)
        return stream_json(request, (_piece(body, row, piece) async for row, piece in pieces))
    answers = await while_connected(
        request, generation.answers(token_ids, parameters, model=body.model))
    results = [_result(body, prompt, answer, generation)
               for prompt, answer in zip(prompts, answers, strict=True)]
    return json_response({"results": results} if several else results[0])


def _result(
    body: GenerateRequest, prompt: Any, answer: Answer, generation: Generation
) -> dict[str, Any]:
    samples = answer.samples
    result: dict[str, Any] = {
        "prompt_token_ids": answer.prompt_token_ids,
        "token_ids": [sample.token_ids for sample in samples],
        "finish_reasons": [sample.finish_reason for sample in samples],
        "policy_version": [sample.versions for sample in samples],
        "altered_by": body.altered_by(),
    }
    if body.return_text:
        result["prompt"] = generation.text_of(prompt, answer.prompt_token_ids)
        result["text"] = [sample.text for sample in samples]
    if body.logprobs is not None:
        result["logprobs"] = [_logprobs(body, sample) for sample in samples]
    if answer.prompt_positions is not None:
        result["prompt_logprobs"] = [position and _entry(position)
                                     for position in answer.prompt_positions]
    return result


def _piece(body: GenerateRequest, row: int, piece: Sample) -> dict[str, Any]:
    value: dict[str, Any] = {
        "prompt_index": row, "index": piece.index, "token_ids": piece.token_ids,
        "finish_reason": piece.finish_reason, "policy_version": piece.versions}
    if body.return_text:
        value["text"] = piece.text
    if body.logprobs is not None:
        value["logprobs"] = _logprobs(body, piece)
    return value


def _logprobs(body: GenerateRequest, sample: Sample) -> list[Any]:
    """One number a token, or Atropos' form: one list with one object a token."""
    if body.flat_logprobs:
        return sample.log_probs()
    return [[_entry(position)] for position in sample.positions]


def _entry(position: Position) -> dict[str, float]:
    return {str(token): value for token, value in position.items()}


def stream_json(
    request: Request, values: AsyncIterator[dict[str, Any]], *, events: bool | None = None,
    last: bytes = b"",
) -> StreamingResponse:
    """Send JSON objects as they come: as events if the client accepts them, else one a line.

    Args:
        request: whose ``Accept`` header decides, unless ``events`` is given.
        values: what to send. An error on the way, the engine's death too, is sent as an object
            with the reason: the head of the answer has left by then, and its status with it.
        events: True for server-sent events.
        last: sent after the values, or the error.

    Raises:
        ApiError: 503 if the engine has died already.
    """
    request.app.state.versioned.require_alive()
    if events is None:
        events = "text/event-stream" in request.headers.get("accept", "")
    prefix, suffix = (b"data: ", b"\n\n") if events else (b"", b"\n")

    async def lines() -> AsyncIterator[bytes]:
        try:
            async for value in values:
                yield prefix + orjson.dumps(value) + suffix
        except ApiError as error:
            yield prefix + error.response().body + suffix
        except Exception as error:  # whatever it is, the application says it of other answers too
            response = await request.app.exception_handlers[Exception](request, error)
            yield prefix + response.body + suffix
        finally:
            await values.aclose()
        yield last

    return StreamingResponse(lines(), media_type="text/event-stream" if events
                             else "application/x-ndjson")


async def while_connected(request: Request, work: Awaitable[Result]) -> Result:
    """The result of ``work``, which is cancelled if the client goes away first."""
    task = asyncio.ensure_future(work)
    # The body has been read, so the next message can only be the client's leave.
    leave = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({task, leave}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError("the client went away", status=499, type="client_closed")
        return task.result()
    finally:
        for one in (task, leave):
            one.cancel()
        await asyncio.gather(task, leave, return_exceptions=True)


async def token_ids_of(
    generation: Generation, prompts: list[Prompt], several: bool
) -> list[list[int]]:
    """Token ids of a request's prompts; long texts do not hold up other requests."""
    texts = sum(len(str(prompt)) for prompt in prompts if not isinstance(prompt, list))
    if texts < _LONG_TEXT:
        return generation.all_token_ids(prompts, several)
    return await asyncio.to_thread(generation.all_token_ids, prompts, several)


async def before(
    work: Awaitable[Result], timeout: float, what: str,
    advice: str = "give it more time with timeout, or see the server's log",
) -> Result:
    """The result of ``work``, or a 504 that says what was waited for."""
    try:
        return await asyncio.wait_for(work, timeout)
    except TimeoutError:
        raise ApiError(f"waited {timeout:g} s for {what}; {advice}", status=504,
                       type="timeout") from None
