"""``GRPOLoss``: its gradient, its options, its keys and the batches it accepts."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from grpo import GroupAdvantage, GRPOLoss, total_loss
from grpo.data import split_rows
from grpo.data_torchrl import to_torchrl
from grpo.objectives import register_surrogate, surrogates

CLIP = (0.2, 0.3)


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


@pytest.fixture(scope="module")
def batch(model, make_batch):
    return make_batch(model)


def gradient(loss, batch):
    parameters = list(loss.actor_network.parameters())
    grads = torch.autograd.grad(total_loss(loss(batch)), parameters, allow_unused=True)
    return torch.cat([g.flatten() for g in grads if g is not None])


class TestGradient:
    @pytest.mark.parametrize("options", [
        {},
        {"objective": "reinforce", "aggregation": "sequence", "temperature": 0.7},
        {"kl_to_ref_coeff": 0.1, "kl_to_inference_coeff": 0.2, "entropy_coeff": 0.05},
        {"aggregation": "dr_grpo", "constant_length": 6, "packing": True, "head_chunk_size": 4},
        {"kl_to_ref_coeff": 1.0, "kl_estimator": "k2", "head": "logits"},
    ], ids=str)
    @pytest.mark.parametrize("direction", range(3))
    def test_matches_finite_differences(self, make_model, make_batch, options, direction):
        model = make_model()
        # Transformers computes norms in float32, which would drown the differences.
        for name in dict(model.named_modules()):
            if name.endswith("norm"):
                model.set_submodule(name, nn.RMSNorm(16, eps=1e-6, dtype=torch.float64))
        batch = make_batch(model, token_level=True, seed=direction)
        clip = None if options.get("objective") == "reinforce" else CLIP
        loss = GRPOLoss(model, clip_epsilon=clip, **options)
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
        for head in ("chunked", "logits"):
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

    def test_on_policy_the_gradient_is_that_of_reinforce(self, model, make_batch):
        batch = make_batch(model, noise=0.0)
        clipped, plain = (gradient(GRPOLoss(model, objective=o), batch)
                          for o in ("ppo_clip", "reinforce"))
        torch.testing.assert_close(clipped, plain, rtol=1e-9, atol=1e-12)

    def test_values_outside_the_mask_may_be_nan(self, model, make_batch):
        batch = make_batch(model, token_level=True, error_rows=(1,))
        loss = GRPOLoss(model, kl_to_ref_coeff=0.1, entropy_coeff=0.1)
        expected = gradient(loss, batch)
        outside = ~batch["masks", "all_assistant_mask"]
        outside[1] = True
        for key in (("log_probs", "full"), ("next", "ref_log_probs", "full"), "advantage"):
            batch[key] = batch[key].masked_fill(outside, torch.nan)
        batch["next", "reward"][1] = torch.nan
        assert torch.equal(gradient(loss, batch), expected)


class TestOptions:
    SWITCHES = {
        "objective": ({}, {"objective": "reinforce"}),
        "clip_epsilon low": ({}, {"clip_epsilon": (0.5, 0.2)}),
        "clip_epsilon high": ({}, {"clip_epsilon": (0.2, 0.5)}),
        "aggregation sequence": ({}, {"aggregation": "sequence"}),
        "aggregation dr_grpo": ({"aggregation": "sequence"},
                                {"aggregation": "dr_grpo", "constant_length": 4}),
        "constant_length": ({"aggregation": "dr_grpo", "constant_length": 4},
                            {"aggregation": "dr_grpo", "constant_length": 5}),
        "kl_to_ref_coeff": ({}, {"kl_to_ref_coeff": 0.1}),
        "kl_to_inference_coeff": ({}, {"kl_to_inference_coeff": 0.1}),
        "kl_to_ref is not kl_to_inference": ({"kl_to_ref_coeff": 0.1},
                                             {"kl_to_inference_coeff": 0.1}),
        "k1 k2": ({"kl_to_ref_coeff": 0.1, "kl_estimator": "k1"},
                  {"kl_to_ref_coeff": 0.1, "kl_estimator": "k2"}),
        "k2 k3": ({"kl_to_ref_coeff": 0.1, "kl_estimator": "k2"},
                  {"kl_to_ref_coeff": 0.1, "kl_estimator": "k3"}),
        "entropy_coeff": ({}, {"entropy_coeff": 0.01}),
        "temperature": ({}, {"temperature": 0.7}),
    }

    @pytest.mark.parametrize("name", SWITCHES)
    def test_each_switch_changes_the_gradient(self, model, batch, name):
        one, other = (gradient(GRPOLoss(model, **options), batch)
                      for options in self.SWITCHES[name])
        assert (one - other).abs().max() > 1e-4 * one.abs().max()

    def test_each_advantage_estimator_has_its_own_gradient(self, model, make_batch):
        batch = make_batch(model, prompts=(1,) * 6, responses=(3, 4, 5, 2, 4, 3)).exclude(
            "advantage")
        batch["group_id"] = torch.tensor([0, 1, 0, 1, 0, 1])
        names = ("group_norm", "group_norm_population", "group_mean", "rloo")
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

    def test_the_way_of_computing_is_passed_on(self, model, batch, monkeypatch):
        """These options leave the gradient alone, so their effect is looked for elsewhere."""
        widths, chunks = [], []
        model_hook = model.model.register_forward_pre_hook(
            lambda module, args, kwargs: widths.append(tuple(kwargs["input_ids"].shape)),
            with_kwargs=True)
        monkeypatch.setattr(torch, "compile", lambda function: lambda hidden, *args: (
            chunks.append(len(hidden)), function(hidden, *args))[1])
        try:
            GRPOLoss(model, packing=True, head_chunk_size=8, compile_head=True)(batch)
            assert widths == [(1, 25)] and chunks == [8, 7]
            GRPOLoss(model, head="logits", compile_head=True)(batch)
            assert widths[1:] == [(4, 10)] and chunks == [8, 7]
        finally:
            model_hook.remove()

    @pytest.mark.parametrize(("option", "value"), [
        ("objective", "ppo"), ("aggregation", "mean"), ("kl_estimator", "k4"), ("head", "fused"),
        ("advantage_estimator", "gae"), ("clip_epsilon", -0.1), ("clip_epsilon", (0.2, 0.2, 0.2)),
        ("clip_epsilon", (1.5, 0.2)), ("clip_epsilon", None), ("kl_to_ref_coeff", -0.1),
        ("kl_to_inference_coeff", -0.1), ("entropy_coeff", -0.1), ("temperature", 0.0),
        ("temperature", -1.0), ("constant_length", 5),
    ])
    def test_a_wrong_value_is_an_error_that_names_option_and_value(self, model, option, value):
        with pytest.raises(ValueError) as error:
            GRPOLoss(model, **{option: value})
        assert option in str(error.value)
        assert value is None or repr(value) in str(error.value)

    @pytest.mark.parametrize("length", [None, 0])
    def test_dr_grpo_needs_a_length(self, model, length):
        with pytest.raises(ValueError, match="constant_length"):
            GRPOLoss(model, aggregation="dr_grpo", constant_length=length)

    def test_one_clip_bound_stands_for_both(self, model, batch):
        one, both = (gradient(GRPOLoss(model, clip_epsilon=c), batch) for c in (0.1, (0.1, 0.1)))
        assert torch.equal(one, both)

    def test_a_surrogate_of_ones_own(self, model, batch, monkeypatch):
        monkeypatch.setattr(surrogates, "_SURROGATES", dict(surrogates._SURROGATES))

        @register_surrogate("log_prob", clips=False)
        def log_prob(log_ratio_BT, advantage_BT, *, clip_epsilon):
            assert clip_epsilon is None
            return -log_ratio_BT * advantage_BT

        out = GRPOLoss(model, objective="log_prob")(batch)
        stats = out["token_stats"]
        expected = -(stats["log_ratio"] * stats["advantage"]).mean()
        torch.testing.assert_close(out["loss_objective"], expected)
        assert "clip_fraction_low" not in out.keys()


class TestKeys:
    def test_out_keys_are_the_losses_that_are_returned(self, model, batch):
        for options in ({}, {"kl_to_ref_coeff": 0.0}, {"kl_to_inference_coeff": 0.1},
                        {"entropy_coeff": 0.1, "kl_to_ref_coeff": 0.1}):
            loss = GRPOLoss(model, **options)
            out = loss(batch)
            assert [key for key in out.keys() if key.startswith("loss_")] == loss.out_keys
            assert total_loss(out) == sum(out[key] for key in loss.out_keys)

    def test_in_keys_suffice(self, model, batch):
        for options in ({}, {"kl_to_ref_coeff": 0.1}):
            loss = GRPOLoss(model, **options)
            only = batch.select(*loss.in_keys)
            assert len(list(only.keys(True, True))) == len(loss.in_keys)
            assert torch.equal(gradient(loss, only), gradient(loss, batch))

    @pytest.mark.parametrize(("name", "key"), [
        ("advantage", "advantage"),
        ("tokens", ("tokens", "full")),
        ("attention_mask", ("masks", "all_attention_mask")),
        ("assistant_mask", ("masks", "all_assistant_mask")),
        ("sample_log_prob", ("log_probs", "full")),
        ("ref_log_probs", ("next", "ref_log_probs", "full")),
        ("reward_error", ("next", "reward_error")),
    ])
    def test_set_keys_reads_the_renamed_entry_alone(self, model, make_batch, name, key):
        batch = make_batch(model, error_rows=(0,))
        loss = GRPOLoss(model, kl_to_ref_coeff=0.1)
        expected = gradient(loss, batch)
        loss.set_keys(**{name: ("mine", "x")})
        renamed = batch.copy()
        renamed["mine", "x"] = batch[key]
        renamed[key] = torch.zeros_like(batch[key])  # a decoy under the usual name
        before = sorted(map(str, renamed.keys(True, True)))
        assert torch.equal(gradient(loss, renamed), expected)
        assert sorted(map(str, renamed.keys(True, True))) == before

    def test_set_keys_for_rewards_and_groups(self, model, batch):
        batch = batch.exclude("advantage")
        expected = gradient(GRPOLoss(model), batch)
        loss = GRPOLoss(model)
        loss.set_keys(reward="score", group_id="prompt_index")
        batch["score"] = batch["next", "reward"]
        batch["prompt_index"] = batch["group_id"]
        assert torch.equal(gradient(loss, batch.exclude(("next", "reward"), "group_id")), expected)

    def test_set_keys_refuses_an_unknown_name(self, model):
        with pytest.raises(ValueError, match="value"):
            GRPOLoss(model).set_keys(value="state_value")

    @pytest.mark.parametrize(("key", "fix"), [
        (("masks", "all_attention_mask"), "policy"),
        (("masks", "all_assistant_mask"), "policy"),
        (("log_probs", "full"), "log-probs on"),
        (("next", "ref_log_probs", "full"), "kl_to_ref_coeff=None"),
    ])
    def test_a_missing_entry_is_named_with_the_fix(self, model, batch, key, fix):
        loss = GRPOLoss(model, kl_to_ref_coeff=0.1)
        with pytest.raises(KeyError) as error:
            loss(batch.exclude(key))
        assert str(key) in str(error.value) and fix in str(error.value)

    def test_a_missing_renamed_entry_is_not_replaced_by_the_usual_one(self, model, batch):
        for name in ("sample_log_prob", "advantage"):
            loss = GRPOLoss(model)
            loss.set_keys(**{name: "mine"})
            with pytest.raises(KeyError, match="mine"):
                loss(batch.exclude(("next", "reward")))

    def test_missing_tokens(self, model, batch):
        with pytest.raises(KeyError, match="'tokens'"):
            GRPOLoss(model)(batch.exclude(("tokens", "full")))

    def test_missing_advantages_cannot_be_made_from_a_part_of_the_batch(self, model, batch):
        loss, bare = GRPOLoss(model), batch.exclude("advantage")
        with pytest.raises(KeyError, match="GroupAdvantage"):
            loss(bare[:2], normalizer=loss.normalizer(bare))
        with pytest.raises(KeyError, match="GroupAdvantage"):
            loss(bare.exclude("group_id"))

    @pytest.mark.parametrize("key", [
        ("masks", "all_attention_mask"), ("masks", "all_assistant_mask"), ("log_probs", "full"),
        ("next", "ref_log_probs", "full")])
    def test_a_wrong_width_is_an_error(self, model, batch, key):
        wrong = batch.copy()
        wrong[key] = batch[key][:, 1:]
        with pytest.raises(ValueError, match=key[-1]):
            GRPOLoss(model, kl_to_ref_coeff=0.1)(wrong)

    @pytest.mark.parametrize("width", [0, 2, 9])
    def test_a_wrong_advantage_shape_is_an_error(self, model, batch, width):
        wrong = batch.copy()
        wrong["advantage"] = torch.ones(len(batch), width)
        with pytest.raises(ValueError, match="advantage"):
            GRPOLoss(model)(wrong)


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
        assert loss.normalizer(ragged) == loss.normalizer(batch) == 3

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
        GRPOLoss(model, kl_to_ref_coeff=0.1, entropy_coeff=0.1)(batch)
        assert (copy == batch).all() and set(copy.keys(True)) == set(batch.keys(True))

    def test_total_loss_adds_only_losses(self):
        out = TensorDict({"loss_a": torch.tensor(1.0), "loss_b": torch.tensor(2.0),
                          "kl_to_ref": torch.tensor(8.0)})
        assert total_loss(out) == 3
