"""The bridge: requests of environments over HTTP answered by the policy, rewards in hindsight."""

from __future__ import annotations

import http.client
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from grpo import data
from grpo.atropos.assemble import GroupAssembler
from grpo.atropos.collector import AtroposCollector
from grpo.atropos.convert import GroupConverter
from grpo.atropos.records import Records
from grpo.policies.client import EngineCallError, EngineClient

from ..support import wait_until
from .environments import (
    EOS,
    DicePolicy,
    Environment,
    Groups,
    make_collector,
    make_driver,
    playing,
    post,
    serving,
)


@pytest.fixture
def served(tokenizer):
    """A bridge that a policy of dice answers from a thread, and a client of it."""
    with serving(tokenizer) as (bridge, url):
        policy = DicePolicy()
        driver, stop = make_driver(bridge, policy), threading.Event()

        def drive():
            while not stop.is_set():
                driver.advance(0.02)

        thread = threading.Thread(target=drive, daemon=True)
        thread.start()
        try:
            yield bridge, policy, EngineClient(url, timeout=10)
        finally:
            stop.set()
            thread.join(10)


# -- what environments see -------------------------------------------------------------------------


def test_generate_answers_n_samples_with_the_policys_tokens_and_log_probs(served):
    bridge, policy, client = served
    policy.version = lambda: 7
    out = post(client, "/generate", prompt={"prompt_token_ids": [10, 11]}, n=5, logprobs=0,
               max_tokens=6)
    said = {(tokens, values) for prompt, tokens, values, _ in policy.said if prompt == (10, 11)}
    assert len(out["token_ids"]) == len(said) == 5
    for tokens, positions, reason, spans in zip(
            out["token_ids"], out["logprobs"], out["finish_reasons"], out["policy_version"],
            strict=True):
        values = tuple(value for (position,) in positions for value in position.values())
        assert (tuple(tokens), values) in said
        assert reason == ("stop" if tokens[-1] == EOS else "length")
        assert spans == [[7, len(tokens)]]


def test_chat_and_completions_are_rendered_and_decoded_by_the_models_tokenizer(served, tokenizer):
    _, policy, client = served
    out = post(client, "/v1/chat/completions", model="policy", max_tokens=6, logprobs=True,
               messages=[{"role": "user", "content": "2+2="}])
    prompt, tokens, values, _ = policy.said[-1]
    assert tokenizer.decode(prompt) == "user: 2+2=\nassistant: "
    choice = out["choices"][0]
    assert choice["message"]["content"] == tokenizer.decode(tokens, skip_special_tokens=True)
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == list(values)
    out = post(client, "/v1/completions", prompt="2+2=", max_tokens=6, n=2)
    assert [choice["token_ids"] for choice in out["choices"]] == [
        list(tokens) for _, tokens, _, _ in policy.said[-2:]]


def test_each_request_is_sampled_as_it_asks(served):
    _, policy, client = served
    with ThreadPoolExecutor(3) as pool:
        for asked in pool.map(lambda o: len(post(client, "/generate", prompt="a", temperature=o[0],
                                                 max_tokens=o[1])["token_ids"][0]) <= o[1],
                              [(0.0, 2), (0.7, 2), (0.7, 5), (1.0, 99)]):
            assert asked
    assert set(policy.asked) == {(0.0, 2), (0.7, 2), (0.7, 5), (1.0, 6)}
    # No two calls draw from the same random numbers, however they sample.
    assert len(set(policy.numbers)) == len(policy.asked)


def test_stop_strings_and_stop_tokens_cut_the_answer_where_they_appear(tokenizer):
    with serving(tokenizer) as (bridge, url):
        client = EngineClient(url, timeout=10)

        def answered(text, **options):
            with ThreadPoolExecutor(1) as pool:
                future = pool.submit(post, client, "/generate", prompt="a", **options)
                (call,) = bridge.take(timeout=5)
                tokens = tokenizer.encode(text)
                bridge.reply(call, tokens, [-1.0] * len(tokens), versions=[(0, len(tokens))])
                out = future.result(10)
            return out["text"][0], tokenizer.decode(out["token_ids"][0]), out["finish_reasons"][0]

        assert answered("one;two;", stop=";") == ("one", "one;", "stop")
        assert answered("one;two;", stop=["wo", "ne;"]) == ("o", "one;", "stop")
        assert answered("one;two", stop=";", include_stop_str_in_output=True)[0] == "one;"
        assert answered("one", stop="x") == ("one", "one", "stop")
        assert answered("one", stop_token_ids=tokenizer.encode("n")) == ("o", "on", "stop")
        assert answered("one", max_tokens=2) == ("on", "on", "length")


