"""A stand-in for vLLM's ``AsyncLLM`` that keeps its order of events.

A core samples a token a step for every running request, and sends the step through a queue; a
reader, which may lag behind, counts the tokens and hands them to the requests. Token ids are
``FIRST + weights``, so a token tells which weights sampled it.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

from grpo.server.versioned import Constructors

FIRST = 10


def sampling_params(*, streamed, **fields):
    if fields["temperature"] == 0 and fields["n"] > 1:
        raise ValueError("n must be 1 when using greedy sampling")
    if max(fields.get("logprobs") or 0, fields.get("prompt_logprobs") or 0) > 20:
        raise ValueError("more log-probs than the 20 that are allowed")  # as vLLM's default is
    return SimpleNamespace(streamed=streamed, **fields)


MAKE = Constructors(
    sampling_params=sampling_params,
    lora_request=lambda name, id, path: SimpleNamespace(name=name, id=id, path=path),
    no_outputs=list)


def flat(positions):
    """Positions as ``[(token, log-prob), ...]`` in vLLM's flat form."""
    starts, ends, tokens, values = [], [], [], []
    for position in positions:
        starts.append(len(tokens))
        for token, value in position:
            tokens.append(token)
            values.append(value)
        ends.append(len(tokens))
    if not positions:
        return []
    return SimpleNamespace(start_indices=starts, end_indices=ends, token_ids=tokens,
                           logprobs=values)


class _Sample:
    def __init__(self, request, index):
        self.external_req_id, self.request_index = request.id, index
        self.counted: list[int] = []
        self.planned = 0
        self.finish_reason = None
        self.detokenizer = SimpleNamespace(num_output_tokens=lambda: len(self.counted))


class _Request:
    def __init__(self, id, prompt, params, lora):
        self.id, self.prompt, self.params, self.lora = id, prompt, params, lora
        self.samples = [_Sample(self, i) for i in range(params.n)]
        self.sent = [0] * params.n
        self.ready = asyncio.Event()
        self.new = False
        self.error = None

    def get_nowait(self):
        if self.error is not None:
            raise self.error
        if not self.new:
            return None
        self.new = False
        self.ready.clear()
        parts = []
        for sample in self.samples:
            start = self.sent[sample.request_index] if self.params.streamed else 0
            tokens = sample.counted[start:]
            self.sent[sample.request_index] = len(sample.counted)
            position = [[(token, -0.5), *((t, -1.0 - t) for t in range(self.params.logprobs or 0))]
                        for token in tokens]
            parts.append(SimpleNamespace(
                index=sample.request_index, token_ids=tokens, text="x" * len(tokens),
                logprobs=flat(position), finish_reason=sample.finish_reason))
        prompt_logprobs = flat([[], *([(token, -2.0)] for token in self.prompt[1:])])
        return SimpleNamespace(outputs=parts, prompt_logprobs=prompt_logprobs,
                               finished=all(s.finish_reason for s in self.samples))

    async def get(self):
        while (output := self.get_nowait()) is None:
            await self.ready.wait()
        return output


class FakeEngine:
    """See the module. ``endless`` requests stop only at ``max_tokens``; others after a token or so.

    Args:
        step: seconds a step takes.
        lag: seconds by which the reader of outputs is late, for each step.
    """

    def __init__(self, *, step=0.001, lag=0.0):
        self.step, self.lag = step, lag
        self.loop = asyncio.get_running_loop()
        self.weights = 0
        self.errored = False
        self.stuck = False
        self.add_delay = 0.0
        self.running: list[_Request] = []
        self.aborted: list[str] = []
        self.calls: list[tuple] = []
        self.seen: list[_Request] = []
        self.paused = False
        self.output_processor = SimpleNamespace(request_states={})
        self.engine_core = SimpleNamespace(outputs_queue=asyncio.Queue())
        self._tasks = [asyncio.ensure_future(self._core()), asyncio.ensure_future(self._read())]

    async def add_request(self, id, prompt, params, *, lora_request=None):
        await asyncio.sleep(self.add_delay)
        if self.errored:
            raise RuntimeError("EngineCore is gone")
        if params.max_tokens == 666:
            raise ValueError("refused by the engine")
        if params.max_tokens == 667:
            raise RuntimeError("an accident")
        request = _Request(id, prompt["prompt_token_ids"], params, lora_request)
        for sample in request.samples:
            self.output_processor.request_states[f"{sample.request_index}_{id}"] = sample
        self.running.append(request)
        self.seen.append(request)
        await asyncio.sleep(0)
        return request

    async def _core(self):
        while True:
            await asyncio.sleep(self.step)
            if self.paused or self.stuck:
                continue
            self._put([(request, sample, FIRST + self.weights) for request in self.running
                       for sample in request.samples if sample.planned < request.params.max_tokens])

    def _put(self, outputs, finish=None):
        batch = []
        for request, sample, token in outputs:
            if token is not None:
                sample.planned += 1
            over = finish or ("length" if sample.planned >= request.params.max_tokens else None)
            batch.append((request, sample, token, over))
        self.running = [r for r in self.running
                        if any(s.planned < r.params.max_tokens for s in r.samples) and not finish]
        if batch:
            self.engine_core.outputs_queue.put_nowait(batch)

    async def _read(self):
        while True:
            batch = await self.engine_core.outputs_queue.get()
            if self.lag:
                await asyncio.sleep(self.lag)
            for request, sample, token, over in batch:
                key = f"{sample.request_index}_{request.id}"
                if key not in self.output_processor.request_states:
                    continue
                if token is not None:
                    sample.counted.append(token)
                if over:
                    sample.finish_reason = over
                    del self.output_processor.request_states[key]
                done = all(s.finish_reason for s in request.samples)
                if done or request.params.streamed:
                    request.new = True
                    request.ready.set()

    async def abort(self, id):
        self.aborted.append(id)
        self.running = [request for request in self.running if request.id != id]
        for key in [k for k in self.output_processor.request_states if k.endswith(id)]:
            del self.output_processor.request_states[key]

    async def pause_generation(self, *, mode, clear_cache):
        self.calls.append(("pause", mode, clear_cache))
        if mode == "wait":
            while self.running:
                await asyncio.sleep(self.step)
        self.paused = True
        if mode == "abort":
            self._put([(request, sample, None) for request in self.running
                       for sample in request.samples if not sample.finish_reason], finish="abort")

    async def resume_generation(self):
        self.calls.append(("resume",))
        self.paused = False

    async def sleep(self, level):
        self.calls.append(("sleep", level))
        await self.pause_generation(mode="abort", clear_cache=True)

    async def wake_up(self):
        self.calls.append(("wake_up",))

    async def reset_prefix_cache(self):
        return not self.running

    async def collective_rpc(self, method, args=()):
        if method == "hang":
            await asyncio.sleep(60)
        return [{"method": method, "args": list(args)}]

    async def add_lora(self, request):
        self.calls.append(("add_lora", request.id, request.path))

    async def remove_lora(self, id):
        self.calls.append(("remove_lora", id))

    def die(self):
        """As when the process of vLLM's core is gone: what runs gets an error, nothing goes on."""
        self.errored = True
        self.stop()
        for request in self.seen:
            request.error = RuntimeError("EngineCore is gone")
            request.ready.set()

    def stop(self):
        for task in self._tasks:
            task.cancel()

    @contextlib.asynccontextmanager
    async def started(self):
        try:
            yield self
        finally:
            self.stop()
