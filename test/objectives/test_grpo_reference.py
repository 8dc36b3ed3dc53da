"""``GRPOLoss`` against the float64 reference of ``reference.py``, over the product of its options.

One test covers an objective under an aggregation and loops over everything else. The logits are
the parameters, so that gradients are compared one by one; a second, smaller grid differentiates a
language model through each of the heads.
"""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch

from grpo import GRPOLoss, total_loss

from . import reference
from .reference import Logits, odd_batch, shuffled

CONSTANT_LENGTH = 7
AGGREGATIONS = ["token", "sequence", "prompt", "dr_grpo"]
TEMPERATURES = [1.0, 0.7]
LEVELS = ["row_A", "token_A"]

OBJECTIVES = {
    "ppo_clip": {"clip_epsilon": (0.2, 0.3)},
    "ppo_clip+delta": {"clip_epsilon": (0.2, 0.3), "objective_options": {"delta": 1.35}},
    "cispo": {"clip_epsilon": (0.4, 0.3)},
    "gspo": {"clip_epsilon": (0.15, 0.1)},
    "gspo_token": {"clip_epsilon": (0.15, 0.1)},
    "dppo tv": {"objective_options": {"divergence": "tv", "threshold": 0.12}},
    "dppo kl": {"objective_options": {"divergence": "kl", "threshold": 0.006}},
    "sapo": {"objective_options": {"temperature_positive": 1.3, "temperature_negative": 2.0}},
    "reinforce": {},
}
for _name, _options in OBJECTIVES.items():
    _options["objective"] = _name.split("+")[0].split()[0]

MISMATCHES = {
    "none": {},
    "tis": {"mismatch": {"tis": 1.2}},
    "mis": {"mismatch": {"mis": (0.7, 1.4)}},
    "sequence_tis": {"mismatch": {"sequence_tis": 1.3}},
    "sequence_mis": {"mismatch": {"sequence_mis": 2.0}},
    "sequence_reject": {"mismatch": {"sequence_reject": (0.35, 3.0)}},
    "geometric_reject": {"mismatch": {"geometric_reject": (0.85, 1.15)}},
    "tis+geometric_reject": {"mismatch": {"tis": 1.2, "geometric_reject": (0.85, 1.15)}},
    "off_policy": {"off_policy_delta": 0.19},
}
#: Proximal policy and correction; with the sampling policy as proximal one there is no mismatch.
CORRECTIONS = {
    f"{proximal} {name}": {"proximal": proximal, **options}
    for proximal in ("sampled", "current", "scored") for name, options in MISMATCHES.items()
    if proximal != "sampled" or "mismatch" not in options}
KLS = {"none": {}} | {
    name: {"kl_estimator": name, "kl_to_ref_coeff": 0.1, "kl_to_inference_coeff": 0.03}
    for name in ("k1", "k2", "k3", "unbiased_k3")}
ESTIMATORS = [name for name in KLS if name != "none"]
ENTROPIES = {"off": {}, "on": {"entropy_coeff": 0.02}}


# -- both sides ----------------------------------------------------------------------------------

MODEL, SINGLE = Logits(), Logits(torch.float32)
DIRECTION = shuffled(*MODEL.table.shape, seed=12).double()


@cache
def scored(temperature, level):
    """The batch, and its sequences with their graph down to the logits."""
    batch = odd_batch(MODEL, temperature=temperature, level=level)
    return batch, reference.score(MODEL.table, batch, temperature=temperature)


_expected = {}


def expected(function, temperature, level, **options):
    """Value and gradient of a term of the reference; combinations share most of their terms."""
    key = (function.__name__, temperature, level, repr(options))
    if key not in _expected:
        value = function(scored(temperature, level)[1], **options)
        grad, = torch.autograd.grad(value, MODEL.table, retain_graph=True)
        _expected[key] = value.item(), grad
    return _expected[key]


