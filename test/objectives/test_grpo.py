"""``GRPOLoss``: its gradient, and the batches and rows it accepts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from grpo import GroupAdvantage, GRPOLoss, total_loss
from grpo.data import split_rows
from grpo.data.torchrl import to_torchrl
from grpo.objectives import MaxEntWeights

from .batches import LISTWISE, gradient, with_every_entry

CLIP = (0.2, 0.3)


class TestGradient:
    @pytest.mark.parametrize("options", [
        {},
        {"objective": "reinforce", "aggregation": "sequence", "temperature": 0.7},
        {"kl_to_ref_coeff": 0.1, "kl_to_inference_coeff": 0.2, "entropy_coeff": 0.05},
        {"aggregation": "dr_grpo", "constant_length": 6, "packing": True, "head_chunk_size": 4},
        {"kl_to_ref_coeff": 1.0, "kl_estimator": "k2", "head": "logits"},
        {"kl_to_ref_coeff": 1.0, "kl_estimator": "unbiased_k3", "aggregation": "prompt"},
        {"objective": "gspo", "aggregation": "prompt", "head": "fused", "head_chunk_size": 7},
        {"objective": "sapo", "proximal": "scored", "mismatch": {"tis": 1.3},
         "high_entropy_only": True, "head_chunk_size": 2},
        {"objective": "dppo", "proximal": "scored", "mismatch": {"sequence_mis": (0.2, 5.0)},
         "off_policy_delta": 0.1, "clip_epsilon": None},
        {"objective_options": {"delta": 1.4}, "distill_coeff": 0.5, "distill_temperature": 1.5},
        {**LISTWISE, "objective_options": {"clip_coeff": 0.5}, "head_chunk_size": 3},
    ], ids=str)
    @pytest.mark.parametrize("direction", range(2))
    def test_matches_finite_differences(self, make_model, make_batch, options, direction):
        model = make_model()
        # Transformers computes norms in float32, which would drown the differences.
        for name in dict(model.named_modules()):
            if name.endswith("norm"):
                model.set_submodule(name, nn.RMSNorm(16, eps=1e-6, dtype=torch.float64))
        token_level = options.get("objective") != "gspo"
        batch = with_every_entry(make_batch(model, token_level=token_level, seed=direction))
        bounded = options.get("objective") not in ("reinforce", "sapo", "dppo")
        loss = GRPOLoss(model, **{"clip_epsilon": CLIP if bounded else None, **options})
        expected = gradient(loss, batch)
        torch.manual_seed(direction)
        step = torch.randn_like(expected)
        step /= step.norm()
        start = nn.utils.parameters_to_vector(model.parameters()).detach()

        def value(distance):
            nn.utils.vector_to_parameters(start + distance * step, model.parameters())
            with torch.no_grad():
                return total_loss(loss(batch))

        h = 1e-5
        torch.testing.assert_close((value(h) - value(-h)) / (2 * h), expected @ step,
                                   rtol=1e-6, atol=1e-8)

    def test_of_tied_embeddings_has_both_contributions(self, make_model, make_batch):
        tied, untied = make_model(), make_model(tie_word_embeddings=False)
        untied.load_state_dict(tied.state_dict())
        batch = make_batch(tied)
        for head in ("fused", "chunked", "logits"):
            tied.zero_grad()
            untied.zero_grad()
            total_loss(GRPOLoss(tied, head=head)(batch)).backward()
            total_loss(GRPOLoss(untied, head=head)(batch)).backward()
            read, written = untied.model.embed_tokens.weight.grad, untied.lm_head.weight.grad
            assert read.abs().max() > 1e-4 and written.abs().max() > 1e-4
            torch.testing.assert_close(tied.lm_head.weight.grad, read + written,
                                       rtol=1e-10, atol=1e-12)

    def test_on_policy_every_ratio_is_one_and_nothing_is_clipped(self, make_model, make_batch):
        for dtype, temperature in ((torch.float64, 1.0), (torch.float32, 0.7)):
            model = make_model(dtype=dtype)
            batch = make_batch(model, noise=0.0, temperature=temperature)
            out = GRPOLoss(model, temperature=temperature, clip_epsilon=1e-5)(batch)
            for name in ("ratio_min", "ratio_p01", "ratio_p50", "ratio_p99", "ratio_max", "ess"):
                assert out[name].item() == pytest.approx(1.0, abs=3e-6), name
            assert out["clip_fraction_low"] == out["clip_fraction_high"] == 0

    def test_with_the_current_policy_as_proximal_old_log_probs_are_not_read(self, model, batch):
        loss = GRPOLoss(model, proximal="current")
        expected = gradient(loss, batch)
        moved = batch.clone()
        moved["log_probs", "full"] -= 3.0
        moved["log_probs", "proximal"] += 3.0
        assert torch.equal(gradient(loss, moved), expected)
        # But the correction for the gap to the engine does.
        corrected = GRPOLoss(model, proximal="current", mismatch={"tis": 2.0})
        assert (gradient(corrected, moved) - gradient(corrected, batch)).abs().max() > 1e-3

    def test_values_outside_the_mask_may_be_nan(self, model, make_batch):
        original = with_every_entry(make_batch(model, token_level=True, error_rows=(1,)))
        for options in (
                {"kl_to_ref_coeff": 0.1, "entropy_coeff": 0.1},
                {"proximal": "scored", "mismatch": {"tis": 2.0}, "off_policy_delta": 0.1},
                {"distill_coeff": 0.1, "high_entropy_only": True}, LISTWISE):
            loss, batch = GRPOLoss(model, **options), original.clone()
            expected = gradient(loss, batch)
            outside = ~batch["masks", "all_assistant_mask"]
            outside[1] = True
            for key in (("log_probs", "full"), ("log_probs", "proximal"), "advantage",
                        ("next", "ref_log_probs", "full"), ("distill", "log_probs")):
                value = batch[key]
                value[outside] = torch.nan
            batch["next", "reward"][1] = torch.nan
            batch["listwise_weight"][1] = torch.nan
            assert torch.equal(gradient(loss, batch), expected)


class TestRowsThatAreLeftOut:
    @pytest.mark.parametrize("options", [
        {}, {"aggregation": "sequence"}, {"aggregation": "prompt"}, {"objective": "gspo"},
        LISTWISE], ids=str)
    def test_a_filtered_row_is_as_good_as_absent(self, model, batch, options):
        loss, masked = GRPOLoss(model, **options), batch.copy()
        masked["row_mask"] = torch.tensor([[True], [False], [True], [True]])
        assert torch.equal(loss.normalizer(masked).count, loss.normalizer(batch[[0, 2, 3]]).count)
        torch.testing.assert_close(gradient(loss, masked), gradient(loss, batch[[0, 2, 3]]),
                                   rtol=1e-9, atol=1e-12)
        assert (gradient(loss, masked) - gradient(loss, batch)).abs().max() > 1e-3


class TestGroups:
    """Objectives that compare the sequences of a prompt."""

    def test_micro_batches_of_whole_groups_add_up(self, model, batch):
        for options in (LISTWISE, {**LISTWISE, "objective": "maxent_weighted",
                                   "kl_to_ref_coeff": 0.1}):
            loss = GRPOLoss(model, **options)
            shuffled = batch[[2, 0, 3, 1]]
            norm = loss.normalizer(shuffled)
            parts = split_rows(shuffled, num_micro_batches=2, whole_groups=True)
            assert [len(part) for part in parts] == [2, 2]
            total = 0
            for part in parts:
                grads = torch.autograd.grad(total_loss(loss(part, normalizer=norm)),
                                            list(model.parameters()))
                total = total + torch.cat([g.flatten() for g in grads])
            torch.testing.assert_close(total, gradient(loss, batch), rtol=1e-9, atol=1e-12)

    def test_a_group_that_was_cut_is_refused(self, model, batch):
        loss = GRPOLoss(model, **LISTWISE)
        norm = loss.normalizer(batch)
        with pytest.raises(ValueError, match=r"prompts \[1\] are not whole.*whole_groups=True"):
            loss(batch[:3], normalizer=norm)

    def test_the_weights_of_a_rollout_are_read(self, model, batch):
        weighed = MaxEntWeights(tau=1.0)(batch.exclude("advantage", "listwise_weight"))
        loss = GRPOLoss(model, **LISTWISE)
        assert (gradient(loss, weighed) - gradient(loss, batch)).abs().max() > 1e-3
        flat = MaxEntWeights(tau=1e9)(batch.clone())
        assert (gradient(loss, weighed) - gradient(loss, flat)).abs().max() > 1e-3

    def test_nothing_is_reported_as_clipped_without_a_clip(self, model, batch):
        names = {"clip_fraction_low", "clip_fraction_high"}
        assert not names & set(GRPOLoss(model, **LISTWISE)(batch).keys())
        clipped = GRPOLoss(model, **LISTWISE, objective_options={"clip_coeff": 1.0})
        assert names <= set(clipped(batch).keys())


class TestBatches:
    def test_a_plain_causal_model_learns_in_a_few_lines(self, make_model, make_batch):
        model = make_model(dtype=torch.float32)
        batch = make_batch(model, noise=0.0).exclude("advantage")
        batch["next", "reward"] = torch.tensor([[1.0], [0.0], [0.0], [1.0]])
        batch = GroupAdvantage()(batch)
        loss = GRPOLoss(model, clip_epsilon=(1.0, 10.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        norm = loss.normalizer(batch)
        before = total_loss(loss(batch))
        for micro_batch in split_rows(batch, num_micro_batches=2):
            total_loss(loss(micro_batch, normalizer=norm)).backward()
        optimizer.step()
        assert total_loss(loss(batch)) < before - 1e-3

    @pytest.mark.parametrize("token_level", [False, True])
    def test_torchrl_layout_gives_the_same_loss(self, model, make_batch, token_level):
        batch = make_batch(model, token_level=token_level, error_rows=(1,))
        ragged = to_torchrl(batch)
        loss = GRPOLoss(model, kl_to_ref_coeff=0.1, aggregation="sequence")
        torch.testing.assert_close(gradient(loss, ragged), gradient(loss, batch),
                                   rtol=1e-9, atol=1e-12)
        assert loss.normalizer(ragged).count == loss.normalizer(batch).count == 3

    def test_rows_filtered_in_torchrl_layout_stay_out_of_the_loss(self, model, make_batch):
        batch = make_batch(model)
        ragged, advantage = to_torchrl(batch), GroupAdvantage(mask_truncated=True)
        batch["next", "truncated"] = torch.arange(len(batch))[:, None] == 1
        ragged["next", "truncated"] = batch["next", "truncated"]
        loss = GRPOLoss(model, aggregation="sequence")
        assert loss.normalizer(advantage(ragged)).count == len(batch) - 1
        torch.testing.assert_close(gradient(loss, ragged), gradient(loss, advantage(batch)),
                                   rtol=1e-9, atol=1e-12)

    def test_shares_of_a_group_are_read_in_torchrl_layout(self, model, make_batch):
        batch = make_batch(model)
        ragged, weights, loss = to_torchrl(batch), MaxEntWeights(tau=1.0), GRPOLoss(
            model, **LISTWISE)
        torch.testing.assert_close(gradient(loss, weights(ragged)),
                                   gradient(loss, weights(batch)), rtol=1e-9, atol=1e-12)

    @pytest.mark.parametrize("aggregation", ["token", "prompt"])
    def test_group_ids_may_have_the_shape_of_rewards(self, model, make_batch, aggregation):
        batch = make_batch(model)
        loss = GRPOLoss(model, aggregation=aggregation)
        expected = gradient(loss, batch)
        batch["group_id"] = batch["group_id"][:, None]
        assert torch.equal(gradient(loss, batch), expected)

    def test_a_torchrl_wrapper_is_unwrapped(self, model):
        class Wrapper(nn.Module):
            def __init__(self, model):
                super().__init__()
                self.model = model

            def get_dist(self, td):
                raise AssertionError("the loss scores tokens itself")

        assert GRPOLoss(Wrapper(model)).actor_network is model

    def test_the_batch_is_left_as_it_was(self, model, batch):
        copy = batch.clone()
        GRPOLoss(model, kl_to_ref_coeff=0.1, entropy_coeff=0.1, proximal="scored",
                 mismatch={"tis": 2.0}, high_entropy_only=True, distill_coeff=0.1)(batch)
        assert (copy == batch).all() and set(copy.keys(True)) == set(batch.keys(True))


@pytest.mark.parametrize("head", ["fused", "chunked", "logits"])
def test_a_token_that_was_hardly_ever_sampled_does_not_make_the_gradient_nan(
        make_model, make_batch, head):
    """The ratio of such a token is infinite in float32; a positive advantage clips its term."""
    model = make_model(dtype=torch.float32)
    batch = make_batch(model)
    batch["advantage"] = torch.ones(len(batch), 1)
    batch["next", "ref_log_probs", "full"] = batch["log_probs", "full"].clone()
    row, column = batch["masks", "all_assistant_mask"].nonzero()[3].tolist()
    loss = GRPOLoss(model, head=head, kl_to_ref_coeff=0.1, kl_to_inference_coeff=0.1)
    usual = gradient(loss, batch)
    batch["log_probs", "full"][row, column] = -120.0
    out = loss(batch)
    assert out["ratio_max"] == torch.inf and total_loss(out).isfinite()
    assert gradient(loss, batch).isfinite().all() and usual.isfinite().all()
