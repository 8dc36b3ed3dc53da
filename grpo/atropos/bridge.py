"""The bridge: an inference server for environments, whose engine is the trainer's policy.

Requests (OpenAI's chat completions and completions, ``/generate``) wait here as
:class:`~grpo.atropos.calls.Call` objects, one for each sample. A driver in the trainer's process
takes them, lets the policy continue their prompts, and replies with tokens and log-probs. Rewards
come later: what the policy sampled is kept in :class:`~grpo.atropos.records.Records`, where a
scored group finds it.

The routes, formats and checks are those of :mod:`grpo.server`. In a run
:class:`~grpo.atropos.bridge_driver.BridgeDriver` is the driver; a TorchRL program takes the bridge
as an environment, :class:`~grpo.atropos.bridge_env.AtroposBridgeEnv`.
"""

from __future__ import annotations

import asyncio
import bisect
import math
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI

from grpo.atropos.calls import Ask, Call
from grpo.atropos.records import Records
from grpo.policies.spans import Spans, first_spans
from grpo.server import routes_generate, routes_openai
from grpo.server.api import IMPOSSIBLE, SamplingFields
from grpo.server.app import MAX_BODY_BYTES
from grpo.server.generation import Answer, Generation, Position, Sample
from grpo.system.http_app import bare_app
from grpo.system.json_api import ApiError

# Options that a policy with a temperature alone does not have, and their neutral values.
_BEYOND_A_TEMPERATURE = {"ignore_eos": False, "seed": None}


