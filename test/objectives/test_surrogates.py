"""Policy objectives against the reference, where their gradients vanish, their registry."""

from __future__ import annotations

import math
from functools import partial
from statistics import fmean
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings

from grpo.objectives import registry
from grpo.objectives.registry import get_objective, register_surrogate
from grpo.objectives.surrogates import cispo, dppo, gspo, gspo_token, ppo_clip, sapo
from grpo.objectives.tokens import LossTokens, bounded_ratio

from . import reference

CLIP = (0.2, 0.3)


def make_tokens(log_probs, old_log_probs, advantages, rows=None, dtype=torch.float64):
    """Loss tokens whose log-probs are a leaf with gradient."""
    rows = [0] * len(log_probs) if rows is None else rows
    return LossTokens(
        log_probs_N=torch.tensor(log_probs, dtype=dtype, requires_grad=True),
        old_log_probs_N=torch.tensor(old_log_probs, dtype=dtype),
        advantage_N=torch.tensor(advantages, dtype=dtype),
        row_N=torch.tensor(rows), num_rows=rows[-1] + 1)


def one_token(ratio, advantage, old_probability=0.05):
    old = math.log(old_probability)
    return make_tokens([old + math.log(ratio)], [old], [advantage])


def value_and_gradient(function, tokens, **options):
    """Terms of all tokens, and the gradient of their sum."""
    term_N = function(tokens, **options)
    (gradient_N,) = torch.autograd.grad(term_N.sum(), tokens.log_probs_N)
    return term_N.tolist(), gradient_N.tolist()


ALL = tuple(reference.OBJECTIVES)


def ratios_of(name, log_p, old, rows):
    """The ratio that each token is judged by: its own or that of its sequence."""
    gaps = [lp - lq for lp, lq in zip(log_p, old, strict=True)]
    if name.startswith("gspo"):
        gaps = [fmean(gap for gap, other in zip(gaps, rows, strict=True) if other == row)
                for row in rows]
    return [math.exp(gap) for gap in gaps]


