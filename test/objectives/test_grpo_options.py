"""The options of ``GRPOLoss``: each has its effect, and what does not fit together is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from grpo import GroupAdvantage, GRPOLoss, total_loss
from grpo.objectives import register_surrogate, registry
from grpo.objectives.estimators import AdvantageEstimator

from .batches import LISTWISE, gradient


def objective(name, *, clip=None, options=None, **more):
    return {"objective": name, "clip_epsilon": clip, "objective_options": options, **more}


def corrected(*, proximal="scored", **mismatch):
    return {"proximal": proximal, "mismatch": mismatch}


class TestEffects:
    """No option is without effect."""

    SWITCHES = {
        "ppo_clip reinforce": ({}, objective("reinforce")),
        "ppo_clip cispo": ({}, objective("cispo")),
        "ppo_clip dppo": ({}, objective("dppo")),
        "ppo_clip sapo": ({}, objective("sapo")),
        "ppo_clip gspo": ({}, objective("gspo")),
        "gspo gspo_token": (objective("gspo", clip=0.5), objective("gspo_token")),
        "maxent_listwise maxent_weighted": (LISTWISE, {**LISTWISE, "objective": "maxent_weighted"}),
        "delta": (objective("ppo_clip"), objective("ppo_clip", options={"delta": 1.3})),
        "dppo divergence": (objective("dppo", options={"threshold": 0.005}),
                            objective("dppo", options={"threshold": 0.005, "divergence": "kl"})),
        "dppo threshold": (objective("dppo", options={"threshold": 0.02}),
                           objective("dppo", options={"threshold": 0.2})),
        "sapo temperature_positive": (
            objective("sapo"), objective("sapo", options={"temperature_positive": 2.0})),
        "sapo temperature_negative": (
            objective("sapo"), objective("sapo", options={"temperature_negative": 2.0})),
        "cispo clip": (objective("cispo"), objective("cispo", clip=(0.1, 0.1))),
        "gspo clip": (objective("gspo"), objective("gspo", clip=0.5)),
        "maxent length_normalize": (
            LISTWISE, {**LISTWISE, "objective_options": {"length_normalize": False}}),
        "maxent clip_coeff": (LISTWISE, {**LISTWISE, "objective_options": {"clip_coeff": 0.5}}),
        "maxent clip_epsilon": (
            {**LISTWISE, "objective_options": {"clip_coeff": 0.5}},
            {**LISTWISE, "objective_options": {"clip_coeff": 0.5}, "clip_epsilon": 0.01}),
        "clip_epsilon low": ({}, {"clip_epsilon": (0.5, 0.2)}),
        "clip_epsilon high": ({}, {"clip_epsilon": (0.2, 0.5)}),
        "aggregation sequence": ({}, {"aggregation": "sequence"}),
        "aggregation prompt": ({}, {"aggregation": "prompt"}),
        "aggregation prompt sequence": ({"aggregation": "sequence"}, {"aggregation": "prompt"}),
        "aggregation dr_grpo": ({"aggregation": "sequence"},
                                {"aggregation": "dr_grpo", "constant_length": 4}),
        "constant_length": ({"aggregation": "dr_grpo", "constant_length": 4},
                            {"aggregation": "dr_grpo", "constant_length": 5}),
        "proximal scored": ({}, {"proximal": "scored"}),
        "proximal current": ({}, {"proximal": "current"}),
        "proximal current scored": ({"proximal": "current"}, {"proximal": "scored"}),
        "tis": ({"proximal": "scored"}, corrected(tis=1.2)),
        "tis with the current policy": ({"proximal": "current"},
                                        corrected(proximal="current", tis=1.2)),
        "tis bound": (corrected(tis=1.2), corrected(tis=2.0)),
        "tis mis": (corrected(tis=1.2), corrected(mis=1.2)),
        "mis lower bound": (corrected(mis=1.2), corrected(mis=(0.8, 1.2))),
        "tis sequence_tis": (corrected(tis=1.2), corrected(sequence_tis=1.2)),
        "mis sequence_mis": (corrected(mis=1.2), corrected(sequence_mis=1.2)),
        "sequence_reject": ({"proximal": "scored"}, corrected(sequence_reject=(0.8, 1.3))),
        "sequence_reject geometric_reject": (corrected(sequence_reject=(0.8, 1.3)),
                                             corrected(geometric_reject=(0.8, 1.3))),
        "tis with a reject": (corrected(tis=1.2), corrected(tis=1.2, sequence_reject=(0.8, 1.3))),
        "off_policy_delta": ({}, {"off_policy_delta": 0.0}),
        "high_entropy_only": ({}, {"high_entropy_only": True}),
        "kl_to_ref_coeff": ({}, {"kl_to_ref_coeff": 0.1}),
        "kl_to_inference_coeff": ({}, {"kl_to_inference_coeff": 0.1}),
        "kl_to_ref is not kl_to_inference": ({"kl_to_ref_coeff": 0.1},
                                             {"kl_to_inference_coeff": 0.1}),
        "k1 k2": ({"kl_to_ref_coeff": 0.1, "kl_estimator": "k1"},
                  {"kl_to_ref_coeff": 0.1, "kl_estimator": "k2"}),
        "k2 k3": ({"kl_to_ref_coeff": 0.1, "kl_estimator": "k2"},
                  {"kl_to_ref_coeff": 0.1, "kl_estimator": "k3"}),
        "k3 unbiased_k3": ({"kl_to_ref_coeff": 0.1, "kl_estimator": "k3"},
                           {"kl_to_ref_coeff": 0.1, "kl_estimator": "unbiased_k3"}),
        "unbiased_k3 on-policy": (
            {"kl_to_ref_coeff": 0.1, "kl_estimator": "k3", "proximal": "current"},
            {"kl_to_ref_coeff": 0.1, "kl_estimator": "unbiased_k3", "proximal": "current"}),
        "entropy_coeff": ({}, {"entropy_coeff": 0.01}),
        "distill_coeff": ({}, {"distill_coeff": 0.1}),
        "distill_coeff value": ({"distill_coeff": 0.1}, {"distill_coeff": 0.2}),
        "distill_temperature": ({"distill_coeff": 0.1},
                                {"distill_coeff": 0.1, "distill_temperature": 2.0}),
        "temperature": ({}, {"temperature": 0.7}),
        "temperature of the distillation": (
            {"distill_coeff": 0.1, "proximal": "current"},
            {"distill_coeff": 0.1, "proximal": "current", "distill_temperature": 0.7,
             "temperature": 0.7})}

    @pytest.mark.parametrize("name", SWITCHES)
    def test_each_switch_changes_the_gradient(self, model, batch, name):
        one, other = (gradient(GRPOLoss(model, **options), batch)
                      for options in self.SWITCHES[name])
        assert (one - other).abs().max() > 1e-4 * one.abs().max()

    def test_each_advantage_estimator_has_its_own_gradient(self, model, make_batch):
        batch = make_batch(model, prompts=(1,) * 6, responses=(3, 4, 5, 2, 4, 3)).exclude(
            "advantage")
        batch["group_id"] = torch.tensor([0, 1, 0, 1, 0, 1])
        batch["next", "reward"] = batch["next", "reward"].abs()  # one of them needs it
        names = get_args(AdvantageEstimator)
        grads = []
        for name in names:
            inside = gradient(GRPOLoss(model, advantage_estimator=name), batch)
            before = GroupAdvantage(estimator=name)(batch.copy())
            assert torch.equal(inside, gradient(GRPOLoss(model), before))
            grads.append(inside)
        for i, one in enumerate(grads):
            for other in grads[:i]:
                assert (one - other).abs().max() > 1e-3 * one.abs().max()

    def test_advantages_made_here_leave_out_rows_without_a_reward(self, model, make_batch):
        batch = make_batch(model, error_rows=(1,)).exclude("advantage")
        batch["group_id"] = torch.tensor([0, 0, 0, 0])
        batch["next", "reward"][1] = torch.nan
        expected = gradient(GRPOLoss(model), GroupAdvantage()(batch.copy()))
        assert torch.equal(gradient(GRPOLoss(model), batch), expected) and expected.any()

    def test_auto_does_without_fusing_where_a_sequence_is_longer_than_a_chunk(self, model, batch):
        """Its tokens must be known together, so the chunked head takes over."""
        for options in ({"objective": "gspo", "clip_epsilon": 0.5}, {"off_policy_delta": 0.0},
                        corrected(geometric_reject=(0.5, 2.0))):
            expected = gradient(GRPOLoss(model, **options), batch)
            small = gradient(GRPOLoss(model, head_chunk_size=5, **options), batch)
            torch.testing.assert_close(small, expected, rtol=1e-9, atol=1e-12)
            with pytest.raises(ValueError, match="head='fused'.*head_chunk_size=5"):
                GRPOLoss(model, head="fused", head_chunk_size=5, **options)(batch)
            GRPOLoss(model, head="fused", head_chunk_size=6, **options)(batch)
        GRPOLoss(model, head="fused", head_chunk_size=1)(batch)  # tokens are known one by one

    @pytest.mark.parametrize("autocast", [False, True])
    def test_small_gradients_survive_in_float16_under_a_loss_scaler(
        self, make_model, make_batch, autocast
    ):
        model = make_model(dtype=torch.float32)
        batch, scale = make_batch(model), 2.0**16
        expected = gradient(GRPOLoss(model, objective="reinforce"), batch)
        if not autocast:
            model.half()

        def scaled(head):
            loss = GRPOLoss(model, objective="reinforce", head=head)
            norm = loss.normalizer(batch)
            norm = replace(norm, count=norm.count * scale)  # as that of a large batch
            with torch.autocast("cpu", torch.float16, enabled=autocast):
                total = scale * total_loss(loss(batch, normalizer=norm))
            grads = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
            return torch.cat([g.flatten().float() for g in grads if g is not None])

        assert (scaled("auto") - expected).norm() < 0.05 * expected.norm()
        with pytest.raises(ValueError, match="head='fused'.*float16.*head='auto'"):
            scaled("fused")

    def test_a_fused_loss_is_differentiated_once_and_as_a_whole(self, model, batch):
        out = GRPOLoss(model, kl_to_ref_coeff=0.1)(batch)
        with pytest.raises(RuntimeError, match="equal weights.*head='chunked'"):
            out["loss_kl_to_ref"].backward()
        torch.autograd.grad(total_loss(out), list(model.parameters()), retain_graph=True)
        with pytest.raises(RuntimeError, match="once.*head='chunked'"):
            total_loss(out).backward()
        chunked = GRPOLoss(model, kl_to_ref_coeff=0.1, head="chunked")(batch)
        torch.autograd.grad(chunked["loss_kl_to_ref"], list(model.parameters()), retain_graph=True)
        torch.autograd.grad(total_loss(chunked), list(model.parameters()))

    @pytest.mark.parametrize(("option", "value"), [
        ("objective", "ppo"), ("aggregation", "mean"), ("kl_estimator", "k4"), ("head", "dense"),
        ("advantage_estimator", "gae"), ("clip_epsilon", -0.1), ("clip_epsilon", (0.2, 0.2, 0.2)),
        ("clip_epsilon", (1.5, 0.2)), ("kl_to_ref_coeff", -0.1), ("kl_to_ref_coeff", float("nan")),
        ("kl_to_inference_coeff", -0.1), ("entropy_coeff", -0.1), ("temperature", 0.0),
        ("temperature", -1.0), ("constant_length", 5), ("proximal", "old"),
        ("off_policy_delta", -0.1), ("distill_coeff", -0.1), ("distill_temperature", 2.0),
    ])
    def test_a_wrong_value_is_an_error_that_names_option_and_value(self, model, option, value):
        with pytest.raises(ValueError) as error:
            GRPOLoss(model, **{option: value})
        assert option in str(error.value) and repr(value) in str(error.value)

    @pytest.mark.parametrize(("options", "match"), [
        ({"mismatch": {"tis": 2.0}}, "mismatch={'tis': .*proximal='sampled'.*proximal='current'"),
        ({"mismatch": {"cut": 2.0}, "proximal": "scored"}, "mismatch\\['cut'\\] is unknown"),
        ({"objective": "reinforce", "clip_epsilon": 0.2}, "clip_epsilon=0.2"),
        ({"objective_options": {"delta": 1.1}}, "delta=1.1 must be .*1.2"),
        ({"distill_coeff": 0.1, "head": "logits"}, "distill_coeff=0.1.*head='logits'"),
        ({"distill_coeff": 0.1, "head": "fused"}, "head='fused'.*distill_coeff=0.1"),
        ({"distill_coeff": 0.1, "distill_temperature": 0.0}, "temperature=0.0"),
        ({"distill_temperature": 2.0}, "distill_temperature=2.0.*distill_coeff"),
        ({"objective": "maxent_listwise"}, "maxent_listwise.*aggregation='prompt'.*'token'"),
        ({**LISTWISE, "head": "fused"}, "head='fused'.*maxent_listwise"),
        ({**LISTWISE, "off_policy_delta": 0.1}, "off_policy_delta.*maxent_listwise"),
        ({**LISTWISE, "high_entropy_only": True}, "high_entropy_only.*maxent_listwise"),
        ({**LISTWISE, "proximal": "scored", "mismatch": {"tis": 2.0}},
         "mismatch.*maxent_listwise"),
        ({**LISTWISE, "clip_epsilon": 0.3}, "clip_epsilon.*clip_coeff"),
    ], ids=str)
    def test_options_that_do_not_go_together_are_errors(self, model, options, match):
        with pytest.raises(ValueError, match=match):
            GRPOLoss(model, **options)

    def test_a_model_whose_head_is_more_than_a_product_has_no_distillation(self):
        from transformers import GraniteConfig, GraniteForCausalLM

        scaled = GraniteForCausalLM(GraniteConfig(
            vocab_size=23, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, logits_scaling=8.0))
        with pytest.raises(ValueError, match="distill_coeff=0.1.*plain linear head"):
            GRPOLoss(scaled, distill_coeff=0.1)

    def test_advantages_of_tokens_do_not_fit_the_ratio_of_a_sequence(self, model, make_batch):
        batch = make_batch(model, token_level=True)
        with pytest.raises(ValueError, match="'gspo'.*gspo_token"):
            GRPOLoss(model, objective="gspo")(batch)
        GRPOLoss(model, objective="gspo_token")(batch)

    def test_coefficients_may_be_set_between_steps(self, model, batch):
        options = {"kl_to_ref_coeff": 0.3, "entropy_coeff": 0.2}
        loss = GRPOLoss(model, kl_to_ref_coeff=0.1, entropy_coeff=0.0)
        first = gradient(loss, batch)
        for name, value in options.items():
            setattr(loss.terms, name, value)
        moved = gradient(loss, batch)
        assert torch.equal(moved, gradient(GRPOLoss(model, **options), batch))
        assert (moved - first).abs().max() > 1e-3

    def test_an_entropy_coefficient_of_zero_is_a_term_without_gradient(self, model, batch):
        out = GRPOLoss(model, entropy_coeff=0.0)(batch)
        assert out["loss_entropy"] == 0 and out["entropy"] > 0
        assert "loss_entropy" not in GRPOLoss(model)(batch).keys()
        assert torch.equal(gradient(GRPOLoss(model, entropy_coeff=0.0), batch),
                           gradient(GRPOLoss(model), batch))

    @pytest.mark.parametrize("head", ["auto", "logits"])
    def test_a_surrogate_of_ones_own(self, model, batch, monkeypatch, head):
        monkeypatch.setattr(registry, "_OBJECTIVES", dict(registry._OBJECTIVES))

        @register_surrogate("log_prob", scope="sequence")
        def log_prob(tokens, *, power=1.0):
            scaled_N = tokens.log_ratio_N * tokens.of_row(tokens.length_R) ** power
            return -scaled_N * tokens.advantage_N

        for options, power in ((None, 1.0), ({"power": 2.0}, 2.0)):
            out = GRPOLoss(model, objective="log_prob", objective_options=options, head=head,
                           head_chunk_size=6)(batch)
            stats = out["token_stats"]
            length = torch.tensor([5] * 5 + [1] + [6] * 6 + [3] * 3).double()
            expected = -(stats["log_ratio"] * stats["advantage"] * length**power).mean()
            torch.testing.assert_close(out["loss_objective"], expected)
            assert "clip_fraction_low" not in out.keys()

    def test_one_of_whole_groups_reads_advantages_unless_it_asks_for_shares(
        self, model, batch, monkeypatch
    ):
        monkeypatch.setattr(registry, "_OBJECTIVES", dict(registry._OBJECTIVES))

        def share_of_group(tokens):
            size_R = (tokens.group_R[:, None] == tokens.group_R).sum(1)
            return -tokens.ratio_N * tokens.advantage_N / tokens.of_row(size_R)

        register_surrogate("by_advantage", scope="group")(share_of_group)
        register_surrogate("by_share", scope="group", reads_listwise_weight=True)(
            lambda tokens: -tokens.ratio_N * tokens.of_row(tokens.listwise_weight_R))
        plain = batch.exclude("listwise_weight")
        out = GRPOLoss(model, objective="by_advantage", aggregation="prompt")(plain)
        expected = GRPOLoss(model, objective="reinforce", aggregation="prompt")(plain)
        torch.testing.assert_close(out["loss_objective"], expected["loss_objective"] / 2)
        by_share = GRPOLoss(model, objective="by_share", aggregation="prompt")
        assert by_share(batch)["loss_objective"] < 0
        with pytest.raises(KeyError, match="listwise_weight.*MaxEntWeights"):
            by_share(plain)