@dataclass(eq=False, kw_only=True)
class Bridge:
    """Requests on one side, a policy on the other; safe to use from several threads.

    Args:
        tokenizer: of the model.
        eos_token_ids: tokens that end a continuation.
        max_model_len: prompt plus continuation, in tokens.
        vocab_size: token ids are below it.
        model_names: names by which requests may call the model; the first is shown.
        records: where continuations are remembered; None: with default bounds.
        temperature_only: refuse requests whose options a policy that samples with a temperature
            alone cannot honour (top-p, penalties, seeds ...).
        max_waiting: calls that may wait; more are answered with 503.
        request_timeout: seconds after which a request is given up with 504.

    Attributes:
        counts: ``calls``, ``replies``, ``cancelled``, ``refused``.

    Examples:
        >>> bridge = Bridge(tokenizer=tokenizer, eos_token_ids=(1,), max_model_len=512,
        ...                 vocab_size=258, model_names=("policy",))          # doctest: +SKIP
        >>> for call in bridge.take(8, timeout=1.0):                          # doctest: +SKIP
        ...     bridge.reply(call, [5, 1], [-0.7, -0.1], versions=[(0, 2)])
    """

    tokenizer: Any
    eos_token_ids: Sequence[int]
    max_model_len: int
    vocab_size: int
    model_names: tuple[str, ...]
    records: Records = field(default_factory=Records)
    temperature_only: bool = True
    max_waiting: int = 16_384
    request_timeout: float = 1200.0
    counts: Counter[str] = field(default_factory=Counter, init=False)
    closed: str | None = field(default=None, init=False)
    _waiting: deque[Call] = field(default_factory=deque, init=False)
    # Calls that a client waits for, whether they were taken or not.
    _open: set[Call] = field(default_factory=set, init=False)
    _arrived: threading.Condition = field(default_factory=threading.Condition, init=False)

    def __post_init__(self) -> None:
        if self.max_waiting < 1:
            raise ValueError(f"max_waiting={self.max_waiting} must be at least 1")
        if not self.request_timeout > 0:
            raise ValueError(f"request_timeout={self.request_timeout} must be positive seconds")

    # -- the driver's side ------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Calls that nobody has taken yet."""
        return len(self._waiting)

    def take(self, limit: int | None = None, *, timeout: float = 0.0) -> list[Call]:
        """At most ``limit`` waiting calls, oldest first; empty if none comes within ``timeout``
        seconds."""
        with self._arrived:
            if timeout > 0:
                self._arrived.wait_for(lambda: self._waiting, timeout)
            taken: list[Call] = []
            while self._waiting and (limit is None or len(taken) < limit):
                taken.append(self._waiting.popleft())
            return taken

    def put_back(self, calls: Sequence[Call]) -> None:
        """Put calls that were taken and not replied to in front of the others."""
        with self._arrived:
            self._waiting.extendleft(call for call in reversed(calls) if not call.cancelled)
            self._arrived.notify()

    def reply(
        self,
        call: Call,
        tokens: list[int],
        log_probs: list[float] | None,
        *,
        versions: Spans,
        truncated: bool = False,
        positions: list[Position] | None = None,
    ) -> None:
        """Answer a call, and record what was sampled.

        Args:
            call: from :meth:`take`.
            tokens: sampled ids with the end token; cut here to what the call asked for.
            log_probs: of the tokens, under the distribution that was sampled; without them no
                record is kept.
            versions: ``[(policy version, tokens), ...]``.
            truncated: whether a length limit ended the continuation.
            positions: log-probs of further tokens at each position, the sampled one first.
        """
        size, truncated = self._cut(call, tokens, truncated)
        tokens, versions = tokens[:size], first_spans(versions, size)
        if log_probs is not None:
            log_probs = [max(value, IMPOSSIBLE) for value in log_probs[:size]]
        if call.cancelled:
            return
        fields = call.ask.fields
        if log_probs is not None:
            self.records.add(
                call.prompt, tokens, log_probs, versions=versions, truncated=truncated,
                temperature=math.nan if fields.altered_by() else fields.temperature)
        elif call.ask.logprobs is not None:
            return self.fail(call, "the policy gives no log-probs, but the request asks for them")
        if call.ask.logprobs is None:
            positions = None
        elif positions is None:
            positions = [{token: value} for token, value in zip(tokens, log_probs, strict=True)]
        sample = Sample(call.index, tokens, "", positions and positions[:size],
                        "length" if truncated else "stop", versions)
        self.counts["replies"] += 1
        call.settle(sample)

    def fail(self, call: Call, message: str, *, status: int = 400) -> None:
        """Answer a call with an error."""
        self.counts["refused"] += 1
        call.settle(ApiError(message, status=status,
                             type="invalid_request_error" if status < 500 else "server_error"))

    def close(self, reason: str) -> None:
        """Answer all open calls, taken or not, and all later requests with 503 and the reason."""
        with self._arrived:
            self.closed = reason
            self._waiting.clear()
            left = [call for call in self._open if not call.future.done()]
        for call in left:
            self.fail(call, reason, status=503)

    def _cut(self, call: Call, tokens: list[int], truncated: bool) -> tuple[int, bool]:
        """How many of the tokens the call asked for, and whether a limit cut them."""
        fields, size = call.ask.fields, len(tokens)
        for at, token in enumerate(tokens if fields.stop_token_ids else ()):
            if token in fields.stop_token_ids:
                size, truncated = at + 1, False
                break
        def stopped(at: int) -> bool:
            text = self._decode(call, tokens[: at + 1])
            return any(stop in text for stop in call.ask.stops)

        if call.ask.stops and stopped(size - 1):
            # The first token with which a stop string is complete.
            size, truncated = bisect.bisect_left(range(size), True, key=stopped) + 1, False
        return (call.max_tokens, True) if size > call.max_tokens else (size, truncated)

    def text(self, call: Call, sample: Sample) -> str:
        """What the environment reads: without the end token, and up to a stop string."""
        fields, tokens = call.ask.fields, sample.token_ids
        ends = {*self.eos_token_ids, *(fields.stop_token_ids or ())}
        if sample.finish_reason == "stop" and tokens and tokens[-1] in ends:
            tokens = tokens[:-1]
        text = self._decode(call, tokens)
        found = [(text.index(stop), stop) for stop in call.ask.stops if stop in text]
        if found:
            at, stop = min(found)
            text = text[: at + len(stop) * fields.include_stop_str_in_output]
        return text

    def _decode(self, call: Call, tokens: list[int]) -> str:
        return self.tokenizer.decode(
            tokens, skip_special_tokens=call.ask.fields.skip_special_tokens)

    # -- the server's side ------------------------------------------------------------------------

    def add(self, calls: Sequence[Call]) -> None:
        """Let calls wait for the driver; ApiError 503 if too many wait or the bridge is closed."""
        with self._arrived:
            if self.closed is not None:
                raise ApiError(self.closed, status=503, type="closed")
            if len(self._waiting) + len(calls) > self.max_waiting:
                raise ApiError(f"{len(self._waiting)} calls wait for the policy already, of at "
                               f"most {self.max_waiting}; start fewer workers", status=503,
                               type="overloaded")
            self.counts["calls"] += len(calls)
            self._waiting.extend(calls)
            self._open.update(calls)
            self._arrived.notify()

    def cancel(self, calls: Sequence[Call]) -> None:
        """Nobody waits for these any more."""
        left = [call for call in calls if not call.future.done()]
        with self._arrived:
            self._open.difference_update(calls)
            if not left:
                return
            self.counts["cancelled"] += len(left)
            for call in left:
                call.cancelled = True
                call.future.cancel()
            self._waiting = deque(call for call in self._waiting if not call.cancelled)

    def app(self, *, token: str | None = None, max_body_bytes: int = MAX_BODY_BYTES) -> FastAPI:
        """The inference server. With a ``token`` all routes but ``/health`` want it; requests of
        more than ``max_body_bytes`` are answered with 413."""
        app = bare_app("grpo bridge", token=token, max_body_bytes=max_body_bytes,
                       open_paths=("/health",), advice="send fewer prompts a request, or ")
        for module in (routes_generate, routes_openai):
            app.include_router(module.router)
        app.state.generation = BridgeGeneration(self)
        app.state.versioned = _Served(self)
        return app