def expected_terms(temperature, level, *, kl, entropy, objective_loss=reference.objective_loss,
                   **options):
    """``{name: (coefficient, (value, gradient))}`` of the terms that the options ask for."""
    terms = {"loss_objective": (1.0, expected(objective_loss, temperature, level, **options))}
    reduction = {"aggregation": options["aggregation"],
                 "constant_length": options.get("constant_length")}
    if kl:
        for name, to in (("ref", "ref"), ("inference", "sampled")):
            if f"kl_to_{name}_coeff" in kl:
                terms[f"loss_kl_to_{name}"] = kl[f"kl_to_{name}_coeff"], expected(
                    reference.kl_loss, temperature, "row_A", to=to, estimator=kl["kl_estimator"],
                    proximal=options["proximal"], **reduction)
    if entropy:
        terms["loss_entropy"] = entropy["entropy_coeff"], expected(
            reference.entropy_loss, temperature, "row_A", **reduction)
    return terms


def check(model, terms, batch, what, **options):
    """Every loss term and the gradient of their sum; returns a number that tells losses apart."""
    tolerance = 1e-9 if model.table.dtype == torch.float64 else 1e-5
    out = GRPOLoss(model, head="logits", **options)(batch)
    names = {name for name in out.keys() if name.startswith("loss_")}
    assert names == set(terms), f"{what}: terms are {names} instead of {set(terms)}"
    for name, (coefficient, (value, _)) in terms.items():
        actual, value = out[name].item(), coefficient * value
        assert abs(actual - value) <= tolerance * max(1.0, abs(value)), (
            f"{what}: {name} is {actual} instead of {value}")
    total = total_loss(out)
    assert total.dtype == model.table.dtype, f"{what}: {total.dtype}"
    grad, = torch.autograd.grad(total, model.table)
    wanted = sum(coefficient * grad for coefficient, (_, grad) in terms.values())
    scale = wanted.abs().max().item()
    error = (grad - wanted).abs().max().item()
    assert scale > 1e-4, f"{what}: no gradient"
    assert error <= tolerance * (1.0 if model.table.dtype == torch.float64 else scale), (
        f"{what}: a gradient is wrong by {error}, the greatest is {scale}")
    return total.item() + (grad * DIRECTION).sum().item()


def length_option(aggregation):
    return {"constant_length": CONSTANT_LENGTH} if aggregation == "dr_grpo" else {}


