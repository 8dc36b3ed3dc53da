"""A continuation that an environment waits for, and how it is to be sampled."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from grpo.server.api import SamplingFields
from grpo.server.generation import Sample
from grpo.system.json_api import ApiError


@dataclass(frozen=True)
class Ask:
    """The options of a request, as far as they concern sampling."""

    fields: SamplingFields
    row: int = 0
    logprobs: int | None = None
    text: bool = True

    @property
    def stops(self) -> list[str]:
        """Texts that end a continuation."""
        stop = self.fields.stop
        return [stop] if isinstance(stop, str) else stop or []


@dataclass(eq=False)
class Call:
    """One continuation that an environment waits for."""

    prompt: list[int]  # token ids
    ask: Ask
    index: int  # which of the request's `n` samples
    max_tokens: int
    future: asyncio.Future = field(repr=False)
    cancelled: bool = False  # the client went away, so nobody reads a reply

    @property
    def seed(self) -> int | None:
        """Of this sample; samples of one request differ."""
        fields = self.ask.fields
        if fields.seed is None:
            return None
        return fields.seed + self.ask.row * fields.n + self.index

    def settle(self, result: Sample | ApiError) -> None:
        """Hand the result to the request that waits for it; from any thread."""
        def settle() -> None:
            if self.future.done():
                return
            if isinstance(result, ApiError):
                self.future.set_exception(result)
            else:
                self.future.set_result(result)

        loop = self.future.get_loop()
        if not loop.is_closed():  # the server may have been stopped meanwhile
            loop.call_soon_threadsafe(settle)
