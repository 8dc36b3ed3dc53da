"""Every token carries the version of the weights that sampled it, whenever it is delivered."""

from __future__ import annotations

import asyncio
import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.server.api import SamplingFields
from grpo.server.generation import Generation
from grpo.server.versioned import VersionedEngine
from grpo.system.json_api import ApiError

from .fake_engine import FIRST, MAKE, FakeEngine


def run(scenario, **options):
    async def main():
        async with FakeEngine(**options).started() as engine:
            versioned = VersionedEngine(engine, model_names=("tiny",), make=MAKE)
            generation = Generation(versioned, tokenizer=None, max_model_len=10_000, vocab_size=100)
            return await asyncio.wait_for(scenario(engine, versioned, generation), 20)

    return asyncio.run(main())


def ask(generation, max_tokens, *, n=1, streamed=False):
    """A task that returns the tokens and the spans of all samples of one request."""
    params = generation.parameters(SamplingFields(max_tokens=max_tokens, n=n), row=0,
                                   streamed=streamed, logprobs=0)

    async def pieces():
        tokens, spans = [[] for _ in range(n)], [[] for _ in range(n)]
        async for piece in generation.pieces([5], params, model=None):
            tokens[piece.index] += piece.token_ids
            spans[piece.index] += piece.versions
        return list(zip(tokens, spans, strict=True))

    async def whole():
        answer = await generation.answer([5], params, model=None)
        return [(sample.token_ids, sample.versions) for sample in answer.samples]

    return asyncio.ensure_future(pieces() if streamed else whole())


def dated(spans):
    return [version for version, count in spans for _ in range(count)]


async def update(engine, versioned, version, *, mode="keep"):
    await versioned.pause(mode)
    engine.weights = version
    await versioned.set_version(version)
    await versioned.resume()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("lag", [0.0, 0.004])
def test_a_request_in_flight_is_split_where_the_weights_changed(streamed, lag):
    async def scenario(engine, versioned, generation):
        task = ask(generation, 60, n=2, streamed=streamed)
        await asyncio.sleep(0.02)
        await update(engine, versioned, 1)
        await asyncio.sleep(0.02)
        await update(engine, versioned, 2)
        return await task

    for tokens, spans in run(scenario, lag=lag):
        assert len(tokens) == 60
        assert dated(spans) == [token - FIRST for token in tokens]
        assert {version for version, _ in spans} == {0, 1, 2}


def test_a_request_that_finished_before_the_pause_keeps_its_version_when_read_late():
    async def scenario(engine, versioned, generation):
        params = generation.parameters(SamplingFields(max_tokens=3), row=0, streamed=False,
                                       logprobs=0)
        outputs = versioned.generate([5], params)
        reading = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(0.03)
        output, ticket = await reading
        # The engine is done with it, but we are still at its output while the weights change.
        await update(engine, versioned, 1)
        spans = versioned.spans(ticket, 0, 0, 3)
        await outputs.aclose()
        return output.outputs[0].token_ids, spans

    tokens, spans = run(scenario)
    assert tokens == [FIRST] * 3 and spans == [(0, 3)]


def test_outputs_that_lie_in_the_queue_during_the_change_keep_the_old_version():
    async def scenario(engine, versioned, generation):
        task = ask(generation, 8)
        await asyncio.sleep(0.02)  # all is sampled, next to nothing is read
        assert engine.engine_core.outputs_queue.qsize() > 2
        await update(engine, versioned, 1)
        return await task

    ((tokens, spans),) = run(scenario, lag=0.02)
    assert tokens == [FIRST] * 8 and spans == [(0, 8)]


@settings(max_examples=10)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 3), st.booleans()), min_size=1,
                max_size=6),
       st.lists(st.integers(0, 15), max_size=4), st.sampled_from([0.0, 0.003]))
def test_spans_agree_with_the_weights_for_any_schedule(requests, waits, lag):
    async def scenario(engine, versioned, generation):
        tasks = [ask(generation, size, n=n, streamed=streamed) for size, n, streamed in requests]
        for version, milliseconds in enumerate(waits, start=1):
            await asyncio.sleep(milliseconds / 1000)
            await update(engine, versioned, version)
        return await asyncio.gather(*tasks)

    for samples, (size, _, _) in zip(run(scenario, lag=lag), requests, strict=True):
        for tokens, spans in samples:
            assert len(tokens) == size
            assert dated(spans) == [token - FIRST for token in tokens]


def test_a_version_cannot_change_while_tokens_are_sampled():
    async def scenario(engine, versioned, generation):
        task = ask(generation, 50)
        await asyncio.sleep(0.01)
        with pytest.raises(ApiError, match="version=1 cannot be set while 1 requests") as info:
            await versioned.set_version(1)
        await task
        await versioned.set_version(1)  # idle
        return info.value.status, versioned.version

    assert run(scenario) == (409, 1)


