"""``BridgeDriver`` around a stand-in for vLLM's engine: who runs, who waits, who is let go."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from grpo.atropos.bridge import Bridge
from grpo.atropos.bridge_driver import BridgeDriver, DriverThread
from grpo.atropos.calls import Ask, Call
from grpo.policies.base import Sampling
from grpo.policies.handle import EngineError
from grpo.policies.samplers import VLLMSampler
from grpo.server.api import SamplingFields
from grpo.server.versioned import Constructors
from grpo.system.json_api import ApiError

from ..server.fake_engine import flat
from ..support import wait_until


class StepEngine:
    """Samples one token a step for every request; the token is the number of the step."""

    def __init__(self):
        self.requests, self.steps, self.aborted = {}, 0, []
        self.output_processor = SimpleNamespace(request_states={})

    def add_request(self, id, prompt, params, *, lora_request):
        if params.max_tokens == 13:
            raise ValueError("an unlucky number")
        tokens = []
        self.requests[id] = [params, tokens]
        self.output_processor.request_states[id] = SimpleNamespace(
            request_id=id, detokenizer=SimpleNamespace(num_output_tokens=lambda: len(tokens)))

    def abort_request(self, ids):
        self.aborted += ids
        for id in ids:
            del self.requests[id]

    def step(self):
        self.steps += 1
        finished = []
        for id, (params, tokens) in list(self.requests.items()):
            tokens.append(self.steps)
            if len(tokens) == params.max_tokens:
                del self.requests[id]
                finished.append(SimpleNamespace(
                    request_id=id, finished=True, outputs=[SimpleNamespace(
                        token_ids=tokens, finish_reason="length",
                        logprobs=flat([[(token, -token / 4)] for token in tokens]))]))
        return finished


class Side:
    """Both sides of a bridge in one thread."""

    def __init__(self, **options):
        self.loop = asyncio.new_event_loop()
        self.bridge = Bridge(tokenizer=None, eos_token_ids=(1,), max_model_len=64, vocab_size=99,
                             model_names=("policy",), temperature_only=False)
        self.engine, self.version = StepEngine(), 0
        policy = SimpleNamespace(
            engine=SimpleNamespace(llm_engine=self.engine), eos_token_ids=(1,), calls=0,
            sampling=Sampling(max_tokens=8), lora_request=None, version=lambda: self.version)
        self.driver = BridgeDriver(
            self.bridge, VLLMSampler(policy, seeded=False), make=Constructors(
                lambda *, streamed, **fields: SimpleNamespace(**fields), lora_request=None,
                no_outputs=None), **options)

    def ask(self, max_tokens, **fields):
        call = Call([5, 6], Ask(SamplingFields(**fields)), 0, max_tokens,
                    self.loop.create_future())
        self.bridge.add([call])
        return call

    def settle(self):
        self.loop.run_until_complete(asyncio.sleep(0))

    def result(self, call):
        self.settle()
        return call.future.result()


def test_calls_join_while_others_run():
    side = Side()
    long = side.ask(4)
    side.driver.advance()
    side.version = 3
    short = side.ask(2)
    side.driver.advance()
    side.driver.advance()
    assert side.result(short).token_ids == [2, 3] and not long.future.done()
    assert side.result(short).versions == [(3, 2)]
    side.driver.advance()
    assert side.result(long).token_ids == [1, 2, 3, 4]
    assert side.result(long).versions == [(0, 1), (3, 3)]
    assert side.bridge.records.counts["recorded"] == 2 and side.driver.running == 0


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=20),
       st.sampled_from([None, 1, 3]))
def test_every_call_is_answered_once_whenever_it_comes(plan, max_running):
    side = Side(max_running=max_running)
    calls = []
    for size, steps_before in plan:
        for _ in range(steps_before):
            side.driver.advance()
            assert side.driver.running <= (max_running or len(plan))
        calls.append(side.ask(size))
    while side.bridge.waiting or side.driver.running:
        side.driver.advance()
    for call, (size, _) in zip(calls, plan, strict=True):
        tokens = side.result(call).token_ids
        assert tokens == list(range(tokens[0], tokens[0] + size))  # not one step was missed
    assert side.bridge.counts["replies"] == side.bridge.counts["calls"] == len(plan)


def test_what_the_engine_refuses_is_an_error_of_that_request_alone():
    side = Side()
    bad, biased, good = side.ask(13), side.ask(1, logit_bias={"no id": 1.0}), side.ask(1)
    side.driver.advance()
    with pytest.raises(ApiError, match="an unlucky number"):
        side.result(bad)
    with pytest.raises(ApiError, match="they must be token ids"):
        side.result(biased)
    assert side.result(good).token_ids == [1]


def test_calls_that_are_put_back_are_first_in_line_again():
    side = Side()
    first, second, third = (side.ask(1) for _ in range(3))
    taken = side.bridge.take(2)
    assert taken == [first, second]
    side.bridge.cancel([third])
    fourth = side.ask(1)
    side.bridge.put_back(taken)
    assert side.bridge.take() == [first, second, fourth]


def test_at_least_one_call_must_run():
    with pytest.raises(ValueError, match="max_running=0"):
        Side(max_running=0)


def test_idle_waiting_is_short_and_does_not_step():
    side = Side()
    side.driver.advance(0.01)
    assert side.engine.steps == 0


def test_a_thread_answers_while_nobody_drives():
    side = Side()
    with DriverThread(side.driver) as thread:
        call = side.ask(3)
        wait_until(lambda: side.settle() or call.future.done(), seconds=20.0)
        thread.check()
    assert call.future.result().token_ids == [1, 2, 3]
    later = side.ask(1)
    side.settle()
    assert side.bridge.waiting == 1 and not later.future.done()  # it has ended


def test_what_the_thread_fails_with_is_raised_where_the_trainer_looks():
    side = Side()
    side.engine.step = lambda: 1 / 0
    with DriverThread(side.driver) as thread:
        side.ask(3)

        def failed() -> bool:
            try:
                thread.check()
            except RuntimeError as error:
                return "what answers the environments failed: ZeroDivisionError" in str(error)
            return False

        wait_until(failed, seconds=20.0)


def test_a_job_that_an_engine_elsewhere_refuses_is_answered_with_its_error():
    side = Side()
    call = side.ask(3)
    side.driver.advance()
    (job,) = side.driver._running
    side.driver._reply(job, EngineError("too long for it"))
    side.settle()
    with pytest.raises(ApiError, match="too long for it") as error:
        call.future.result()
    assert error.value.status == 500