# -- the product ----------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["half", pytest.param("whole", marks=pytest.mark.slow)])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_combination(objective, aggregation, part):
    """Half of them have each temperature and each level of advantages, but not with each other."""
    fingerprints, levels = {}, LEVELS[:1] if objective == "gspo" else LEVELS
    drawn = itertools.product(TEMPERATURES, levels) if part == "whole" else [
        (TEMPERATURES[0], levels[-1]), (TEMPERATURES[1], levels[0])]
    grid = [(*pair, correction) for pair in drawn for correction in CORRECTIONS]
    for number, (temperature, level, correction) in enumerate(grid):
        batch, _ = scored(temperature, level)
        options = {**OBJECTIVES[objective], **CORRECTIONS[correction],
                   "aggregation": aggregation, **length_option(aggregation)}
        # Every correction meets every estimator.
        in_float32 = ESTIMATORS[(number + number // len(CORRECTIONS)) % len(ESTIMATORS)], "on"
        # The entropy bonus is a term of its own: without it once is enough.
        for kl, entropy in [("none", "off"), *itertools.product(KLS, ["on"])]:
            what = (f"{objective}, {aggregation}, {correction}, KL {kl}, entropy {entropy}, "
                    f"temperature {temperature}, {level}")
            terms = expected_terms(temperature, level, kl=KLS[kl], entropy=ENTROPIES[entropy],
                                   **options)
            more = {**KLS[kl], **ENTROPIES[entropy], "temperature": temperature}
            fingerprints[what] = check(MODEL, terms, batch, what, **options, **more)
            if (kl, entropy) == in_float32:
                check(SINGLE, terms, batch, f"{what}, float32", **options, **more)
    assert_distinct(fingerprints)


def assert_distinct(fingerprints):
    """No option is without effect: no two combinations have the same loss and gradient."""
    ordered = sorted(fingerprints, key=fingerprints.get)
    for one, other in itertools.pairwise(ordered):
        assert fingerprints[other] - fingerprints[one] > 1e-12, f"the same: {one}; {other}"


def test_objectives_and_aggregations_differ_from_each_other():
    fingerprints = {}
    for objective, aggregation in itertools.product(OBJECTIVES, AGGREGATIONS):
        # Where advantages are equal in a sequence, gspo_token is gspo.
        level = "row_A" if objective == "gspo" else "token_A"
        value, grad = expected(
            reference.objective_loss, 1.0, level, **OBJECTIVES[objective], proximal="scored",
            aggregation=aggregation, **length_option(aggregation))
        fingerprints[f"{objective}, {aggregation}"] = value + (grad * DIRECTION).sum().item()
    assert_distinct(fingerprints)


def test_terms_one_by_one():
    """Each KL alone, options at their defaults, masks on top of corrections."""
    rejected = {"tis": 1.2, "sequence_reject": (0.35, 3.0)}
    singles = [{"objective": name} for name in reference.OBJECTIVES]
    singles += [{"kl_to_ref_coeff": 0.2, "kl_estimator": name} for name in ESTIMATORS]
    singles += [{"kl_to_inference_coeff": 0.2, "kl_estimator": name} for name in ESTIMATORS]
    singles += [
        {"kl_to_ref_coeff": 0.2}, {"entropy_coeff": 0.0}, {"entropy_coeff": 0.1},
        {"off_policy_delta": 0.19, "mismatch": rejected, "proximal": "scored"},
        {"high_entropy_only": True}, {"high_entropy_only": True, "objective": "gspo"},
        {"high_entropy_only": True, "mismatch": {"mis": 1.5}, "proximal": "scored",
         "kl_to_ref_coeff": 0.1, "entropy_coeff": 0.1}]
    for options, aggregation, temperature in itertools.product(
            singles, AGGREGATIONS, TEMPERATURES):
        options = {"proximal": "sampled", "aggregation": aggregation,
                   **length_option(aggregation), **options}
        kl = {name: options.get(name) for name in ("kl_to_ref_coeff", "kl_to_inference_coeff")
              if name in options}
        if kl:
            kl["kl_estimator"] = options.get("kl_estimator", "k3")
        entropy = {name: options[name] for name in ("entropy_coeff",) if name in options}
        objective = {name: value for name, value in options.items()
                     if name not in (*kl, *entropy)}
        terms = expected_terms(temperature, "row_A", kl=kl, entropy=entropy, **objective)
        for model in (MODEL, SINGLE):
            check(model, terms, scored(temperature, "row_A")[0], f"{options}, {temperature}",
                  temperature=temperature, **options)


def test_rows_without_the_optional_entries():
    batch = scored(1.0, "row_A")[0].exclude("row_mask", ("next", "reward_error"))
    sequences = reference.score(MODEL.table, batch)
    assert len(sequences) == len(scored(1.0, "row_A")[1]) + 3
    for aggregation in AGGREGATIONS:
        options = {"aggregation": aggregation, **length_option(aggregation)}
        value = reference.objective_loss(sequences, **options)
        grad, = torch.autograd.grad(value, MODEL.table, retain_graph=True)
        check(MODEL, {"loss_objective": (1.0, (value.item(), grad))}, batch, aggregation, **options)


# -- losses of whole groups -----------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["maxent_listwise", "maxent_weighted"])
def test_every_combination_of_maxent(objective):
    fingerprints = {}
    for (temperature, proximal, normalize, clip, kl, entropy) in itertools.product(
            TEMPERATURES, ["sampled", "current", "scored"], [True, False], [True, False], KLS,
            ENTROPIES):
        what = (f"{objective}, {proximal}, length_normalize {normalize}, clip {clip}, KL {kl}, "
                f"entropy {entropy}, temperature {temperature}")
        if not clip and kl != "unbiased_k3" and proximal != "sampled":
            continue  # nothing reads the proximal policy
        clip_options = {"clip_epsilon": (0.15, 0.1)} if clip else {}
        options = {"objective": objective, "proximal": proximal, "aggregation": "prompt",
                   **clip_options}
        listwise = {"length_normalize": normalize, **({"clip_coeff": 0.5} if clip else {})}
        terms = expected_terms(temperature, "row_A", kl=KLS[kl], entropy=ENTROPIES[entropy],
                               objective_loss=reference.maxent_loss, **options, **listwise)
        for model in (MODEL, SINGLE):
            fingerprint = check(
                model, terms, scored(temperature, "row_A")[0], what, temperature=temperature,
                objective_options=listwise, **options, **KLS[kl], **ENTROPIES[entropy])
            if model is MODEL:
                fingerprints[what] = fingerprint
    assert_distinct(fingerprints)


# -- a language model through each head -----------------------------------------------------------


def check_heads(model, heads, *, what, level="row_A", temperature=0.7, head_chunk_size=10,
                **options):
    """Loss terms and the gradients of all parameters."""
    batch = odd_batch(model, temperature=temperature, level=level)
    logits = model(input_ids=batch["tokens", "full"],
                   attention_mask=batch["masks", "all_attention_mask"]).logits
    student = {}
    if "distill_coeff" in options:
        student["distill_temperature"] = options.get("distill_temperature", temperature)
    terms = reference.losses(reference.score(logits, batch, temperature=temperature),
                             **{**options, **student})
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(sum(terms.values()), parameters)
    assert all(grad.abs().max() > 1e-6 for grad in wanted)
    for head in heads:
        out = GRPOLoss(model, head=head, head_chunk_size=head_chunk_size, temperature=temperature,
                       **options)(batch)
        grads = torch.autograd.grad(total_loss(out), parameters)
        for name, value in terms.items():
            torch.testing.assert_close(out[name], value, rtol=1e-9, atol=1e-9,
                                       msg=lambda m, n=name, h=head: f"{what}, {h}, {n}: {m}")
        torch.testing.assert_close(grads, wanted, rtol=1e-9, atol=1e-9,
                                   msg=lambda m, h=head: f"{what}, {h}: {m}")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_heads(tiny_model, objective):
    corrections = ["sampled none", "current tis", "scored tis+geometric_reject",
                   "scored off_policy"]
    for number, (aggregation, correction) in enumerate(zip(AGGREGATIONS, corrections, strict=True)):
        level = "row_A" if objective == "gspo" else LEVELS[number % 2]
        by_token = number < 2 and not objective.startswith("gspo")
        # Chunks of 4 tokens cut rows, which not every loss allows; chunks of 10 do not.
        for size, heads in ((4, ["fused" if by_token else "auto", "chunked"]),
                            (10, ["fused", "chunked", "logits"])):
            check_heads(
                tiny_model, heads, level=level, head_chunk_size=size, aggregation=aggregation,
                what=f"{objective}, {aggregation}, {correction}, chunks of {size}",
                **length_option(aggregation), **OBJECTIVES[objective], **CORRECTIONS[correction],
                **KLS[ESTIMATORS[number]], **ENTROPIES["on"])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_distillation(tiny_model, aggregation):
    for temperature, more, entropy in itertools.product(
            TEMPERATURES, [{}, {"distill_temperature": 1.7}], ENTROPIES):
        check_heads(
            tiny_model, ["chunked"], what=f"{aggregation}, {temperature}, {more}, {entropy}",
            temperature=temperature, aggregation=aggregation, **length_option(aggregation),
            **OBJECTIVES["ppo_clip"], **ENTROPIES[entropy], distill_coeff=0.3, **more)


# -- the batch reaches every branch ---------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
class TestBatch:
    """Every case of every formula occurs, and no number lies where float32 could err."""

    @pytest.fixture
    def sequences(self, temperature, level):
        return scored(temperature, level)[1]

    @staticmethod
    def reaches(values, *thresholds, of=None):
        """Values occur on both sides of each threshold, for every one of the groups ``of``."""
        for threshold in thresholds:
            assert (values - threshold).abs().min() > 1e-4
            for group in of or [torch.ones_like(values, dtype=torch.bool)]:
                assert (values[group] > threshold).any() and (values[group] < threshold).any()

    @pytest.mark.parametrize("proximal", ["sampled", "scored"])
    def test_ratios_are_clipped_on_both_sides(self, sequences, proximal):
        ratio = torch.cat([(s.log_p - s.old(proximal)).exp() for s in sequences])
        advantage = torch.cat([s.advantage for s in sequences])
        signs = [advantage > 0, advantage < 0]
        self.reaches(ratio, 0.8, 1.3, of=signs)  # ppo_clip
        self.reaches(ratio, 1.35, of=signs)  # its dual clip
        self.reaches(ratio, 0.6, 1.3, of=signs)  # cispo

    @pytest.mark.parametrize("proximal", ["sampled", "scored"])
    def test_ratios_of_sequences_are_clipped_on_both_sides(self, sequences, proximal):
        ratio = torch.stack([(s.log_p - s.old(proximal)).mean().exp() for s in sequences])
        total = torch.stack([s.advantage.sum() for s in sequences])
        self.reaches(ratio, 0.85, 1.1, of=[total > 0, total < 0])  # gspo
        for sign in (total > 0, total < 0):
            assert ((0.85 < ratio[sign]) & (ratio[sign] < 1.1)).any()

    @pytest.mark.parametrize("kind, threshold", [("tv", 0.12), ("kl", 0.006)])
    @pytest.mark.parametrize("proximal", ["sampled", "scored"])
    def test_dppo_masks_the_tokens_that_move_away(self, sequences, proximal, kind, threshold):
        far = torch.cat([reference.binary_divergence(s, s.old(proximal), kind) for s in sequences])
        ratio = torch.cat([(s.log_p - s.old(proximal)).exp() for s in sequences])
        good = torch.cat([s.advantage for s in sequences]) > 0
        self.reaches(far, threshold, of=[good & (ratio > 1), good & (ratio < 1),
                                         ~good & (ratio > 1), ~good & (ratio < 1)])

    @pytest.mark.parametrize("proximal", ["current", "scored"])
    def test_corrections_cut_and_reject(self, sequences, proximal):
        gaps = [(s.old(proximal) - s.sampled).detach() for s in sequences]
        self.reaches(torch.cat(gaps).exp(), 0.7, 1.2, 1.4)  # tis and mis
        self.reaches(torch.stack([gap.sum() for gap in gaps]).exp(), 0.35, 1.3, 2.0, 3.0)
        self.reaches(torch.stack([gap.mean() for gap in gaps]).exp(), 0.85, 1.15)

    def test_off_policy_mask_drops_and_keeps(self, sequences):
        gap = torch.stack([(s.sampled - s.log_p).mean() for s in sequences])
        total = torch.stack([s.advantage.sum() for s in sequences])
        self.reaches(gap, 0.19, of=[total > 0, total < 0])
        length = torch.tensor([len(s.log_p) for s in sequences])
        assert ((gap < 0.19) & (gap * length > 0.19) & (total < 0)).any(), "a mean is not a sum"

    def test_rows(self, sequences, temperature, level):
        batch, _ = scored(temperature, level)
        groups = [s.group for s in sequences]
        assert len(set(groups)) < len(groups) < len(batch)
        assert set(groups) < set(batch["group_id"].tolist()), "no prompt is left out"
        assert groups != sorted(groups)
        assert {1, 3, 5} < {len(s.log_p) for s in sequences}
        for log_probs in ("log_p", "sampled", "proximal", "ref"):
            assert torch.cat([getattr(s, log_probs) for s in sequences]).max() < -0.01