def test_versions_are_those_of_the_tokens_that_are_left(tokenizer):
    with serving(tokenizer) as (bridge, url), ThreadPoolExecutor(1) as pool:
        future = pool.submit(post, EngineClient(url, timeout=10), "/generate", prompt="a",
                             max_tokens=3)
        (call,) = bridge.take(timeout=5)
        bridge.reply(call, [66] * 6, [-1.0] * 6, versions=[(1, 2), (2, 2), (3, 2)])
        assert future.result(10)["policy_version"] == [[[1, 2], [2, 1]]]


@pytest.mark.parametrize(("options", "message"), [
    ({"top_p": 0.9}, "top_p is not served here: the policy samples with a temperature alone"),
    ({"stop": ["a", ""]}, "stop contains an empty text"),
    ({"seed": 3}, "seed is not served here"),
    ({"ignore_eos": True}, "ignore_eos is not served here"),
    ({"logprobs": 5}, "logprobs is not served here"),
    ({"prompt_logprobs": 1}, "prompt_logprobs are not served here"),
    ({"model": "other"}, "model='other' is not served here; known are policy"),
    ({"prompt": [5] * 600}, "600 tokens but prompt and response share 512"),
])
def test_what_the_policy_cannot_do_is_refused_with_a_reason(served, options, message):
    with pytest.raises(EngineCallError, match=message):
        post(served[2], "/generate", **{"prompt": "a", **options})


def test_a_client_that_leaves_is_not_answered_and_disturbs_nobody(tokenizer):
    with serving(tokenizer) as (bridge, url):
        address = url.removeprefix("http://")
        leaver = http.client.HTTPConnection(address, timeout=5)
        leaver.request("POST", "/generate", json.dumps({"prompt": "a", "n": 3}))
        (taken,) = bridge.take(1, timeout=5)
        leaver.close()
        wait_until(lambda: bridge.counts["cancelled"] == 3)
        assert bridge.waiting == 0 and taken.cancelled
        bridge.reply(taken, [66, EOS], [-1.0, -1.0], versions=[(0, 2)])
        bridge.put_back([taken])
        assert bridge.waiting == 0 and len(bridge.records) == 0
        driver, client = make_driver(bridge), EngineClient(url, timeout=10)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(post, client, "/generate", prompt="b")
            wait_until(lambda: driver.advance(0.02) or future.done())
        assert len(bridge.records) == 1


def test_the_server_says_why_it_does_not_answer(tokenizer):
    with serving(tokenizer, max_waiting=2, request_timeout=0.2) as (bridge, url):
        client = EngineClient(url, timeout=10)
        with pytest.raises(EngineCallError, match="did not answer within 0.2 s; it may be train"):
            post(client, "/generate", prompt="a")
        with pytest.raises(EngineCallError, match="0 calls wait .* of at most 2; start fewer"):
            post(client, "/generate", prompt="a", n=3)
        assert client.alive()
        bridge.close("the engine died")
        with pytest.raises(EngineCallError, match="the engine died"):
            post(client, "/generate", prompt="a")
        assert not client.alive()


def test_a_token_is_wanted_where_one_is_set(tokenizer):
    with serving(tokenizer, token="secret") as (_, url):
        with pytest.raises(EngineCallError, match="Authorization: Bearer"):
            post(EngineClient(url, timeout=5), "/generate", prompt="a")
        assert EngineClient(url, token="secret", timeout=5).call("GET", "/v1/models")
    with pytest.raises(ValueError, match="host='0.0.0.0' opens the policy"):
        with serving(tokenizer, host="0.0.0.0"):
            pass


# -- rewards in hindsight --------------------------------------------------------------------------


def expected_values(policy):
    """(tokens before, tokens) of everything that was said -> its log-probs and version."""
    table = {}
    for prompt, tokens, values, version in policy.said:
        table.setdefault((prompt, tokens), []).append((values, version))
    return table


