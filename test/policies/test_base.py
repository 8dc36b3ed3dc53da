"""What all policies share: options, layout of what they write, own random numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo import data
from grpo.policies.base import Completions, Policy, Sampling

PAD = 0


class Scripted(Policy):
    """Answers each prompt with given tokens; the log-prob of a token is ``-token``."""

    def __init__(self, answers: list[list[int]], truncated: list[bool] | None = None, *,
                 spans: list[list[tuple[int, int]]] | None = None, **options):
        options = {"sampling": Sampling(max_tokens=4), "pad_token_id": PAD, "eos_token_ids": (1,),
                   "max_model_len": 16, **options}
        super().__init__(options.pop("sampling"), **options)
        self.answers, self.truncated = answers, truncated or [False] * len(answers)
        self.spans = spans
        self.seen: list[list[int]] = []
        self.drawn: list[float] = []

    def _generate(self, prompts, on_row=None):
        self.seen = prompts
        self.drawn.append(torch.rand(()).item())
        return Completions(self.answers, [[-float(t) for t in row] for row in self.answers],
                           self.truncated, self.spans)


@pytest.mark.parametrize(("options", "text"), [
    ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
    ({"max_tokens": 1, "temperature": -1.0}, "temperature=-1.0 must not be negative; 0 is greedy"),
])
def test_sampling_that_makes_no_sense_is_refused(options, text):
    with pytest.raises(ValueError, match=text):
        Sampling(**options)


@given(rows=st.lists(st.tuples(st.lists(st.integers(2, 9), min_size=1, max_size=5),
                               st.lists(st.integers(2, 9), min_size=1, max_size=4)),
                     min_size=1, max_size=5))
def test_tokens_come_back_as_they_were_sampled_directly_after_the_prompt(rows):
    prompts, answers = [list(p) for p, _ in rows], [list(a) for _, a in rows]
    policy = Scripted(answers)
    batch = policy.generate_from_ids(prompts)
    assert policy.seen == prompts
    for i, (prompt, answer) in enumerate(rows):
        real = batch[data.ATTENTION_MASK][i]
        mask = batch[data.ASSISTANT_MASK][i]
        assert batch[data.TOKENS][i][real].tolist() == prompt + answer
        assert real.sum() == real.int().argmin() or real.all()  # real tokens come first
        assert batch[data.TOKENS][i][mask].tolist() == answer
        assert batch[data.LOG_PROBS][i][mask].tolist() == [-float(t) for t in answer]
        assert (batch[data.LOG_PROBS][i][~mask] == 0).all()
        assert (batch[data.TOKENS][i][~real] == PAD).all()
        assert batch[data.RESPONSE_TOKENS][i].tolist() == answer + [PAD] * (4 - len(answer))


def test_finish_reason_and_version_are_stamped_on_every_row():
    version = 3
    policy = Scripted([[5, 6], [7]], [False, True], version=lambda: version)
    batch = policy.generate_from_ids([[2], [3]])
    assert batch[data.FINISH_REASON].tolist() == [data.FINISH_STOP, data.FINISH_LENGTH]
    assert batch[data.POLICY_VERSION].tolist() == [3, 3]
    assert batch[data.POLICY_VERSIONS].tolist() == [[-1, 3, 3, -1, -1], [-1, 3, -1, -1, -1]]
    version = 4
    assert policy.generate_from_ids([[2], [3]])[data.POLICY_VERSION].tolist() == [4, 4]


@given(rows=st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 2)), min_size=1,
                              max_size=2), min_size=1, max_size=4))
def test_each_token_is_stamped_with_the_version_of_its_span(rows):
    answers = [[5] * sum(tokens for _, tokens in spans) for spans in rows]
    batch = Scripted(answers, spans=rows, version=lambda: 9).generate_from_ids([[2, 3]] * len(rows))
    for row, spans in enumerate(rows):
        expected = [version for version, tokens in spans for _ in range(tokens)]
        stamped = batch[data.POLICY_VERSIONS][row]
        assert stamped[batch[data.ASSISTANT_MASK][row]].tolist() == expected
        assert (stamped == data.NO_VERSION).sum() == len(stamped) - len(expected)
        assert batch[data.POLICY_VERSION][row] == min(expected)


def test_spans_that_do_not_fit_the_tokens_are_an_error():
    policy = Scripted([[5, 6], [7]], spans=[[(1, 2)], [(1, 2)]])
    with pytest.raises(RuntimeError, match=r"dated \[2, 2\] tokens.*sampled \[2, 1\]"):
        policy.generate_from_ids([[2], [3]])


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_log_probs_that_are_not_numbers_reach_no_rollout(value):
    policy = Scripted([[5, 6], [7]], version=lambda: 3)
    completions = Completions([[5, 6], [7]], [[-1.0, value], [-1.0]], [False, False])
    with pytest.raises(FloatingPointError, match="1 of 2 rows .* version 3 of the weights"):
        policy.write(policy.pad_prompts([[2], [3]]), completions)


def test_everything_it_says_it_writes_is_written():
    batch = Scripted([[5]]).generate_from_ids([[2]])
    assert set(Policy.out_keys) <= set(batch.keys(True, True))


def test_a_prompt_that_leaves_no_room_is_refused_with_the_option_to_raise():
    policy = Scripted([[5], [5]], max_model_len=3)
    with pytest.raises(ValueError, match=r"has 3 tokens .*max_model_len=3; .*"
                                         r"raise inference_model\.max_model_len"):
        policy.generate_from_ids([[2], [2, 3, 4]])


def test_each_call_has_its_own_random_numbers_and_leaves_the_callers_alone():
    policy, again = Scripted([[5]]), Scripted([[5]])
    torch.manual_seed(0)
    state = torch.get_rng_state()
    for _ in range(3):
        policy.generate_from_ids([[2]])
    assert torch.equal(torch.get_rng_state(), state)
    assert len(set(policy.drawn)) == 3
    # Call n depends on seed and n alone, which is what a resumed run needs.
    torch.rand(5)
    again.calls = 2
    again.generate_from_ids([[2]])
    assert again.drawn == policy.drawn[2:]
    other = Scripted([[5]], sampling=Sampling(max_tokens=4, seed=1))
    other.generate_from_ids([[2]])
    assert other.drawn[0] not in policy.drawn


def test_a_policy_with_other_sampling_does_not_shift_its_parents_numbers():
    policy, reference = Scripted([[5]]), Scripted([[5]])
    for _ in range(2):
        reference.generate_from_ids([[2]])
    policy.generate_from_ids([[2]])
    other = policy.with_sampling(temperature=0.0, max_tokens=2)
    assert (other.sampling, other.calls) == (Sampling(max_tokens=2, temperature=0.0), 0)
    assert policy.sampling == Sampling(max_tokens=4)
    other.generate_from_ids([[2]])
    policy.generate_from_ids([[2]])
    assert (policy.calls, other.calls) == (2, 1)
    assert [policy.drawn[0], policy.drawn[-1]] == reference.drawn


def test_an_unknown_sampling_option_is_refused():
    with pytest.raises(TypeError, match="top_p"):
        Scripted([[5]]).with_sampling(top_p=0.9)
