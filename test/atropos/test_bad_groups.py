"""A group that cannot be trained on is left out, counted and named; the run and its batch go on."""

from __future__ import annotations

import logging
import math
from collections import Counter

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from grpo import data
from grpo.atropos.advantages import GivenAdvantage
from grpo.atropos.assemble import GroupAssembler, StreamSource
from grpo.atropos.client import AtroposClient
from grpo.atropos.collector import AtroposCollector
from grpo.atropos.convert import GroupConverter
from grpo.atropos.hub_server import HubServer
from grpo.atropos.schemas import MAX_VALUE, MIN_LOG_PROB, parse_group
from grpo.atropos.stream import BatchStream
from grpo.atropos.trainer import CheckedCollector, GroupTeacher
from grpo.atropos.wire_json import GroupError
from grpo.objectives import GRPOLoss
from grpo.objectives.advantages import GroupAdvantage
from grpo.objectives.grpo import total_loss

from .groups import group, registration

VOCABULARY = 23
TEACHER = {"distill_logprobs": [[[-1.0]] * 3] * 2}

# The groups that ended a run, and what they are counted as.
BAD = {
    "token outside the vocabulary": (group(tag=VOCABULARY), "unknown_token"),
    "log-prob": (group(inference_logprobs=[[1.0, -1e39, -1.0]] * 2), "out_of_range"),
    "log-prob in float32": (group(inference_logprobs=[[1.0, -1e30, -1.0]] * 2), "out_of_range"),
    "reference's log-prob": (group(ref_logprobs=[[1.0, -1e39, -1.0]] * 2), "out_of_range"),
    "advantage": (group(advantages=[1e39, 0.0]), "out_of_range"),
    "advantage in float32": (group(advantages=[-1e30, 0.0]), "out_of_range"),
    "advantage of a token": (group(advantages=[[0.0, 1e39, 0.0]] * 2), "out_of_range"),
    "score": (group() | {"scores": [1e39, 0.0]}, "out_of_range"),
    "score in float32": (group() | {"scores": [0.0, -1e38]}, "out_of_range"),
    "images": (group(images=["a.png"]), "images"),
    "temperature as text": (group(generation_params={"temperature": "hot"}), "bad_type"),
    "temperature as list": (group(overrides=[{"temperature": [1.0]}, {}]), "bad_type"),
    "temperature below 0": (group(group_overrides={"temperature": -1.0}), "bad_type"),
    "temperature of 19 digits": (group(generation_params={"temperature": 10**18}), "bad_type"),
    "teacher's token of 64 bits": (
        group(distill_token_ids=[[[2**63]] * 3] * 2, **TEACHER), "bad_token"),
    "teacher's token below 0": (group(distill_token_ids=[[[-1]] * 3] * 2, **TEACHER), "bad_token"),
    "teacher's token outside": (
        group(distill_token_ids=[[[VOCABULARY]] * 3] * 2, **TEACHER), "unknown_token"),
    "teacher's log-prob": (group(distill_token_ids=[[[1]] * 3] * 2,
                                 distill_logprobs=[[[900.0]] * 3] * 2), "out_of_range"),
}


def converter(**options) -> GroupConverter:
    return GroupConverter(pad_token_id=0, vocab_size=VOCABULARY, **options)


class Groups:
    """A source that parses like the client, and gives each group once."""

    def __init__(self, *objects) -> None:
        self.objects = list(objects)

    def __call__(self, timeout):
        found, self.objects = self.objects[:1], self.objects[1:]
        return [parse_group(obj) for obj in found]


@pytest.mark.parametrize("name", BAD)
def test_it_is_refused_by_a_word(name):
    obj, reason = BAD[name]
    with pytest.raises(GroupError) as caught:
        converter().check(parse_group(obj))
    assert caught.value.reason == reason


