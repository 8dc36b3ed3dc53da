"""Generation that asks vLLM's front end for finished responses alone samples the very same."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from grpo.policies import collect, decode_steps
from grpo.policies.base import Sampling
from grpo.policies.vllm import VLLMPolicy

pytestmark = pytest.mark.vllm

# More rows than the engine's 64 places, of all lengths.
PROMPTS = [[5 + (7 * row + at) % 200 for at in range(1 + 5 * row % 37)] for row in range(70)]


@pytest.fixture
def make_policy(engine):
    def make(*, eos=(1,), max_tokens=10, temperature=1.0, **options) -> VLLMPolicy:
        return VLLMPolicy(engine, Sampling(max_tokens, temperature, seed=3), pad_token_id=0,
                          eos_token_ids=eos, **options)

    return make


@pytest.fixture
def front_end(engine):
    front_end = engine.llm_engine.output_processor
    yield front_end
    assert "process_outputs" not in vars(front_end)
    assert "update_from_output" not in vars(engine.llm_engine.engine_core.engine_core.scheduler)
    assert not front_end.request_states


def in_the_ordinary_way(monkeypatch) -> None:
    monkeypatch.setattr(collect, "responses_alone", lambda *_: False)


def two_calls(policy, prompts=PROMPTS) -> list:
    policy.calls = 0
    return [policy.generate_from_ids(prompts), policy.generate_from_ids(prompts[:9])]


def assert_same(got, expected) -> None:
    for one, other in zip(got, expected, strict=True):
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        for key in one.keys(True, True):
            assert torch.equal(one[key], other[key]), key


@pytest.mark.parametrize("options", [
    {}, {"temperature": 0.0}, {"eos": tuple(range(2, 60))}, {"ignore_eos": True},
    {"max_tokens": 1}], ids=[
        "sampled", "greedy", "many end tokens", "no end token", "one token"])
def test_tokens_and_log_probs_are_the_same_to_the_bit(make_policy, front_end, monkeypatch, options):
    policy = make_policy(**options)
    seen = []
    ordinary = type(front_end).process_outputs
    monkeypatch.setattr(type(front_end), "process_outputs", lambda self, outputs, *args, **kwargs: (
        seen.extend(outputs), ordinary(self, outputs, *args, **kwargs))[1])
    collected = two_calls(policy)
    assert len(seen) == len(PROMPTS) + 9  # one output a row
    in_the_ordinary_way(monkeypatch)
    assert_same(two_calls(policy), collected)


def test_rows_are_told_as_they_finish_with_the_tokens_of_the_end(make_policy, front_end):
    policy = make_policy(eos=tuple(range(2, 60)))
    told = []
    prompts = policy.pad_prompts(PROMPTS)
    batch = policy.stream(prompts, lambda row, tokens: told.append((row, list(tokens))))
    rows = [row[mask].tolist() for row, mask in
            zip(batch["tokens", "full"], batch["masks", "all_assistant_mask"], strict=True)]
    assert sorted(told) == list(enumerate(rows))
    assert told != sorted(told)  # short rows before long ones


@pytest.mark.parametrize("ordinary", [False, True], ids=["collected", "ordinary"])
def test_an_interrupted_call_leaves_nothing_behind(make_policy, engine, front_end, monkeypatch,
                                                   ordinary):
    if ordinary:
        in_the_ordinary_way(monkeypatch)
    policy = make_policy()
    expected = two_calls(policy)
    core = engine.llm_engine.engine_core
    steps = iter([core.get_output] * 4)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(core, "get_output", lambda: next(steps, interrupt)())
        policy.generate_from_ids(PROMPTS)
    assert not engine.llm_engine.has_unfinished_requests()
    assert_same(two_calls(policy), expected)


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize(("fault", "message"), [
    (lambda output: output.logprobs._replace(logprob_token_ids=output.logprobs.logprob_token_ids
                                             + 1), "returned log-probs of"),
    (lambda output: None, "returned 0 log-probs"),
    (lambda output: output.logprobs._replace(
        logprob_token_ids=output.logprobs.logprob_token_ids[:-1]), "returned log-probs of"),
], ids=["of other tokens", "none", "too few"])
def test_wrong_log_probs_are_refused(make_policy, engine, front_end, monkeypatch, fault, message):
    policy = make_policy(max_tokens=3, ignore_eos=True)
    expected = two_calls(policy)
    executor = type(engine.llm_engine.model_executor)
    sound = executor.sample_tokens

    def faulty(self, *args, **kwargs):
        output = sound(self, *args, **kwargs)
        output.logprobs = fault(output)
        return output

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=message):
        patch.setattr(executor, "sample_tokens", faulty)
        policy.generate_from_ids(PROMPTS)
    assert_same(two_calls(policy), expected)


@pytest.mark.parametrize("release", ["known", "unknown"])
def test_log_probs_that_are_not_simple_come_as_outputs(make_policy, front_end, monkeypatch,
                                                       release):
    policy = make_policy()
    expected = two_calls(policy)
    if release == "unknown":
        monkeypatch.setattr(decode_steps, "_KNOWN_RELEASES", ())
    else:
        monkeypatch.setattr(decode_steps, "simple_log_probs", lambda output: None)
    assert_same(two_calls(policy), expected)


def test_log_probs_of_several_tokens_a_request_stay_as_they_are():
    from vllm.v1.outputs import LogprobsLists

    def output(cu=None):
        lists = LogprobsLists(np.array([[4], [9], [6]]), np.array([[-1.0], [-2.0], [-0.5]]),
                              np.zeros(3), cu)
        return SimpleNamespace(logprobs=lists, sampled_token_ids=[[4], [], [6]])

    simple, several = output(), output(cu=[0, 1, 2])
    assert decode_steps.simple_log_probs(simple) == [-1.0, -2.0, -0.5]
    assert simple.logprobs.slice_request(2, 1) == [-0.5]
    assert decode_steps.simple_log_probs(several) is None
    assert isinstance(several.logprobs, LogprobsLists)


def test_what_more_is_wanted_comes_in_the_ordinary_way(make_policy, engine, front_end, monkeypatch):
    policy = make_policy()
    params = policy.sampling_params(policy.sampling)
    assert collect.responses_alone(engine, params)
    for name, value in {"n": 2, "logprobs": 1, "prompt_logprobs": 0, "detokenize": True,
                        "stop": ["a"]}.items():
        other = params.clone()
        setattr(other, name, value)
        assert not collect.responses_alone(engine, other), name
    for name in ("log_stats", "tracing_enabled", "request_states"):
        with monkeypatch.context() as patch:
            patch.setattr(front_end, name, {"another": "request"})
            assert not collect.responses_alone(engine, params), name
    assert not collect.responses_alone(SimpleNamespace(llm_engine=object()), params)
    with monkeypatch.context() as patch:
        patch.setattr("vllm.v1.outputs.LogprobsLists._fields", ("token_ids",))
        assert not collect.responses_alone(engine, params)
