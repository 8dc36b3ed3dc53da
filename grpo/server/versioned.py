"""An asynchronous vLLM engine that knows which policy version sampled every token.

A version may change only while nothing is sampled: paused, or without requests. At that moment the
number of tokens that each running request has produced is written down, so a token's version
follows from its position, however late its output is delivered.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from grpo.policies.handle import PauseMode
from grpo.policies.spans import Spans, spans_of
from grpo.system.json_api import ApiError

# Position behind every token that a finished sample can have.
_FINISHED = 2**62
# Adapters from folders get ids from here on; smaller ones are for those made in memory.
_FIRST_ADAPTER_ID = 1_000_000
_LOOK_SECONDS = 1.0  # between looks at whether a paused engine still lives


@dataclass(frozen=True)
class Constructors:
    """The types of vLLM that the server builds; importing them takes seconds."""

    sampling_params: Callable[..., Any]  # (streamed, **fields) to SamplingParams
    lora_request: Callable[[str, int, str], Any]  # (name, id, path) to LoRARequest
    no_outputs: Callable[[], Any]  # what the engine sends for a step without outputs
    refusals: tuple[type[Exception], ...] = (ValueError,)  # by which vLLM refuses a request

    @classmethod
    def vllm(cls) -> Constructors:
        import vllm.exceptions
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine import EngineCoreOutputs

        def sampling_params(*, streamed: bool, **fields: Any) -> Any:
            kind = RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY
            return SamplingParams(**fields, output_kind=kind, flat_logprobs=True)

        # 0.25 raises ValueErrors; later versions have a class of their own beside them.
        client_error = getattr(vllm.exceptions, "VLLMClientError", ValueError)
        return cls(sampling_params, LoRARequest, EngineCoreOutputs, (ValueError, client_error))


@dataclass
class Adapter:
    """A LoRA adapter in the engine. A changed adapter is loaded under a new name and id."""

    asked: str  # the name its loader gave it; later loads may have been given the same
    name: str  # <asked>-v<number of the load>, its own
    id: int
    path: str | None  # None: made in the workers' memory
    request: Any
    # Policy version of its weights, once another adapter has taken its place.
    version: int | None = None


@dataclass
class Ticket:
    """One request from its arrival until its last output is read."""

    id: str
    n: int
    adapter: Adapter | None
    # Set when the request is left behind by a newer adapter: its tokens stay with this version.
    frozen: int | None = None
    # of each sample, see grpo.policies.spans.Cuts
    cuts: dict[int, list[tuple[int, int]]] = field(default_factory=dict)


class VersionedEngine:
    """Requests, pauses and version changes of one ``AsyncLLM``.

    While paused, new requests wait here and not in the engine: so every request the engine knows
    has its token count at hand, and one that it no longer knows had finished.

    Args:
        engine: vLLM's ``AsyncLLM``.
        model_names: names by which requests may call the model.
        make: how to build vLLM's types.
        version: policy version of the weights the engine started with.
    """

    def __init__(
        self, engine: Any, *, model_names: tuple[str, ...], make: Constructors, version: int = 0
    ) -> None:
        self.engine, self.model_names, self.make = engine, model_names, make
        self.version = version
        self.paused = self.sleeping = False
        self.adapters: dict[str, Adapter] = {}
        self.active: Adapter | None = None
        self._superseded: set[str] = set()  # names whose place another took, not yet unloaded
        self.lora_loads = 0
        self.requests = 0  # that have come so far
        self._tickets: dict[str, Ticket] = {}
        self._ids = itertools.count(_FIRST_ADAPTER_ID)
        self._control = asyncio.Lock()
        self._running = asyncio.Event()
        self._running.set()
        self._adding = 0
        self._added = asyncio.Event()
        self._added.set()

    @property
    def open_requests(self) -> int:
        return len(self._tickets)

    async def generate(
        self, token_ids: list[int], params: Any, *, model: str | None = None
    ) -> AsyncIterator[tuple[Any, Ticket]]:
        """Sample; yields vLLM's ``RequestOutput`` and the ticket that dates its tokens.

        Leaving the iterator early aborts the request in the engine.

        Raises:
            ApiError: if vLLM refuses the request or does not know the model.
        """
        self.requests += 1
        await self._until_running()
        adapter = self.adapter_named(model)
        ticket = Ticket(uuid.uuid4().hex, params.n, adapter)
        if adapter is not self.active:
            ticket.frozen = adapter.version
        self._tickets[ticket.id] = ticket
        finished = False
        try:
            collector = await self._add(ticket, token_ids, params)
            while not finished:
                output = collector.get_nowait() or await collector.get()
                finished = output.finished
                yield output, ticket
        except (asyncio.CancelledError, GeneratorExit):
            if not finished:
                await self.engine.abort(ticket.id)
            raise
        finally:
            del self._tickets[ticket.id]

    async def _until_running(self) -> None:
        """Wait for the end of a pause, which an engine that died in it will never see."""
        while not self._running.is_set():
            self.require_alive()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._running.wait(), _LOOK_SECONDS)

    def require_alive(self) -> None:
        """Refuse, with ApiError 503, what only a living engine can do."""
        if self.engine.errored:
            raise ApiError("the engine died; see the server's log and start it again", status=503,
                           type="engine_dead")

    async def _add(self, ticket: Ticket, token_ids: list[int], params: Any) -> Any:
        self._adding += 1
        self._added.clear()
        try:
            return await self.engine.add_request(
                ticket.id, {"prompt_token_ids": token_ids}, params,
                lora_request=ticket.adapter and ticket.adapter.request)
        except self.make.refusals as error:
            raise ApiError(str(error)) from error
        finally:
            self._adding -= 1
            if not self._adding:
                self._added.set()

    def spans(self, ticket: Ticket, sample: int, start: int, end: int) -> Spans:
        """``[(version, tokens), ...]`` of the output tokens ``start`` to ``end`` of a sample."""
        version = self.version if ticket.frozen is None else ticket.frozen
        return spans_of(ticket.cuts.get(sample, ()), version, start=start, end=end)

    async def pause(self, mode: PauseMode, *, clear_cache: bool = True) -> None:
        """Stop sampling; returns when the engine is idle and all it had sampled is counted.

        Args:
            mode: what happens to running requests: ``keep`` continues them on :meth:`resume`,
                ``wait`` lets them finish, ``abort`` ends them with finish reason ``abort``.
            clear_cache: forget keys and values, so that kept requests are recomputed with the
                weights they continue with.
        """
        async with self._control:
            await self._pause(lambda: self.engine.pause_generation(
                mode=mode, clear_cache=clear_cache))

    async def _pause(self, stop: Callable[[], Any]) -> None:
        was_running = not self.paused
        self._running.clear()
        try:
            await self._added.wait()
            await stop()
            await self._flush()
        except BaseException:
            # A pause that failed or ran out of time must not leave the server stuck.
            if was_running:
                await self._resume()
            raise
        self.paused = True

    async def resume(self) -> None:
        """Go on sampling; without effect if not paused."""
        async with self._control:
            self.require_awake()
            await self._resume()

    async def _resume(self) -> None:
        await self.engine.resume_generation()
        self.paused = False
        self._running.set()

    def require_awake(self) -> None:
        """Refuse, with ApiError 409, what would touch memory that a sleeping engine has given back.
        """
        if self.sleeping:
            raise ApiError("the engine sleeps; POST /bridge/wake_up first", status=409,
                           type="conflict")

    async def sleep(self, level: int) -> None:
        """Pause, aborting what runs, and free the GPU's memory (levels 1 and 2)."""
        async with self._control:
            await self._pause(lambda: self.engine.sleep(level))
            self.sleeping = True

    async def wake_up(self) -> None:
        """End :meth:`sleep` and go on sampling."""
        async with self._control:
            await self.engine.wake_up()
            self.sleeping = False
            await self._resume()

    async def set_version(self, version: int) -> None:
        """Date all tokens from here on ``version``; those sampled before keep the old one.

        Raises:
            ApiError: 409 while tokens are being sampled.
        """
        async with self._control:
            if version == self.version:
                return
            if self._tickets and not self.paused:
                raise ApiError(
                    f"version={version} cannot be set while {len(self._tickets)} requests are "
                    "being sampled: their tokens would have no definite version; POST "
                    "/bridge/pause first", status=409, type="conflict", param="version")
            self._cut()
            self.version = version
            # Later vLLM versions label outputs too; keep both in step.
            update = getattr(self.engine, "update_weight_version", None)
            if update is not None:
                await update(str(version))

    def _cut(self) -> None:
        produced: dict[str, dict[int, int]] = {}
        for state in self.engine.output_processor.request_states.values():
            counts = produced.setdefault(state.external_req_id, {})
            counts[state.request_index] = state.detokenizer.num_output_tokens()
        for ticket in self._tickets.values():
            if ticket.frozen is None:
                counts = produced.get(ticket.id, {})
                for sample in range(ticket.n):
                    ticket.cuts.setdefault(sample, []).append(
                        (self.version, counts.get(sample, _FINISHED)))

    async def _flush(self) -> None:
        """Wait until everything that the engine has sent is counted.

        The engine's answers come in order, so all outputs are in the client's queue by the time
        it says it is idle. One more, empty, goes in behind them: its reader takes it only when
        done with the others.
        """
        queue = self.engine.engine_core.outputs_queue
        queue.put_nowait(self.make.no_outputs())
        while not queue.empty():
            if self.engine.errored:
                raise ApiError("the engine died during the pause; see its log", status=503,
                               type="engine_dead")
            await asyncio.sleep(0)

    def adapter_named(self, model: str | None) -> Adapter | None:
        """The adapter for a request's ``model``: the active one unless another is named.

        A name without the number of a load stands for the newest one.

        Raises:
            ApiError: 404 for a name that is not served.
        """
        if model is None or model in self.model_names:
            return self.active
        if model in self.adapters:
            return self.adapters[model]
        loads = [adapter for adapter in self.adapters.values() if adapter.asked == model]
        if loads:
            return loads[-1]
        known = ", ".join([self.model_names[0], *self.adapters])
        raise ApiError(f"model={model!r} is not served here; known are {known}", status=404,
                       type="model_not_found", param="model")

    async def load_adapter(self, name: str, path: str, *, version: int | None) -> Adapter:
        """Add the adapter in a folder to the engine, once, and use it for the requests to come.

        Running requests go on with what they started with, and keep its version.

        Args:
            name: the adapter is served as ``<name>-v<number of this load>``.
            path: the folder.
            version: policy version of the adapter; None keeps the present one.
        """
        async with self._control:
            own, id = f"{name}-v{self.lora_loads + 1}", next(self._ids)
            adapter = Adapter(name, own, id, path, self.make.lora_request(own, id, path))
            await self.engine.add_lora(adapter.request)
            return await self._activate(adapter, version)

    async def attach_adapter(self, name: str, id: int, *, version: int | None) -> Adapter:
        """Use an adapter that the workers hold in memory; see :meth:`load_adapter`."""
        async with self._control:
            own = f"{name}-v{self.lora_loads + 1}"
            request = self.make.lora_request(own, id, f"memory:{own}")
            return await self._activate(Adapter(name, own, id, None, request), version)

    async def _activate(self, adapter: Adapter, version: int | None) -> Adapter:
        if self.active is not None:
            self._superseded.add(self.active.asked)
        self._superseded.discard(adapter.asked)
        self.adapters[adapter.name] = adapter
        self.lora_loads += 1
        await self._switch(adapter)
        if version is not None:
            self.version = version
        return adapter

    async def unload_adapter(self) -> Adapter | None:
        """Go back to the base model; returns the adapter that was active."""
        async with self._control:
            previous = self.active
            await self._switch(None)
            return previous

    async def unload_named(self, name: str) -> Adapter | None:
        """Unload an adapter by its name; None if another took its place before, as it does when a
        client loads the next one first.

        Raises:
            ApiError: 400 for the model's own name, 404 for one that is not loaded.
        """
        if name in self.model_names:
            raise ApiError(f"lora_name={name!r} is the model itself, not an adapter",
                           param="lora_name")
        if name in self._superseded:
            self._superseded.remove(name)
            return None
        adapter = self.adapter_named(name)
        if adapter is self.active:
            await self.unload_adapter()
        return adapter

    async def _switch(self, adapter: Adapter | None) -> None:
        for ticket in self._tickets.values():
            if ticket.adapter is not adapter and ticket.frozen is None:
                ticket.frozen = self.version
        if self.active is not None:
            self.active.version = self.version
        self.active = adapter
        in_use = {ticket.adapter.id for ticket in self._tickets.values() if ticket.adapter}
        for old in list(self.adapters.values()):
            if old is not adapter and old.id not in in_use:
                del self.adapters[old.name]
                if old.path is not None:
                    await self.engine.remove_lora(old.id)
