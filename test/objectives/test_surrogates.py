"""Policy surrogates, where their gradient vanishes, and their registry."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from grpo.objectives import register_surrogate, surrogates
from grpo.objectives.surrogates import check_clip_epsilon, get_surrogate, ppo_clip, reinforce

CLIP = (0.2, 0.3)


@pytest.fixture
def registry(monkeypatch):
    """A registry that the test may fill."""
    monkeypatch.setattr(surrogates, "_SURROGATES", dict(surrogates._SURROGATES))
    monkeypatch.setattr(surrogates, "_CLIPPING", set(surrogates._CLIPPING))


@pytest.mark.parametrize(("ratio", "advantage", "moves"), [
    (0.5, 1.0, True),  # unlikely now and good: bring it back
    (0.5, -1.0, False),
    (0.79, -1.0, False),
    (0.81, -1.0, True),
    (1.0, 1.0, True),
    (1.0, -1.0, True),
    (1.29, 1.0, True),
    (1.31, 1.0, False),
    (2.0, 1.0, False),
    (2.0, -1.0, True),  # likely now and bad: push it down
])
def test_ppo_clip_stops_only_the_gradient_that_leads_further_away(ratio, advantage, moves):
    log_ratio = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
    loss = ppo_clip(log_ratio, torch.tensor([advantage]), clip_epsilon=CLIP)
    loss.backward()
    expected = -ratio * advantage if moves else 0.0
    assert log_ratio.grad.item() == pytest.approx(expected, abs=1e-7)


@given(ratio=st.floats(0.01, 10), advantage=st.floats(-3, 3),
       low=st.floats(0, 1), high=st.floats(0, 3))
def test_ppo_clip_is_the_pessimistic_bound(ratio, advantage, low, high):
    ratio_1, advantage_1 = torch.tensor([[ratio], [advantage]], dtype=torch.float64)
    loss = ppo_clip(ratio_1.log(), advantage_1, clip_epsilon=(low, high)).item()
    clipped = min(max(ratio, 1 - low), 1 + high)
    assert loss == pytest.approx(-min(ratio * advantage, clipped * advantage), abs=1e-9)


@given(ratio=st.floats(0.01, 10), advantage=st.floats(-3, 3))
def test_reinforce_weighs_the_score_with_the_ratio_and_never_clips(ratio, advantage):
    log_ratio = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
    loss = reinforce(log_ratio, torch.tensor([advantage], dtype=torch.float64))
    loss.backward()
    assert loss.item() == pytest.approx(-ratio * advantage, rel=1e-9)
    assert log_ratio.grad.item() == pytest.approx(-ratio * advantage, rel=1e-9)


def test_an_advantage_a_row_is_spread_over_its_tokens():
    log_ratio = torch.tensor([[0.0, 0.1], [0.2, -0.1]])
    for name in ("ppo_clip", "reinforce"):
        surrogate, clip = get_surrogate(name), CLIP if name == "ppo_clip" else None
        row = surrogate(log_ratio, torch.tensor([[1.0], [-2.0]]), clip_epsilon=clip)
        token = surrogate(log_ratio, torch.tensor([[1.0, 1.0], [-2.0, -2.0]]), clip_epsilon=clip)
        assert torch.equal(row, token)


class TestRegistry:
    def test_an_unknown_name_lists_the_known_ones(self):
        with pytest.raises(ValueError, match="'ppo'.*ppo_clip, reinforce"):
            get_surrogate("ppo")

    def test_a_name_is_taken_once(self, registry):
        with pytest.raises(ValueError, match="'ppo_clip' is already registered"):
            @register_surrogate("ppo_clip")
            def another(log_ratio_BT, advantage_BT, *, clip_epsilon):
                return log_ratio_BT
        assert get_surrogate("ppo_clip") is ppo_clip

    def test_a_function_of_the_same_name_elsewhere_does_not_replace_one(self, registry):
        def impostor(log_ratio_BT, advantage_BT, *, clip_epsilon):
            return log_ratio_BT

        impostor.__qualname__ = "ppo_clip"
        with pytest.raises(ValueError, match="already registered"):
            register_surrogate("ppo_clip")(impostor)

    def test_the_same_function_may_be_registered_again(self, registry):
        def define():
            @register_surrogate("twice")
            def twice(log_ratio_BT, advantage_BT, *, clip_epsilon):
                return log_ratio_BT

            return twice

        define()
        latest = define()
        assert get_surrogate("twice") is latest

    def test_clips_says_whether_bounds_are_needed(self, registry):
        register_surrogate("with")(lambda *args, clip_epsilon: args[0])
        register_surrogate("without", clips=False)(lambda *args, clip_epsilon: args[0])
        assert check_clip_epsilon("with", 0.1) == (0.1, 0.1)
        assert check_clip_epsilon("without", None) is None
        assert check_clip_epsilon("without", (0.2, 0.2)) is None  # the default says nothing
        with pytest.raises(ValueError, match="'without' does not clip"):
            check_clip_epsilon("without", 0.1)
        with pytest.raises(ValueError, match="clip_epsilon"):
            check_clip_epsilon("with", None)


@pytest.mark.parametrize("value", [-0.1, 1.1, (0.2,), (0.1, 0.2, 0.3), (0.2, -0.1), torch.nan])
def test_bounds_out_of_range_are_errors(value):
    with pytest.raises(ValueError, match="clip_epsilon"):
        check_clip_epsilon("ppo_clip", value)


@pytest.mark.parametrize(("value", "pair"), [(0, (0.0, 0.0)), ([0.2, 3], (0.2, 3.0)),
                                             ((1, 0.5), (1.0, 0.5))])
def test_bounds_in_range(value, pair):
    assert check_clip_epsilon("ppo_clip", value) == pair