@st.composite
def flat_tokens(draw, token_advantages=True):
    """Up to three sequences; probabilities and ratios on all sides of every bound used below."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    rows = [row for row, length in enumerate(lengths) for _ in range(length)]
    old = [draw(st.floats(-9.0, -0.02)) for _ in rows]
    gap = st.one_of(st.floats(-0.5, 0.5), st.floats(-9.0, 9.0))
    log_p = [min(lq + draw(gap), -1e-3) for lq in old]
    a = [draw(st.floats(-3, 3)) for _ in rows]
    return log_p, old, a if token_advantages else [a[row] for row in rows], rows


def away_from_edges(quantities, edges):
    """Whether a kink of the formula is far enough for rounding not to choose the side."""
    return all(abs(value - edge) > 1e-9 for value in quantities for edge in edges)


@pytest.mark.parametrize(("name", "options"), [
    *((name, {}) for name in ALL),
    ("ppo_clip", {"clip_epsilon": (0.1, 0.4)}),
    ("ppo_clip", {"clip_epsilon": (0.2, 0.3), "delta": 2.0}),
    ("cispo", {"clip_epsilon": (0.3, 0.5)}),
    ("gspo", {"clip_epsilon": (0.2, 0.3)}),
    ("gspo_token", {"clip_epsilon": (0.2, 0.3)}),
    ("dppo", {"threshold": 0.02}),
    ("dppo", {"divergence": "kl"}),
    ("sapo", {"temperature_positive": 0.5, "temperature_negative": 3.0}),
])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_values_and_gradients_are_those_of_the_formula(name, options, data):
    objective = get_objective(name)
    log_p, old, a, rows = data.draw(flat_tokens(token_advantages=objective.token_advantages))
    ratios = ratios_of(name, log_p, old, rows)
    low, high = {**objective.options, **options}.get("clip_epsilon", (1.0, math.inf))
    assume(away_from_edges(ratios, (1 - low, 1 + high, options.get("delta", math.inf))))

    def formula(tokens, **options):
        columns = tokens.log_probs_N, tokens.old_log_probs_N, tokens.advantage_N
        sequences = zip(*(x.split(tokens.length_R.tolist()) for x in columns), strict=True)
        return torch.cat([
            reference.OBJECTIVES[name](
                SimpleNamespace(log_p=new, advantage=advantage), before, **options)
            for new, before, advantage in sequences])

    actual, expected = (value_and_gradient(function, make_tokens(log_p, old, a, rows), **options)
                        for function in (objective.function, formula))
    assert actual[0] == pytest.approx(expected[0], rel=1e-9, abs=1e-11)
    assert actual[1] == pytest.approx(expected[1], rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("name", ALL)
def test_on_policy_every_objective_has_the_policy_gradient(name):
    log_p, rows, a = [-0.1, -1.0, -7.0, -0.5], [0, 0, 0, 1], [1.5, 1.5, 1.5, -2.0]
    tokens = make_tokens(log_p, log_p, a, rows)
    _, gradient_N = value_and_gradient(get_objective(name).bind(), tokens)
    assert gradient_N == pytest.approx([-adv for adv in a], rel=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_terms_are_float32_and_finite_for_what_a_model_gives(name):
    # A certain token, a hopeless one, and one that went from the one to the other.
    tokens = make_tokens([0.0, -40.0, -1e-8, -30.0], [0.0, -40.0, -30.0, -1e-8],
                         [1.0, -1.0, 1.0, -1.0], dtype=torch.float32)
    for options in ({}, {"divergence": "kl"}) if name == "dppo" else ({},):
        term_N = get_objective(name).bind(options=options)(tokens)
        (gradient_N,) = torch.autograd.grad(term_N.sum(), tokens.log_probs_N)
        assert term_N.dtype == torch.float32 and term_N.shape == (4,)
        assert term_N.isfinite().all() and gradient_N.isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_a_part_without_tokens_has_no_terms(name):
    empty = LossTokens(torch.empty(0), torch.empty(0), torch.empty(0),
                       torch.empty(0, dtype=torch.int64), num_rows=2)
    assert get_objective(name).bind()(empty).shape == (0,)


@pytest.mark.parametrize("name", ALL)
def test_a_sequence_may_be_cut_exactly_where_the_scope_is_the_token(name):
    objective = get_objective(name)
    whole_N = objective.bind()(make_tokens([-1.0, -2.0], [-1.1, -1.5], [-1.0, -1.0]))
    first_N = objective.bind()(make_tokens([-1.0], [-1.1], [-1.0]))
    assert objective.scope == ("token" if torch.equal(whole_N[:1], first_N) else "sequence")
    assert objective.scope == ("sequence" if name.startswith("gspo") else "token")
    assert objective.token_advantages == (name != "gspo")


class TestPPOClip:
    @pytest.mark.parametrize(("ratio", "advantage", "moves"), [
        (0.5, 1.0, True), (1.29, 1.0, True), (1.31, 1.0, False), (2.0, 1.0, False),  # good
        (0.5, -1.0, False), (0.79, -1.0, False), (0.81, -1.0, True), (2.0, -1.0, True),  # bad
    ])
    def test_only_the_gradient_that_leads_further_away_stops(self, ratio, advantage, moves):
        _, [gradient] = value_and_gradient(ppo_clip, one_token(ratio, advantage),
                                           clip_epsilon=CLIP)
        assert gradient == pytest.approx(-ratio * advantage if moves else 0.0, abs=1e-12)

    @pytest.mark.parametrize(("ratio", "capped"), [(0.1, False), (3.9, False), (4.1, True)])
    def test_dual_clip_caps_the_term_of_a_negative_advantage_only(self, ratio, capped):
        for advantage in (2.0, -2.0):
            tokens = one_token(ratio, advantage)
            single = value_and_gradient(ppo_clip, tokens, clip_epsilon=CLIP)
            dual = value_and_gradient(ppo_clip, tokens, clip_epsilon=CLIP, delta=4.0)
            assert dual == (([8.0], [0.0]) if capped and advantage < 0 else single)
            assert single != ([8.0], [0.0])


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("ratio", [0.05, 0.5, 1.0, 1.25, 1.5, 20.0])
def test_a_token_clipped_by_cispo_keeps_a_gradient_of_bounded_weight(ratio, advantage):
    _, gradient = value_and_gradient(cispo, one_token(ratio, advantage), clip_epsilon=CLIP)
    assert gradient == [pytest.approx(-min(max(ratio, 0.8), 1.3) * advantage, rel=1e-12)]


class TestGSPO:
    @pytest.mark.parametrize("function", [gspo, gspo_token])
    def test_the_tokens_of_a_sequence_share_one_ratio_and_one_gradient(self, function):
        tokens = make_tokens([-1.0, -3.0, -0.2, -0.9], [-1.2, -2.9, -0.2, -0.5],
                             [-1.0, -1.0, -1.0, 2.0], [0, 0, 0, 1])
        terms = value_and_gradient(function, tokens, clip_epsilon=(0.5, 0.5))
        shared, other = math.exp((0.2 - 0.1 + 0.0) / 3), -2.0 * math.exp(-0.4)
        assert terms == (pytest.approx([shared] * 3 + [other]),) * 2

    @settings(max_examples=50, deadline=None)
    @given(flat=flat_tokens(token_advantages=False), clip_epsilon=st.sampled_from(
        [(3e-4, 4e-4), (0.2, 0.3), (1.0, 5.0)]))
    def test_gspo_token_is_gspo_where_a_sequence_has_one_advantage(self, flat, clip_epsilon):
        log_p, old, _, rows = flat
        ratios = ratios_of("gspo", log_p, old, rows)
        assume(away_from_edges(ratios, (1 - clip_epsilon[0], 1 + clip_epsilon[1])))
        whole = value_and_gradient(gspo, make_tokens(*flat), clip_epsilon=clip_epsilon)
        token = value_and_gradient(gspo_token, make_tokens(*flat), clip_epsilon=clip_epsilon)
        for left, right in zip(whole, token, strict=True):
            assert left == pytest.approx(right, rel=1e-9, abs=1e-12)

    def test_gspo_token_stops_each_token_by_its_own_advantage(self):
        tokens = make_tokens([-1.0, -1.0], [-1.5, -1.5], [1.0, -1.0])
        value_N, gradient_N = value_and_gradient(gspo_token, tokens)
        assert value_N == pytest.approx([-(1 + 4e-4), math.exp(0.5)])
        assert gradient_N == pytest.approx([0.0, math.exp(0.5)])

    def test_a_long_sequence_has_the_ratio_of_its_mean_without_underflow(self):
        n = 20_000  # the product of these ratios, exp(-2000), is 0 in any float type
        tokens = make_tokens([-1.1] * n, [-1.0] * n, [1.0] * n, dtype=torch.float32)
        value_N, _ = value_and_gradient(gspo, tokens)
        assert value_N[-1] == pytest.approx(-math.exp(-0.1), rel=1e-4)


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("gap", [95.0, -95.0, math.inf])
@pytest.mark.parametrize("name, options", [
    *((name, {}) for name in ALL), ("ppo_clip", {"delta": 3.0}),
    ("dppo", {"divergence": "kl"}), ("cispo", {"clip_epsilon": (0.5, 4.0)})])
def test_a_ratio_that_float32_cannot_hold_spoils_neither_value_nor_gradient(
        name, options, gap, advantage):
    """``exp(95)`` is infinite in float32; the clip makes many such terms finite."""
    tokens = make_tokens([-1.0, -0.5], [-1.0 - gap, -0.4], [advantage] * 2, [0, 1], torch.float32)
    function = partial(get_objective(name).function, **options)
    value_N, gradient_N = value_and_gradient(function, tokens)
    assert all(map(math.isfinite, [*value_N, *gradient_N]))
    if gap > 0 and advantage > 0 and name in ("ppo_clip", "gspo", "gspo_token"):
        low, high = (3e-4, 4e-4) if name.startswith("gspo") else (0.2, 0.2)
        assert value_N[0] == pytest.approx(-(1 + high)) and gradient_N[0] == 0.0
    alone = make_tokens([-0.5], [-0.4], [advantage], [0], torch.float32)
    assert value_and_gradient(function, alone) == ([value_N[1]], [gradient_N[1]])


@pytest.mark.parametrize("divergence, default, inside, outside", [
    ("tv", 0.15, 0.64, 0.66), ("kl", 0.05, 0.65, 0.66)])
def test_dppo_has_a_threshold_of_its_own_for_each_divergence(divergence, default, inside, outside):
    def gradient(p, **options):
        tokens = make_tokens([math.log(p)], [math.log(0.5)], [1.0])
        return value_and_gradient(dppo, tokens, divergence=divergence, **options)[1][0]

    distance = [abs(p - 0.5) if divergence == "tv" else -0.5 * math.log(4 * p * (1 - p))
                for p in (inside, outside)]
    assert distance[0] < default < distance[1]
    assert gradient(inside) != 0 and gradient(outside) == 0
    assert gradient(outside, threshold=2 * default) != 0  # one that is given wins


@given(gap=st.floats(-20, 20))
def test_the_bound_of_the_ratio_changes_nothing_within_it(gap):
    log_ratio = torch.tensor(gap, dtype=torch.float64, requires_grad=True)
    value, plain = bounded_ratio(log_ratio), log_ratio.exp()
    assert value == plain
    assert torch.autograd.grad(value, log_ratio) == torch.autograd.grad(plain, log_ratio)


@pytest.mark.parametrize("options", [{}, {"divergence": "kl"}])
def test_dppo_lets_a_rare_token_multiply_its_ratio_and_stops_likely_ones(options):
    # Rare, likely, and certain until now: its log-prob of 0 is where a KL could become NaN.
    tokens = make_tokens([math.log(2e-3), math.log(0.9), -5.0],
                         [math.log(1e-4), math.log(0.5), 0.0], [1.0, 1.0, -1.0])
    assert value_and_gradient(dppo, tokens, **options)[1] == [pytest.approx(-20.0), 0.0, 0.0]
    _, clipped_N = value_and_gradient(ppo_clip, tokens, clip_epsilon=(0.9, 0.9))
    assert clipped_N[0] == 0.0 != clipped_N[1]  # the other way round, with one range for both


@given(temperature=st.floats(0.05, 20), advantage=st.sampled_from([1.0, -1.0]))
def test_the_gate_of_sapo_has_slope_one_on_policy_at_any_temperature(temperature, advantage):
    _, gradient = value_and_gradient(sapo, one_token(1.0, advantage),
                                     temperature_positive=temperature,
                                     temperature_negative=temperature)
    assert gradient == [pytest.approx(-advantage, rel=1e-9)]


class TestOptions:
    @pytest.mark.parametrize(("value", "pair"), [
        (None, (0.2, 0.2)), (0, (0.0, 0.0)), (0.1, (0.1, 0.1)), ([0.2, 3], (0.2, 3.0))])
    def test_clip_epsilon_is_resolved_to_two_floats(self, value, pair):
        resolved = get_objective("ppo_clip").resolve(value)["clip_epsilon"]
        assert resolved == pair and all(type(bound) is float for bound in resolved)

    def test_bind_fills_every_option_in(self):
        tokens = one_token(9.0, -1.0)
        bound = get_objective("ppo_clip").bind((0.1, 0.1), {"delta": 3.0})
        assert bound(tokens).tolist() == pytest.approx([3.0])
        assert get_objective("ppo_clip").bind()(tokens).tolist() == pytest.approx([9.0])

    def test_resolving_leaves_the_defaults_alone(self):
        objective = get_objective("ppo_clip")
        objective.resolve(0.1)["delta"] = 5.0
        assert objective.resolve() == {"clip_epsilon": (0.2, 0.2), "delta": None}

    @pytest.mark.parametrize("value", [
        -0.1, 1.1, (0.2,), (0.1, 0.2, 0.3), (0.2, -0.1), (-0.1, 0.2), (1.5, 0.2), math.nan,
        (0.2, math.inf), (0.2, None), "0.2", "ab", True, {"low": 0.1}])
    def test_a_range_out_of_bounds_is_an_error(self, value):
        with pytest.raises(ValueError, match=r"^clip_epsilon=.*0 <= low <= 1 and high >= 0"):
            get_objective("ppo_clip").resolve(value)

    @pytest.mark.parametrize("name", ["dppo", "sapo", "reinforce"])
    def test_a_range_that_would_not_be_read_is_an_error(self, name):
        with pytest.raises(ValueError, match=rf"'{name}' would ignore clip_epsilon=0.2"):
            get_objective(name).resolve(0.2)

    @pytest.mark.parametrize(("name", "options", "message"), [
        ("ppo_clip", {"detla": 3.0}, r"'ppo_clip' would ignore detla=3.0 \(did you mean 'delta'\?\)"
                                     " in objective_options; its options: clip_epsilon, delta"),
        ("reinforce", {"delta": 3.0}, "its options: none"),
        ("ppo_clip", {"clip_epsilon": 0.1}, "must be without clip_epsilon"),
        ("ppo_clip", {"delta": 1.2}, r"delta=1.2 must be None or .* = 1.2"),
        ("ppo_clip", {"delta": "3"}, "delta='3' must be"),
        ("dppo", {"threshold": 0.0}, "threshold=0.0 must be None, or a number above 0"),
        ("dppo", {"threshold": math.nan}, "threshold=nan must be"),
        ("dppo", {"threshold": 1.5}, "threshold=1.5 .* at most 1 for divergence='tv'"),
        ("dppo", {"divergence": "js"}, r"divergence='js' must be one of \('tv', 'kl'\)"),
        ("sapo", {"temperature_positive": 0.0}, "temperature_positive=0.0 must be"),
        ("sapo", {"temperature_negative": -1}, "temperature_negative=-1 must be"),
    ])
    def test_bad_options_are_errors_that_say_what_to_do(self, name, options, message):
        with pytest.raises(ValueError, match=message):
            get_objective(name).bind(options=options)

    def test_limits_follow_the_other_options(self):
        get_objective("ppo_clip").resolve(0.2, {"delta": 1.3})
        with pytest.raises(ValueError, match="delta=1.3 must be"):
            get_objective("ppo_clip").resolve((0.2, 0.4), {"delta": 1.3})
        unlimited = {"divergence": "kl", "threshold": 1.5}
        assert get_objective("dppo").resolve(options=unlimited) == unlimited


class TestRegistry:
    @pytest.fixture(autouse=True)
    def registry(self, monkeypatch):
        """A registry that the test may fill."""
        monkeypatch.setattr(registry, "_OBJECTIVES", dict(registry._OBJECTIVES))

    def test_ones_own_objective_takes_ten_lines(self):
        def check(*, power):
            if power <= 0:
                raise ValueError(f"power={power} must be above 0")

        @register_surrogate("powered", check=check)
        def powered(tokens, *, power=2.0):
            return -(power * tokens.log_ratio_N).exp() * tokens.advantage_N

        assert get_objective("powered").options == {"power": 2.0}
        for options, term in (({}, -9.0), ({"power": 1.0}, -3.0)):
            function = get_objective("powered").bind(options=options)
            assert function(one_token(3.0, 1.0)).tolist() == pytest.approx([term])
        with pytest.raises(ValueError, match="power=0 must be above 0"):
            get_objective("powered").resolve(options={"power": 0})

    def test_ones_own_clip_epsilon_is_treated_as_the_built_in_ones(self):
        @register_surrogate("own_clip", scope="sequence", token_advantages=False)
        def own_clip(tokens, *, clip_epsilon=0.3):
            return tokens.log_ratio_N.clamp(-clip_epsilon[0], clip_epsilon[1])

        objective = get_objective("own_clip")
        assert (objective.scope, objective.token_advantages) == ("sequence", False)
        assert objective.resolve() == {"clip_epsilon": (0.3, 0.3)}
        assert objective.resolve((0.1, 2)) == {"clip_epsilon": (0.1, 2.0)}
        assert objective.bind(0.5)(one_token(9.0, 1.0)).tolist() == [0.5]

    def test_an_unknown_name_lists_the_known_ones(self):
        with pytest.raises(ValueError, match=r"unknown objective 'zzz'; known: .*cispo, .*sapo"):
            get_objective("zzz")
        with pytest.raises(ValueError, match=r"'cipso' \(did you mean 'cispo'\?\); known"):
            get_objective("cipso")

    def test_a_name_is_taken_once(self):
        def another(tokens):
            return tokens.log_ratio_N

        for qualname in ("another", "ppo_clip"):  # the same name in another module is another one
            another.__qualname__ = qualname
            with pytest.raises(ValueError, match="'ppo_clip' is already registered"):
                register_surrogate("ppo_clip")(another)
        assert get_objective("ppo_clip").function is ppo_clip

    def test_the_same_function_may_be_registered_again(self):
        def define():
            return register_surrogate("twice")(lambda tokens: tokens.log_ratio_N)

        first, latest = define(), define()
        assert get_objective("twice").function is latest is not first

    @pytest.mark.parametrize(("function", "option"), [
        (lambda tokens, power=2.0: tokens.log_ratio_N, "power"),
        (lambda tokens, *, power: tokens.log_ratio_N, "power"),
        (lambda tokens, **others: tokens.log_ratio_N, "others"),
    ])
    def test_options_are_keywords_with_defaults(self, function, option):
        with pytest.raises(ValueError, match=rf"option '{option}' of objective 'own' must be "
                                             "keyword-only with a default"):
            register_surrogate("own")(function)

    def test_defaults_have_to_pass_their_own_check(self):
        with pytest.raises(ValueError, match="clip_epsilon=7 must be"):
            register_surrogate("own")(lambda tokens, *, clip_epsilon=7: tokens.log_ratio_N)
        with pytest.raises(ValueError, match="unknown objective 'own'"):
            get_objective("own")

    def test_an_unknown_scope_is_an_error(self):
        with pytest.raises(ValueError, match="scope='row' must be one of .*'group'"):
            register_surrogate("own", scope="row")