def test_through_the_hub_each_is_counted_named_and_never_served_again(caplog):
    # One batch of the hub has a good group before and after a bad one.
    with HubServer() as hub:
        client = AtroposClient(hub.url, timeout=10.0)
        with BatchStream(client, registration(batch_size=4), poll_seconds=0.01) as stream:
            assembler = GroupAssembler(StreamSource(stream), converter(temperature=1.0), rows=4)
            collector = AtroposCollector(assembler, timeout=20.0)
            tags = []
            for number, (obj, _) in enumerate(BAD.values()):
                client.send(group(tag=6 + number % 8, inference_logprobs=[[1.0, -1, -1]] * 2))
                client.send(obj)
            for _ in range(2):
                client.send(group(tag=6, inference_logprobs=[[1.0, -1, -1]] * 2))
            with caplog.at_level(logging.WARNING, "grpo"):
                for _ in range(len(BAD) // 2 + 1):
                    batch = collector.collect()
                    tags += batch[data.TOKENS][::2, 2].tolist()
        counted = {name.removeprefix("atropos/groups_rejected_"): count
                   for name, count in collector.metrics.items() if "groups_rejected" in name}
        hub_says = client.status()["hub"]
    expected = Counter(reason for _, reason in BAD.values())
    assert counted == expected
    assert tags == [6 + number % 8 for number in range(len(BAD))] + [6, 6]
    assert hub_says["handed_out_again"] == 0 and hub_says["queued_sequences"] == 0
    for reason in expected:  # each is said once, not once a group
        assert caplog.text.count(f"({reason})") == 1


def test_a_batch_that_is_an_answer_of_another_sampling_is_passed_over():
    cold = group(generation_params={"temperature": 0.5}, inference_logprobs=[[1.0, -1, -1]] * 2)
    good = group(tag=9, inference_logprobs=[[1.0, -1, -1]] * 2)
    collector = CheckedCollector(
        GroupAssembler(Groups(cold, good), converter(temperature=1.0), rows=2), timeout=5.0)
    assert collector.collect()[data.TOKENS][0, 2] == 9
    collector.assembler.source = Groups(good)
    collector.collect()
    assert collector.metrics["atropos/batches_left_out"] == 1


def test_a_batch_without_a_trained_token_is_passed_over():
    cut = {"tokens": [[5, 6, 7]], "masks": [[-100, -100, 7]], "scores": [1.0]}
    good = {"tokens": [[5, 6]], "masks": [[-100, 6]], "scores": [1.0],
            "inference_logprobs": [[1.0, -1.0]]}
    collector = CheckedCollector(
        GroupAssembler(Groups(cut, good), converter(seq_len=2), rows=1), timeout=5.0)
    assert collector.collect()[data.ASSISTANT_MASK].sum() == 1


def test_only_batch_after_batch_of_another_sampling_ends_the_run():
    cold = group(generation_params={"temperature": 0.5}, inference_logprobs=[[1.0, -1, -1]] * 2)
    collector = CheckedCollector(
        GroupAssembler(Groups(*[cold] * 8), converter(temperature=1.0), rows=2), timeout=5.0)
    with pytest.raises(ValueError, match="8 batches in a row .* temperature 0.5"):
        collector.collect()


def test_one_batch_without_a_teacher_does_not_end_the_run():
    taught = group(distill_token_ids=[[[1]] * 3] * 2, **TEACHER)
    plain, with_teacher = (converter(distill_topk=1)([parse_group(one)])
                           for one in (group(), taught))
    teacher = GroupTeacher()
    teacher(plain)
    teacher(with_teacher)
    for _ in range(20):
        teacher(plain)
    teacher = GroupTeacher()
    with pytest.raises(ValueError, match="no group of the first 8 batches"):
        for _ in range(8):
            teacher(plain)


EXTREME = st.sampled_from([-MAX_VALUE, -1.0, 0.0, 1e-30, 1.0, MAX_VALUE])
LOG_PROB = st.sampled_from([MIN_LOG_PROB, -1.0, -1e-30, 0.0])


@given(data_=st.data(), size=st.integers(1, 3))
def test_the_gradient_of_whatever_is_let_in_is_finite(data_, size, model):
    def each(value):
        return st.lists(value, min_size=size, max_size=size)

    def of_tokens(value):
        return each(st.lists(value, min_size=3, max_size=3))

    fields = {"scores": data_.draw(each(EXTREME)), "inference_logprobs": data_.draw(
        of_tokens(LOG_PROB)), "ref_logprobs": data_.draw(of_tokens(LOG_PROB))}
    if data_.draw(st.booleans()):
        fields["advantages"] = data_.draw(st.one_of(each(EXTREME), of_tokens(EXTREME)))
    one = parse_group(group(size=size) | fields)
    batch = GivenAdvantage(GroupAdvantage(estimator=data_.draw(
        st.sampled_from(["group_mean", "group_norm"]))))(converter()([one]))
    loss = GRPOLoss(model, kl_to_ref_coeff=0.1)
    model.zero_grad()
    total_loss(loss(batch, normalizer=loss.normalizer(batch))).backward()
    norm = torch.nn.utils.get_total_norm(
        [p.grad.float() for p in model.parameters() if p.grad is not None])
    assert math.isfinite(norm)


@pytest.fixture(scope="module")
def model():
    from ..conftest import make_tiny_model

    return make_tiny_model(dtype=torch.float32)


def test_without_an_api_the_run_says_so_and_does_not_blame_the_environments(caplog):
    client = AtroposClient("http://127.0.0.1:9", timeout=1.0)
    with BatchStream(client, registration(), poll_seconds=0.05) as stream:
        collector = AtroposCollector(
            GroupAssembler(StreamSource(stream), converter(), rows=2), timeout=0.5)
        with (caplog.at_level(logging.WARNING, "grpo"),
              pytest.raises(TimeoutError, match="the Atropos API did not answer")):
            collector.collect()
    assert caplog.text.count("nothing answers as the Atropos API") == 1
