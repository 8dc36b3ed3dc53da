"""From a request's prompts and options to tokens, log-probs and policy versions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from grpo.envs.text_tokens import text_tokens
from grpo.policies.spans import Spans
from grpo.server.api import IMPOSSIBLE, Prompt, SamplingFields
from grpo.server.versioned import VersionedEngine
from grpo.system.json_api import ApiError, shorten

# Log-probs of one position: token id -> log-prob, the sampled token first.
Position = dict[int, float]

Item = TypeVar("Item")


@dataclass
class Sample:
    """One sampled continuation, or a piece of it when streaming."""

    index: int  # which of a prompt's `n` samples
    token_ids: list[int]  # the end token included
    text: str  # empty if the request did without
    positions: list[Position] | None  # of the distribution that was sampled; None: not asked for
    finish_reason: str | None  # stop, length or abort; None while the sample goes on
    versions: Spans  # [(policy version, tokens), ...] in order

    def log_probs(self) -> list[float]:
        """Log-prob of each sampled token."""
        return [next(iter(position.values())) for position in self.positions]


@dataclass
class Answer:
    """All samples of one prompt."""

    prompt_token_ids: list[int]
    samples: list[Sample]
    prompt_positions: list[Position | None] | None = None


class Generation:
    """Checks prompts, builds sampling parameters, and collects what the engine returns.

    Args:
        engine: the engine with its policy versions.
        tokenizer: of the model; for prompts that come as text or messages.
        max_model_len: prompt plus response, in tokens.
        vocab_size: token ids are below it.
    """

    def __init__(
        self, engine: VersionedEngine, *, tokenizer: Any, max_model_len: int, vocab_size: int
    ) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.max_model_len, self.vocab_size = max_model_len, vocab_size

    def token_ids(self, prompt: Prompt, *, where: str = "prompt") -> list[int]:
        """Token ids of one prompt in any of its forms.

        Raises:
            ApiError: for an empty or too long prompt, or ids that are not tokens of the model.
        """
        if isinstance(prompt, dict):
            if len(prompt) != 1 or not prompt.keys() <= {"prompt_token_ids", "prompt"}:
                raise ApiError(f"{where} has the keys {sorted(prompt)}; it needs exactly one of "
                               "prompt_token_ids and prompt", param=where)
            (prompt,) = prompt.values()
        if isinstance(prompt, str):
            prompt = text_tokens(prompt, self.tokenizer)
        elif not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise ApiError(f"{where}={shorten(prompt)} must be a text, a list of token ids, or an "
                           "object with prompt_token_ids", param=where)
        if not prompt:
            raise ApiError(f"{where} is empty; it needs at least one token", param=where)
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            wrong = min(prompt) if min(prompt) < 0 else max(prompt)
            raise ApiError(f"{where} has the token id {wrong}; ids of this model are 0 to "
                           f"{self.vocab_size - 1}", param=where)
        if len(prompt) >= self.max_model_len:
            raise ApiError(f"{where} has {len(prompt)} tokens but prompt and response share "
                           f"{self.max_model_len}; shorten it, or start the server with a greater "
                           "--max-model-len", param=where)
        return prompt

    def all_token_ids(self, prompts: list[Prompt], several: bool) -> list[list[int]]:
        return [self.token_ids(prompt, where=f"prompt[{i}]" if several else "prompt")
                for i, prompt in enumerate(prompts)]

    def text_of(self, prompt: Prompt, token_ids: list[int]) -> str:
        """A prompt as text: as it came, or decoded."""
        if isinstance(prompt, dict):
            (prompt,) = prompt.values()
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(token_ids)

    def parameters(
        self, fields: SamplingFields, *, row: int, streamed: bool, logprobs: int | None,
        prompt_logprobs: int | None = None, text: bool = True,
    ) -> Any:
        """vLLM's sampling parameters for prompt ``row`` of a request.

        With a seed, sample ``i`` of prompt ``row`` draws from ``seed + row * n + i``: repeated
        prompts of one request do not repeat their samples.
        """
        options = fields.sampling_options()
        if fields.seed is not None:
            options["seed"] = fields.seed + row * fields.n
        try:
            return self.engine.make.sampling_params(
                streamed=streamed, logprobs=logprobs, prompt_logprobs=prompt_logprobs,
                detokenize=text, **options)
        except self.engine.make.refusals as error:
            raise ApiError(str(error)) from error

    async def answer(self, token_ids: list[int], params: Any, *, model: str | None) -> Answer:
        """Everything that is sampled for one prompt."""
        output = None
        async with aclosing(self.engine.generate(token_ids, params, model=model)) as outputs:
            async for output, ticket in outputs:  # noqa: B007 - the last one is complete
                pass
            samples = [self._sample(part, ticket, start=0, asked=params.logprobs is not None)
                       for part in sorted(output.outputs, key=lambda part: part.index)]
        answer = Answer(token_ids, samples)
        if params.prompt_logprobs is not None:
            answer.prompt_positions = positions_of(output.prompt_logprobs)
        return answer

    async def answers(
        self, prompts: list[list[int]], parameters: list[Any], *, model: str | None
    ) -> list[Answer]:
        """:meth:`answer` of several prompts at a time; if one fails, all are aborted."""
        tasks = [asyncio.ensure_future(self.answer(ids, params, model=model))
                 for ids, params in zip(prompts, parameters, strict=True)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def pieces(
        self, token_ids: list[int], params: Any, *, model: str | None
    ) -> AsyncIterator[Sample]:
        """Samples of one prompt in pieces, as they come."""
        done: dict[int, int] = {}
        async with aclosing(self.engine.generate(token_ids, params, model=model)) as outputs:
            async for output, ticket in outputs:
                for part in output.outputs:
                    start = done.get(part.index, 0)
                    piece = self._sample(part, ticket, start=start,
                                         asked=params.logprobs is not None)
                    done[part.index] = start + len(piece.token_ids)
                    yield piece

    def all_pieces(
        self, prompts: list[list[int]], parameters: list[Any], *, model: str | None
    ) -> AsyncIterator[tuple[int, Sample]]:
        """:meth:`pieces` of several prompts, mixed, each with the number of its prompt."""
        return _mixed([self.pieces(ids, params, model=model)
                       for ids, params in zip(prompts, parameters, strict=True)])

    def finished_answers(
        self, prompts: list[list[int]], parameters: list[Any], *, model: str | None
    ) -> AsyncIterator[tuple[int, Answer]]:
        """:meth:`answer` of several prompts, each as soon as it is there, with its number."""
        async def one(ids: list[int], params: Any) -> AsyncIterator[Answer]:
            yield await self.answer(ids, params, model=model)

        return _mixed([one(ids, params) for ids, params in zip(prompts, parameters, strict=True)])

    def _sample(self, part: Any, ticket: Any, *, start: int, asked: bool) -> Sample:
        token_ids = list(part.token_ids)
        # A piece without tokens may carry the log-probs of earlier ones.
        positions = positions_of(part.logprobs if token_ids else []) if asked else None
        if positions is not None and len(positions) != len(token_ids):
            raise RuntimeError(f"the engine returned {len(positions)} log-probs for "
                               f"{len(token_ids)} tokens; this vLLM version is not supported")
        versions = self.engine.spans(ticket, part.index, start, start + len(token_ids))
        return Sample(part.index, token_ids, part.text, positions, part.finish_reason, versions)


async def _mixed(rows: list[AsyncGenerator[Item, None]]) -> AsyncIterator[tuple[int, Item]]:
    """What several iterators yield, as it comes; if one fails, all are closed."""
    queue: asyncio.Queue = asyncio.Queue()

    async def read(row: int) -> None:
        async with aclosing(rows[row]) as items:
            async for item in items:
                queue.put_nowait((row, item))

    tasks = [asyncio.ensure_future(read(row)) for row in range(len(rows))]
    finished = asyncio.gather(*tasks)
    finished.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (item := await queue.get()) is not None:
            yield item
        await finished
    finally:
        for task in tasks:
            task.cancel()
        # Of a stream that is left early, asyncio would print that nobody asked how it ended.
        await asyncio.gather(finished, *tasks, return_exceptions=True)


def positions_of(flat: Any) -> list[Position | None]:
    """vLLM's flat log-probs, one entry a position; None where it has none (a first token)."""
    if not flat:
        return []
    if any(map(math.isnan, flat.logprobs)):
        raise RuntimeError("the engine returned NaN log-probs: the weights it has are broken")
    values = [max(value, IMPOSSIBLE) for value in flat.logprobs]
    entries = list(zip(flat.token_ids, values, strict=True))
    # The sampled token stands first, and again among the top ones: a dict keeps its place.
    return [dict(entries[start:end]) or None
            for start, end in zip(flat.start_indices, flat.end_indices, strict=True)]