def check_rows(batch, policy):
    """Every trained token has the log-prob with which the policy said it."""
    table = expected_values(policy)
    for i in range(len(batch)):
        tokens = batch[data.TOKENS][i].tolist()
        trained = batch[data.ASSISTANT_MASK][i].tolist()
        start = 0
        while True in trained[start:]:
            start = trained.index(True, start)
            end = trained.index(False, start) if False in trained[start:] else len(trained)
            key = tuple(tokens[:start]), tuple(tokens[start:end])
            values = tuple(batch[data.LOG_PROBS][i, start:end].tolist())
            assert values in [known for known, _ in table[key]]
            start = end


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 999), with_log_probs=st.booleans(), turns=st.integers(1, 3))
def test_every_trajectory_that_comes_back_is_matched(tokenizer, seed, with_log_probs, turns):
    """Several turns, n > 1, dropped groups, evaluation calls; no environment needs log-probs."""
    with serving(tokenizer) as (bridge, url):
        groups, policy = Groups(), DicePolicy(seed=seed)
        collector = make_collector(bridge, groups, policy)
        environments = [Environment(url, groups, seed=seed + i, turns=turns,
                                    with_log_probs=with_log_probs) for i in range(4)]
        with playing(environments):
            batches = [collector.collect() for _ in range(3)]
    for batch in batches:
        assert len(batch) == 12 and not batch[data.LOG_PROBS].isnan().any()
        assert batch[data.ROW_MASK].all()
        check_rows(batch, policy)
    counts = bridge.records.counts
    assert counts["rows_matched"] >= 36
    assert counts["rows_unmatched"] == counts["rows_partly_matched"] == 0


def test_every_token_carries_the_version_that_sampled_it_and_old_ones_are_dropped(tokenizer):
    now = {"version": 0}
    with serving(tokenizer) as (bridge, url):
        groups = Groups()
        policy = DicePolicy(version=lambda: now["version"])
        collector = make_collector(bridge, groups, policy, version=lambda: now["version"],
                                   max_staleness=1)
        with playing([Environment(url, groups, seed=i, turns=3) for i in range(4)]):
            for now["version"] in range(4):
                batch = collector.collect()
                assert (batch[data.POLICY_VERSION] >= now["version"] - 1).all()
                table = expected_values(policy)
                check_rows(batch, policy)
                for i in range(len(batch)):
                    tokens = batch[data.TOKENS][i].tolist()
                    said = [v for (prompt, answer), entries in table.items() for _, v in entries
                            if tokens[: len(prompt) + len(answer)] == [*prompt, *answer]]
                    assert int(batch[data.POLICY_VERSION][i]) in said


def test_groups_sampled_too_long_ago_are_dropped_and_counted(tokenizer):
    now = {"version": 0}
    with serving(tokenizer) as (bridge, url):
        groups, late = Groups(), Groups()
        policy = DicePolicy(version=lambda: now["version"])
        environment = Environment(url, late, seed=1, turns=1, dropped=0.0, episodes=4)
        driver = make_driver(bridge, policy)
        with playing([environment]):
            wait_until(lambda: driver.advance(0.02) or not environment.is_alive())
            now["version"] = 5
            collector = make_collector(bridge, groups, policy, version=lambda: now["version"],
                                       max_staleness=2)
            for group in late(1.0) + late(0.0):
                groups.queue.put(group)
            with playing([Environment(url, groups, seed=2, turns=1, dropped=0.0)]):
                batch = collector.collect()
        assert (batch[data.POLICY_VERSION] == 5).all()
        assert collector.metrics["atropos/groups_stale"] == 2


def test_nothing_waits_for_a_reward(tokenizer):
    """Environments that never send a group are served all the same, in bounded memory."""
    with serving(tokenizer, records=Records(max_tokens=50)) as (bridge, url):
        groups, policy = Groups(), DicePolicy()
        collector = make_collector(bridge, groups, policy, timeout=2.0)
        environments = [Environment(url, groups, seed=i, dropped=1.0) for i in range(3)]
        with playing(environments):
            with pytest.raises(TimeoutError, match=r"no group finished within 2 s; 0 of 12 rows"):
                collector.collect()
        assert min(environment.played for environment in environments) > 1
        assert bridge.records.tokens <= 50
        assert bridge.records.counts["expired"] > 10


def test_texts_without_log_probs_are_restored_from_the_records(tokenizer):
    """An environment that chats and tokenises what it reads, without end tokens."""
    with serving(tokenizer) as (bridge, url), ThreadPoolExecutor(4) as pool:
        groups, policy, client = Groups(), DicePolicy(), EngineClient(url, timeout=10)

        def play(i):
            out = post(client, "/v1/chat/completions", max_tokens=6, n=2,
                       messages=[{"role": "user", "content": f"{i}?"}])
            prompt = tokenizer.encode(f"user: {i}?\nassistant: ")
            answers = [tokenizer.encode(c["message"]["content"]) for c in out["choices"]]
            if all(answers):
                groups.send({"tokens": [prompt + a for a in answers], "scores": [0.0, 1.0],
                             "masks": [[-100] * len(prompt) + a for a in answers]})

        plays = [pool.submit(play, i) for i in range(10)]
        batch = make_collector(bridge, groups, policy, rows=8).collect()
        for future in plays:
            future.cancel()
    assert not batch[data.LOG_PROBS].isnan().any()
    said = {(prompt, tokens[: len(tokens) - (tokens[-1] == EOS)]):
            values for prompt, tokens, values, _ in policy.said}
    for i in range(8):
        start, size = int(batch[data.PROMPT_MASK][i].sum()), int(data.lengths(batch)[i])
        tokens = batch[data.TOKENS][i].tolist()
        values = said[tuple(tokens[:start]), tuple(tokens[start:size])]
        assert batch[data.LOG_PROBS][i, start:size].tolist() == list(values[: size - start])