def test_requests_that_come_during_a_pause_wait_and_get_the_new_version():
    async def scenario(engine, versioned, generation):
        await versioned.pause("keep")
        task = ask(generation, 4)
        await asyncio.sleep(0.02)
        assert not engine.seen and not task.done()
        engine.weights = 7
        await versioned.set_version(7)
        await versioned.resume()
        return await task

    assert run(scenario) == [([FIRST + 7] * 4, [(7, 4)])]


def test_a_request_on_its_way_into_the_engine_gets_the_new_version():
    async def scenario(engine, versioned, generation):
        engine.add_delay = 0.03
        task = ask(generation, 4)
        await asyncio.sleep(0.01)
        assert not engine.seen
        await update(engine, versioned, 1)
        return await task

    ((tokens, spans),) = run(scenario)
    assert dated(spans) == [token - FIRST for token in tokens] and len(tokens) == 4


def test_wait_lets_requests_finish_and_abort_ends_them():
    async def scenario(engine, versioned, generation):
        waiting = ask(generation, 30)
        await asyncio.sleep(0.01)
        await versioned.pause("wait")
        assert len((await waiting)[0][0]) == 30
        await versioned.resume()
        params = generation.parameters(SamplingFields(max_tokens=5000), row=0, streamed=False,
                                       logprobs=0)
        aborted = asyncio.ensure_future(generation.answer([5], params, model=None))
        await asyncio.sleep(0.01)
        await versioned.pause("abort")
        return (await aborted).samples[0]

    sample = run(scenario)
    assert sample.finish_reason == "abort" and 0 < len(sample.token_ids) < 5000


def test_a_pause_that_runs_out_of_time_leaves_the_engine_running():
    async def scenario(engine, versioned, generation):
        engine.stuck = True
        task = ask(generation, 5)
        await asyncio.sleep(0.005)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(versioned.pause("wait"), 0.05)
        assert not versioned.paused and not engine.paused
        engine.stuck = False
        return await asyncio.gather(task, ask(generation, 5))

    assert [len(tokens) for ((tokens, _),) in run(scenario)] == [5, 5]


def test_a_dead_engine_does_not_hang_the_pause():
    async def scenario(engine, versioned, generation):
        engine.stop()  # nobody reads its queue
        engine.errored = True
        with pytest.raises(ApiError, match="died"):
            await versioned.pause("keep")

    run(scenario)


def test_leaving_a_request_aborts_it_in_the_engine():
    async def scenario(engine, versioned, generation):
        for streamed in (False, True):
            task = ask(generation, 5000, streamed=streamed)
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return engine.aborted, engine.running, versioned.open_requests

    aborted, running, open_requests = run(scenario)
    assert len(aborted) == 2 and not running and open_requests == 0


def test_a_new_adapter_leaves_running_requests_with_the_old_version():
    async def scenario(engine, versioned, generation):
        first = await versioned.load_adapter("a", "/a", version=1)
        task = ask(generation, 90)
        await asyncio.sleep(0.01)
        second = await versioned.load_adapter("a", "/b", version=2)
        late = ask(generation, 60)
        await asyncio.sleep(0.02)
        # The old adapter serves until nobody uses it.
        assert ("remove_lora", first.id) not in engine.calls
        await update(engine, versioned, 3)  # the new adapter, in place
        spans = (await task)[0][1], (await late)[0][1]
        await versioned.unload_adapter()
        return spans, first, second, engine

    (old, new), first, second, engine = run(scenario)
    assert old == [(1, 90)]
    assert [version for version, _ in new] == [2, 3] and sum(count for _, count in new) == 60
    assert first.name == "a-v1" and second.name == "a-v2" and first.id != second.id
    assert [request.lora.id for request in engine.seen] == [first.id, second.id]
    assert [call[:2] for call in engine.calls if "lora" in call[0]] == [
        ("add_lora", first.id), ("add_lora", second.id), ("remove_lora", first.id),
        ("remove_lora", second.id)]


def test_a_stream_that_is_left_early_leaves_nothing_unasked():
    """asyncio prints, when it collects a future, that nobody asked for its exception."""
    async def scenario(engine, versioned, generation):
        said = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
        params = generation.parameters(SamplingFields(max_tokens=50), row=0, streamed=True,
                                       logprobs=0)
        pieces = generation.all_pieces([[5], [6]], [params, params], model=None)
        await anext(pieces)
        await pieces.aclose()
        del pieces
        gc.collect()
        assert versioned.open_requests == 0 and not said

    run(scenario)
