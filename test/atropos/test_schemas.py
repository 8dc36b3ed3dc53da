"""Groups on the wire: what is read, what is refused and under which name."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.atropos.schemas import EnvRegistration, Registration, check_wire, parse_group
from grpo.atropos.wire_json import GroupError, read_json, write_json

from .groups import env_registration, group, registration

NAN = float("nan")
COMPLETE = group(
    advantages=[[0.0, 1.0, 1.0], [0.0, -1.0, -1.0]], ref_logprobs=[[1.0, -0.5, -0.5]] * 2,
    inference_logprobs=[[1.0, -0.25, -0.125]] * 2, generation_params={"temperature": 0.7},
    messages=[[{"role": "user", "content": "5"}]] * 2, overrides=[{"temperature": 1.0}, {}],
    group_overrides={"temperature": 0.9}, images=["x"], env_id=3, group_uid="a",
    distill_token_ids=[[[1, 2], [3, 4], [5, 6]]] * 2,
    distill_logprobs=[[[-1.0, -2.0], [-1.0, -2.0], [-1.0, -2.0]]] * 2)


def test_a_complete_group_is_read_as_it_was_sent():
    assert parse_group(COMPLETE).to_wire() == COMPLETE
    assert len(parse_group(COMPLETE)) == 2


def test_what_is_left_out_is_none():
    parsed = parse_group(group())
    for name in COMPLETE.keys() - {"tokens", "masks", "scores", "group_uid"}:
        assert getattr(parsed, name) is None


@pytest.mark.parametrize("name", ["advantages", "inference_logprobs", "messages", "overrides"])
def test_an_empty_list_counts_as_left_out(name):
    assert getattr(parse_group(group(**{name: []})), name) is None


def test_advantages_may_be_one_a_sequence():
    assert parse_group(group(advantages=[1, -1])).advantages == [1.0, -1.0]


def test_numbers_are_read_from_what_run_api_reads_them_from():
    assert parse_group(group() | {"scores": [True, "0.5"]}).scores == [1.0, 0.5]
    assert parse_group(group(env_id="3")).env_id == 3


def test_unknown_fields_are_left_alone():
    assert parse_group(group(colour="red")).to_wire().keys() == COMPLETE.keys()


BROKEN = {
    "no object": (None, "bad_type", "a group"),
    "missing": ({"tokens": [[1]], "masks": [[1]]}, "bad_type", "scores is missing"),
    "type": (group() | {"tokens": [["x"], [1]]}, "bad_type", r"tokens\[0\]\[0\]=x"),
    "no group": (group(size=0), "empty_group", "tokens"),
    "no token": (group() | {"tokens": [[], [5, 6, 7]]}, "empty_sequence", r"tokens\[0\]"),
    "scores": (group() | {"scores": [1.0]}, "bad_length", "scores has 1 entries for 2"),
    "masks": (group() | {"masks": [[-100, 6], [-100, 6, 7]]}, "bad_length", r"masks\[0\]"),
    "masks rows": (group() | {"masks": [[-100, 6, 7]]}, "bad_length", "masks has 1"),
    "log-probs": (group(inference_logprobs=[[1.0], [1.0]]), "bad_length", "inference_logprobs"),
    "references": (group(ref_logprobs=[[1.0, -1.0, -1.0]]), "bad_length", "ref_logprobs"),
    "advantages": (group(advantages=[[1.0], [1.0]]), "bad_length", r"advantages\[0\]"),
    "advantages a row": (group(advantages=[1.0]), "bad_length", "advantages has 1"),
    "advantages type": (group(advantages=["x", 1.0]), "bad_type", "advantages"),
    "overrides": (group(overrides=[{}]), "bad_length", "overrides"),
    "messages": (group(messages=[[{"role": "user", "content": ""}]]), "bad_length", "messages"),
    "message": (group(messages=[[{"role": "user"}]] * 2), "bad_type", "without role or content"),
    "one of two": (group(distill_token_ids=[[[1]] * 3] * 2), "bad_length", "go together"),
    "teacher's k": (group(distill_token_ids=[[[1, 2]] * 3] * 2,
                          distill_logprobs=[[[-1.0]] * 3] * 2), "bad_length", "distill_logprobs"),
    "teacher's tokens": (group(distill_token_ids=[[[1]]] * 2, distill_logprobs=[[[-1.0]]] * 2),
                         "bad_length", "distill_token_ids"),
    "nan score": (group() | {"scores": [0.0, NAN]}, "not_finite", r"scores\[1\]=nan"),
    "infinite": (group(inference_logprobs=[[1.0, -math.inf, 0.0]] * 2), "not_finite", "inference"),
    "nan advantage": (group(advantages=[NAN, 0.0]), "not_finite", "advantages"),
    "negative token": (group(tag=-1), "bad_token", "-1"),
    "huge token": (group(tag=2**40), "bad_token", str(2**40)),
    "flags as masks": (group() | {"masks": [[0, 1, 1]] * 2}, "bad_mask", "has 0 over token 5"),
    "all masked": (group() | {"masks": [[-100] * 3] * 2}, "nothing_trained", "masks"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_group_is_refused_by_name(case):
    obj, reason, message = BROKEN[case]
    with pytest.raises(GroupError, match=message) as caught:
        parse_group(obj)
    assert caught.value.reason == reason


def test_a_queue_takes_what_only_a_trainer_must_refuse():
    for obj in (group(advantages=[[1.0] * 4] * 2), group() | {"masks": [[1, 1, 1]] * 2}):
        check_wire(obj)
        with pytest.raises(GroupError):
            parse_group(obj)


def test_a_name_is_made_of_the_content():
    names = {parse_group(one).group_uid for one in (group(), group(), group(tag=8))}
    assert len(names) == 2


def test_json_as_python_writes_it():
    raw = json.dumps({"scores": [NAN, math.inf], "content": "\ud83d"}).encode()
    value, standard = read_json(raw)
    assert math.isnan(value["scores"][0]) and not standard
    with pytest.raises(GroupError, match="NaN") as caught:
        write_json(value)
    assert caught.value.reason == "not_finite"


@pytest.mark.parametrize("raw", [b"", b"{", b"[" * 100_000, b"\xff"])
def test_what_is_no_json(raw):
    with pytest.raises(GroupError) as caught:
        read_json(raw)
    assert caught.value.reason == "not_json"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["role", "content", "x"]), inner, max_size=3), max_leaves=8)


@given(st.fixed_dictionaries({}, optional={name: json_values for name in COMPLETE}))
def test_whatever_comes_is_read_or_refused(obj):
    for candidate in (obj, COMPLETE | obj):
        try:
            parsed = parse_group(candidate)
        except GroupError as error:
            assert error.reason and str(error)
        else:
            again = parse_group(parsed.to_wire())
            assert again == parsed or json.dumps(again.to_wire()) == json.dumps(parsed.to_wire())


@pytest.mark.parametrize("model, good, bad", [
    (Registration, registration(), {"batch_size": 0}),
    (Registration, registration(), {"wandb_group": None}),
    (EnvRegistration, env_registration(), {"group_size": 0}),
    (EnvRegistration, env_registration(), {"min_batch_allocation": 1.5}),
    (EnvRegistration, env_registration(), {"weight": NAN})])
def test_registrations_are_checked(model, good, bad):
    assert model(**good.model_dump()) == good
    with pytest.raises(ValueError, match=next(iter(bad))):
        model(**good.model_dump() | bad)