def test_log_probs_that_nobody_knows_need_somebody_to_recompute_them(tokenizer):
    with serving(tokenizer) as (bridge, _):
        groups = Groups()
        groups.send({"tokens": [[5, 6]] * 12, "masks": [[-100, 6]] * 12, "scores": [0.0] * 12})
        with pytest.raises(ValueError, match=r"log-probs of 12 of 12 rows .* recompute="):
            make_collector(bridge, groups, DicePolicy()).collect()


def test_pull_form_collects_without_a_driver(monkeypatch):
    groups = Groups()
    group = {"tokens": [[5, 6], [5, 7]], "masks": [[-100, 6], [-100, 7]], "scores": [1.0, 0.0],
             "inference_logprobs": [[1.0, -1.0], [1.0, -2.0]]}
    for _ in range(3):
        groups.send(group)
    assembler = GroupAssembler(groups, GroupConverter(pad_token_id=0), rows=5)
    collector = AtroposCollector(assembler, timeout=0.2)
    assert collector.collect()[data.GROUP_ID].tolist() == [0, 0, 1, 1]
    assert collector.metrics["atropos/groups"] == 2
    with pytest.raises(TimeoutError, match=r"no group finished within 0.2 s; 2 of 5 rows"):
        collector.collect()
    monkeypatch.setattr("grpo.atropos.collector._LAST_GROUPS", 0.1)
    collector.timeout, collector.ended = 60.0, lambda: True
    with pytest.raises(TimeoutError, match=r"no group finished within 0.1 s; 2 of 5 rows"):
        collector.collect()
    state = collector.state_dict()
    again = GroupAssembler(groups, GroupConverter(pad_token_id=0), rows=2)
    again.load_state_dict(state)
    groups.send(group)
    assert again.poll(0.0) and again.batch()[data.GROUP_ID].tolist() == [2, 2]


@pytest.mark.slow
def test_a_policy_learns_through_the_bridge(tokenizer, byte_model):
    """Two turns, no log-probs sent: the first ratios are 1, and the rewarded tokens become likely.
    """
    from grpo.atropos.advantages import GivenAdvantage
    from grpo.objectives import GRPOLoss
    from grpo.objectives.advantages import GroupAdvantage
    from grpo.policies.base import Sampling
    from grpo.policies.transformers import TransformersPolicy
    from grpo.training.learner import Learner
    from grpo.training.optim import MasterAdamW
    from grpo.weights.shared import SameModule

    weights = SameModule(byte_model)
    learner = Learner(
        GRPOLoss(byte_model), MasterAdamW(byte_model.parameters(), lr=0.2), rows_per_step=48,
        num_micro_batches=2)
    advantage = GivenAdvantage(GroupAdvantage())

    def share_of_low_tokens(trained):
        return sum(token < 100 for token in trained) / len(trained)

    rewards = []
    with serving(tokenizer) as (bridge, url):
        groups = Groups()
        policy = TransformersPolicy(
            byte_model, Sampling(max_tokens=6), pad_token_id=0, eos_token_ids=(EOS,),
            max_model_len=128, version=lambda: weights.version)
        collector = make_collector(bridge, groups, policy, rows=48, max_staleness=1,
                                   version=lambda: weights.version)
        with playing([Environment(url, groups, seed=i, turns=2, dropped=0.1, group_size=6,
                                  score=share_of_low_tokens) for i in range(8)]):
            for iteration in range(12):
                batch = collector.collect()
                metrics = learner.update(advantage(batch), iteration=iteration)
                if iteration == 0:
                    assert metrics["policy/ratio_p01"] == pytest.approx(1, abs=1e-4)
                    assert metrics["policy/ratio_p99"] == pytest.approx(1, abs=1e-4)
                rewards.append(batch[data.REWARD].mean().item())
                weights.publish()
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3, rewards