class BridgeGeneration(Generation):
    """Generation by the driver of a bridge. Streams are sent in one piece, and log-probs are those
    of the sampled tokens alone unless the driver gives more."""

    def __init__(self, bridge: Bridge) -> None:
        super().__init__(None, tokenizer=bridge.tokenizer, max_model_len=bridge.max_model_len,
                         vocab_size=bridge.vocab_size)
        self.bridge = bridge

    def parameters(
        self,
        fields: SamplingFields,
        *,
        row: int,
        streamed: bool,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
        text: bool = True,
    ) -> Ask:
        if prompt_logprobs is not None:
            raise ApiError("prompt_logprobs are not served here: the policy only continues "
                           "prompts; ask an engine server of the teacher",
                           param="prompt_logprobs")
        ask = Ask(fields, row, logprobs, text)
        if "" in ask.stops:
            raise ApiError("stop contains an empty text, which is everywhere; leave it out",
                           param="stop")
        if self.bridge.temperature_only:
            beyond = fields.altered_by() + [name for name, neutral in _BEYOND_A_TEMPERATURE.items()
                                            if getattr(fields, name) != neutral]
            # One more than the sampled token is what OpenAI's clients ask for by habit.
            beyond += ["logprobs"] * ((logprobs or 0) > 1)
            if beyond:
                raise ApiError(f"{beyond[0]} is not served here: the policy samples with a "
                               "temperature alone; leave it out, or drive the bridge with a vLLM "
                               "engine", param=beyond[0])
        return ask

    async def answer(self, token_ids: list[int], params: Ask, *, model: str | None) -> Answer:
        room, asked = self.max_model_len - len(token_ids), params.fields.max_tokens
        loop = asyncio.get_running_loop()
        calls = [Call(token_ids, params, index, min(asked or room, room), loop.create_future())
                 for index in range(params.fields.n)]
        self.bridge.add(calls)
        try:
            done, late = await asyncio.wait([call.future for call in calls],
                                            timeout=self.bridge.request_timeout,
                                            return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self.bridge.cancel(calls)
        for error in filter(None, [future.exception() for future in done]):
            raise error
        if late:
            raise ApiError(f"the policy did not answer within {self.bridge.request_timeout:g} s; "
                           "it may be training, or nobody drives the bridge", status=504,
                           type="timeout")
        samples = [call.future.result() for call in calls]
        if params.text:
            for call, sample in zip(calls, samples, strict=True):
                sample.text = self.bridge.text(call, sample)
        return Answer(token_ids, samples)

    async def pieces(
        self, token_ids: list[int], params: Ask, *, model: str | None
    ) -> AsyncIterator[Sample]:
        for sample in (await self.answer(token_ids, params, model=model)).samples:
            yield sample


class _Served:
    """What the routes ask of :class:`~grpo.server.versioned.VersionedEngine`."""

    adapters: dict[str, Any] = {}
    paused = False

    def __init__(self, bridge: Bridge) -> None:
        self.bridge, self.model_names = bridge, bridge.model_names

    def require_alive(self) -> None:
        if self.bridge.closed is not None:
            raise ApiError(self.bridge.closed, status=503, type="closed")

    def adapter_named(self, model: str | None) -> None:
        if model is not None and model not in self.model_names:
            raise ApiError(f"model={model!r} is not served here; known are "
                           f"{', '.join(self.model_names)}", status=404, type="model_not_found",
                           param="model")
