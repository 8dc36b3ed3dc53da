"""Learner: the update does not depend on the split; order, epochs, groups, the proximal policy and
checkpointing."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from grpo import data
from grpo.config.schema import Config
from grpo.objectives import GRPOLoss
from grpo.objectives.aggregate import row_weights
from grpo.objectives.inputs import loss_mask
from grpo.objectives.maxent import MaxEntWeights
from grpo.policies.scoring import ProximalScorer
from grpo.run.build_objective import rows_like_a_batch
from grpo.training.learner import CheckpointingProbe, Learner
from grpo.training.optim import MasterAdamW

ROWS, PROMPT, RESPONSE = 8, 3, 5


@pytest.fixture
def model(tiny_model):
    return tiny_model


def make_rollout(*, seed: int = 0, errors: tuple[int, ...] = (), double: bool = False
                 ) -> TensorDict:
    """Eight rows of different lengths and advantages in four mixed groups."""
    generator = torch.Generator().manual_seed(seed)
    prompt_sizes = torch.randint(1, PROMPT + 1, (ROWS,), generator=generator)
    sizes = torch.randint(1, RESPONSE + 1, (ROWS,), generator=generator)
    rollout = data.join_prompt_response(
        torch.randint(2, 23, (ROWS, PROMPT), generator=generator),
        torch.arange(PROMPT) < prompt_sizes[:, None],
        torch.randint(2, 23, (ROWS, RESPONSE), generator=generator),
        torch.arange(RESPONSE) < sizes[:, None],
        -3.0 + 0.3 * torch.randn(ROWS, RESPONSE, generator=generator), pad_token_id=0)
    rollout[data.ADVANTAGE] = torch.randn(ROWS, 1, generator=generator)
    error = torch.zeros(ROWS, 1, dtype=torch.bool)
    error[list(errors)] = True
    rollout[data.REWARD_ERROR] = error
    rollout[data.REWARD] = torch.randn(ROWS, 1, generator=generator)
    rollout[data.GROUP_ID] = torch.tensor([13, 11, 13, 11, 10, 10, 12, 12])
    if double:
        rollout[data.LOG_PROBS] = rollout[data.LOG_PROBS].double()
    return rollout


def make_learner(model, *, loss=None, lr=0.05, **options) -> Learner:
    loss = GRPOLoss(model, **{"entropy_coeff": 0.01, **(loss or {})})
    # A large eps makes the step proportional to the gradient instead of to its sign.
    optimizer = MasterAdamW(model.parameters(), lr=lr, eps=1.0, clip_grad_norm=None)
    if not {"num_micro_batches", "max_tokens_per_micro_batch"} & set(options):
        options["num_micro_batches"] = 1
    return Learner(loss, optimizer, **{"rows_per_step": ROWS, **options})


def weights_after(model, rollout, *, updates: int = 1, **options):
    """Parameters and metrics of a copy of the model after some updates."""
    model = copy.deepcopy(model)
    learner = make_learner(model, **options)
    for iteration in range(updates):
        metrics = learner.update(rollout, iteration=iteration)
    return torch.cat([p.detach().flatten() for p in model.parameters()]), metrics


def flat(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(split=st.one_of(st.builds(lambda n: {"num_micro_batches": n}, st.integers(1, 10)),
                       st.builds(lambda n: {"max_tokens_per_micro_batch": n},
                                 st.integers(1, 80))),
       objective=st.sampled_from([("ppo_clip", "token"), ("cispo", "prompt"),
                                  ("gspo", "sequence"), ("maxent_listwise", "prompt"),
                                  ("maxent_weighted", "prompt")]), width=st.sampled_from([1, 4]))
def test_the_update_does_not_depend_on_the_split(split, objective, width, model):
    rollout = make_rollout(errors=(2,))
    loss = {"objective": objective[0], "aggregation": objective[1]}
    if objective[0].startswith("maxent"):
        MaxEntWeights(tau=0.5)(rollout)
    expected, metrics = weights_after(model, rollout, loss=loss)
    weights, other = weights_after(model, rollout, loss=loss, width_multiple=width, **split)
    assert (expected - flat(model)).abs().max() > 1e-3
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=0)
    assert metrics.keys() == other.keys()
    assert other == pytest.approx(metrics, abs=1e-6)


def test_a_packed_update_is_the_padded_one(model):
    rollout = make_rollout()
    padded, _ = weights_after(model, rollout)
    packed, _ = weights_after(model, rollout, loss={"packing": True}, num_micro_batches=2)
    torch.testing.assert_close(packed, padded, atol=1e-6, rtol=0)


@pytest.mark.parametrize("packing", [False, True])
def test_rows_to_warm_up_with_run_the_layers_and_leave_no_trace(model, packing):
    rollout = make_rollout()
    expected, _ = weights_after(model, rollout, loss={"packing": packing})
    backward = []
    learner = make_learner(model, loss={"packing": packing})
    layer = model.model.layers[0]
    layer.register_full_backward_hook(lambda *_: backward.append(1))
    learner.warm_up(*rows_like_a_batch(Config(env={"repeats": 4}), 10))
    assert backward and all(master.grad is None for master in learner.optimizer.masters)
    assert all(param.grad is None for param in model.parameters())
    learner.update(rollout, iteration=0)
    assert torch.equal(flat(model), expected)


def test_the_order_of_rows_does_not_matter_within_an_optimizer_step(model):
    rollout = make_rollout()
    expected, _ = weights_after(model, rollout)
    shuffled = rollout[torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))]
    weights, _ = weights_after(model, shuffled, num_micro_batches=3)
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=0)


def test_the_rows_of_an_update_are_cut_into_steps_that_visit_each_once_an_epoch(model):
    learner = make_learner(model, rows_per_step=2, epochs=3)
    rollout = make_rollout()
    rollout["row"] = torch.arange(ROWS)
    batches = list(learner._optimizer_batches(rollout, 4))
    assert len(batches) == 12
    epochs = [torch.cat([b["row"] for b in batches[i : i + 4]]) for i in (0, 4, 8)]
    for order in epochs:
        assert order.sort().values.tolist() == list(range(ROWS))
    assert not torch.equal(epochs[0], epochs[1])
    again = torch.cat([b["row"] for b in learner._optimizer_batches(rollout, 4)])
    assert torch.equal(again, torch.cat(epochs))
    other = torch.cat([b["row"] for b in learner._optimizer_batches(rollout, 5)])
    assert not torch.equal(other, torch.cat(epochs))
    seeded = make_learner(model, rows_per_step=2, epochs=3, seed=1)
    other = torch.cat([b["row"] for b in seeded._optimizer_batches(rollout, 4)])
    assert not torch.equal(other, torch.cat(epochs))


def test_epochs_and_optimizer_batches_are_that_many_steps(model):
    rollout = make_rollout()
    learner = make_learner(model, rows_per_step=4, epochs=3)
    metrics = learner.update(rollout, iteration=0)
    assert learner.optimizer.steps == 6
    assert metrics["train/lr"] == pytest.approx(0.05)
    # Two epochs of the whole batch are the same batch twice.
    weights, _ = weights_after(model, rollout, epochs=2)
    expected, _ = weights_after(model, rollout, updates=2)
    assert torch.equal(weights, expected)


def test_an_update_is_the_step_that_autograd_gives_for_the_whole_batch(model):
    rollout = make_rollout()
    weights, metrics = weights_after(model, rollout, num_micro_batches=3)
    loss = GRPOLoss(model, clip_epsilon=(0.2, 0.2), entropy_coeff=0.01)
    out = loss(rollout)
    (out["loss_objective"] + out["loss_entropy"]).backward()
    adamw = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1.0, weight_decay=0.0)
    adamw.step()
    torch.testing.assert_close(weights, flat(model), atol=1e-6, rtol=0)
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    assert metrics["train/grad_norm"] == pytest.approx(norm)
    for key in ("objective", "entropy"):
        assert metrics[f"loss/{key}"] == pytest.approx(out[f"loss_{key}"].item())
    assert metrics["policy/ess"] == pytest.approx(out["ess"].item())


def test_metrics_are_means_and_extremes_over_the_optimizer_steps(model):
    # A learning rate of almost nothing: the steps see the same weights.
    rollout = make_rollout()
    _, metrics = weights_after(model, rollout, rows_per_step=4, lr=1e-12)
    learner = make_learner(model, rows_per_step=4, lr=1e-12)
    parts = [learner._optimizer_step(part) for part in learner._optimizer_batches(rollout, 0)]
    assert len(parts) == 2
    expected = {key: (parts[0][key] + parts[1][key]) / 2 for key in parts[0]}
    for name, extreme in (("policy/ratio_min", min), ("policy/ratio_max", max),
                          ("policy/log_prob_diff_abs_max", max)):
        expected[name] = extreme(part[name] for part in parts)
    assert metrics == pytest.approx(expected, rel=1e-6)


def test_rows_without_a_reward_do_not_move_the_weights(model):
    rollout = make_rollout(errors=(1, 5))
    expected, _ = weights_after(model, rollout)
    changed = rollout.clone()
    for row in (1, 5):
        changed[data.LOG_PROBS][row] = -7.0
        changed[data.TOKENS][row] = 3
    weights, _ = weights_after(model, changed, num_micro_batches=8)
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=0)
    without = rollout[[0, 2, 3, 4, 6, 7]]
    weights, _ = weights_after(model, without, rows_per_step=6)
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=0)


def test_an_optimizer_batch_without_any_reward_changes_no_weight_and_hides_no_metric(model):
    weights, metrics = weights_after(model, make_rollout(errors=tuple(range(ROWS))))
    assert torch.equal(weights, flat(model))
    assert metrics["train/grad_norm"] == 0.0
    # One such step beside ordinary ones does not hide their diagnostics, whatever the order.
    for seed in range(4):
        _, metrics = weights_after(model, make_rollout(errors=(0,)), rows_per_step=1, seed=seed)
        assert 0 < metrics["policy/ess"] <= 1


def test_the_time_of_the_last_update_is_kept(model):
    learner = make_learner(model)
    learner.update(make_rollout(), iteration=0)
    assert learner.seconds["train"] > 0
    assert learner.seconds["optimizer"] > 0
    assert "proximal" not in learner.seconds
    learner = scored(model)
    learner.update(make_rollout(), iteration=0)
    assert learner.seconds["proximal"] > 0


# -- Whole groups ----------------------------------------------------------------------------------


LISTWISE = {"objective": "maxent_listwise", "aggregation": "prompt"}


def groups_of(batch) -> list[int]:
    """The groups in a batch, after checking that each is whole."""
    counts = batch[data.GROUP_ID].bincount()
    assert set(counts.tolist()) <= {0, 2}, counts
    return counts.nonzero()[:, 0].tolist()


@pytest.mark.parametrize("split", [{"num_micro_batches": 3}, {"max_tokens_per_micro_batch": 9}])
def test_a_loss_of_groups_gets_them_whole_in_steps_and_micro_batches(model, split, monkeypatch):
    rollout = MaxEntWeights(tau=0.5)(make_rollout())
    learner = make_learner(model, loss=LISTWISE, rows_per_step=4, epochs=3, **split)
    batches = list(learner._optimizer_batches(rollout, 4))
    orders = [tuple(map(tuple, (groups_of(batches[i]), groups_of(batches[i + 1]))))
              for i in (0, 2, 4)]
    for first, second in orders:
        assert sorted(first + second) == [10, 11, 12, 13]
    assert len(set(orders)) > 1  # shuffled anew in each epoch

    seen = []
    forward = learner.loss.forward
    monkeypatch.setattr(learner.loss, "forward", lambda micro_batch, **options: (
        seen.append(groups_of(micro_batch)), forward(micro_batch, **options))[1])
    learner.update(rollout, iteration=4)
    assert len(seen) > 6
    assert sorted(sum(seen, [])) == sorted(3 * [10, 11, 12, 13])


PROMPTS = {"objective": "cispo", "aggregation": "prompt"}


@pytest.mark.parametrize("rows_per_step", [2, 4])
def test_every_prompt_has_the_same_share_of_several_steps(model, rows_per_step):
    """A prompt that is cut over two steps would count once in each, beside whole ones."""
    learner = make_learner(model, loss=PROMPTS, rows_per_step=rows_per_step, epochs=3)
    share = dict.fromkeys([10, 11, 12, 13], 0.0)
    for batch in learner._optimizer_batches(make_rollout(), 4):
        mask = loss_mask(batch)
        weight_B = row_weights(mask, learner.loss.normalizer(batch), aggregation="prompt",
                               group_id_B=batch[data.GROUP_ID]) * mask.sum(-1)
        for group, weight in zip(batch[data.GROUP_ID].tolist(), weight_B.tolist(), strict=True):
            share[group] += weight
    total = sum(share.values())
    assert [value / total for value in share.values()] == pytest.approx([0.25] * 4, abs=1e-12)


@pytest.mark.parametrize("sizes, rows_per_step", [
    ([1, 2, 3, 2], 4), ([1, 2, 3, 2], 2), ([6, 1, 1], 4), ([1, 1, 6], 4), ([2, 2, 2, 2], 8)])
def test_steps_end_between_groups_of_any_sizes(model, sizes, rows_per_step):
    rollout = make_rollout()
    rollout[data.GROUP_ID] = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    rollout["row"] = torch.arange(ROWS)
    for loss in (PROMPTS, LISTWISE):
        learner = make_learner(model, loss=loss, rows_per_step=rows_per_step, epochs=2)
        batches = list(learner._optimizer_batches(rollout, 1))
        assert len(batches) == 2 * ROWS // rows_per_step
        for batch in batches:
            counts = batch[data.GROUP_ID].bincount(minlength=len(sizes)).tolist()
            assert all(here in (0, size) for here, size in zip(counts, sizes, strict=True))
            assert len(batch)
        rows = torch.cat([batch["row"] for batch in batches])
        assert rows.sort().values.tolist() == sorted(2 * [*range(ROWS)])


def test_more_steps_than_groups_is_an_error_that_says_what_to_do(model):
    rollout = make_rollout()
    rollout[data.GROUP_ID] = torch.zeros(ROWS, dtype=torch.int64)
    learner = make_learner(model, loss=PROMPTS, rows_per_step=4)
    with pytest.raises(ValueError, match="2 optimizer steps of 4 rows, but has 1 groups.*raise"):
        learner.update(rollout, iteration=0)


def test_rows_go_their_own_way_where_the_loss_does_not_compare_them(model):
    learner = make_learner(model, rows_per_step=2, num_micro_batches=2)
    batches = list(learner._optimizer_batches(make_rollout(), 4))
    assert any(len(batch[data.GROUP_ID].unique()) == 2 for batch in batches)


# -- The proximal policy ---------------------------------------------------------------------------


class Recorded(ProximalScorer):
    """Remembers the weights it scored with."""

    def __call__(self, rollout):
        self.weights = [*getattr(self, "weights", []), flat(self.scorer.model).clone()]
        return super().__call__(rollout)


def scored(model, *, entropy_fraction=None, loss=None, **options) -> Learner:
    learner = make_learner(model, loss={"proximal": "scored", **(loss or {})}, **options)
    learner.proximal = Recorded(learner.loss.scorer, max_tokens=30,
                                entropy_fraction=entropy_fraction)
    return learner


def steps_of(learner, rollout, iteration=0) -> list[dict[str, float]]:
    """Metrics of each optimizer step of an update."""
    steps, step = [], learner._optimizer_step
    learner._optimizer_step = lambda batch: (steps.append(step(batch)), steps[-1])[1]
    learner.update(rollout, iteration=iteration)
    learner._optimizer_step = step
    return steps


def test_a_rollout_is_scored_once_before_its_first_step_and_the_ratio_starts_there(model):
    learner = scored(model, rows_per_step=4, epochs=2, num_micro_batches=2)
    for iteration in range(2):
        before = flat(model)
        rollout = make_rollout(seed=iteration, double=True)
        sampled = rollout[data.LOG_PROBS].clone()
        steps = steps_of(learner, rollout, iteration)
        assert len(steps) == 4
        assert len(learner.proximal.weights) == iteration + 1
        assert torch.equal(learner.proximal.weights[-1], before)
        assert torch.equal(rollout[data.LOG_PROBS], sampled)
        for extreme in ("policy/ratio_min", "policy/ratio_max"):
            assert steps[0][extreme] == pytest.approx(1, abs=1e-12)
            assert abs(steps[-1][extreme] - 1) > 1e-4
    # The sampled log-probs are random numbers here, so to them the ratio is nowhere near 1.
    learner = make_learner(model, rows_per_step=4)
    assert steps_of(learner, make_rollout(double=True))[0]["policy/ratio_max"] > 1.1


def test_in_one_batch_of_equal_lengths_the_first_ratios_are_exactly_one(model):
    rollout = make_rollout(double=True)
    for key in (data.ATTENTION_MASK, data.ASSISTANT_MASK):  # one shape, so one rounding
        rollout[key] = torch.ones_like(rollout[key])
    rollout[data.TOKENS] = rollout[data.TOKENS].clamp(min=2)
    learner = scored(model, epochs=2)
    learner.proximal.max_tokens = 1000
    first, second = steps_of(learner, rollout)
    assert first["policy/ratio_min"] == first["policy/ratio_max"] == 1
    assert second["policy/ratio_min"] < 1 < second["policy/ratio_max"]


@pytest.mark.parametrize("steps", [{"epochs": 2}, {"rows_per_step": 4}])
def test_the_current_policy_is_no_proximal_one_for_a_second_step(model, steps):
    learner = make_learner(model, loss={"proximal": "current"}, **steps)
    before = flat(model)
    with pytest.raises(ValueError, match="proximal='current' .* not 2: .* use proximal='scored'"):
        learner.update(make_rollout(), iteration=0)
    assert torch.equal(flat(model), before)


def test_the_current_policy_as_the_proximal_one_has_the_gradient_of_the_scored_one(model):
    rollout = make_rollout(double=True)
    weights, metrics = weights_after(model, rollout, loss={"proximal": "current"})
    assert metrics["policy/ratio_min"] == metrics["policy/ratio_max"] == 1
    learner = scored(copy.deepcopy(model))
    learner.update(rollout, iteration=0)
    torch.testing.assert_close(flat(learner.loss.actor_network), weights, atol=1e-9, rtol=0)
    assert (weights - flat(model)).abs().max() > 1e-3


def test_only_the_tokens_of_high_entropy_are_trained_on(model):
    rollout = make_rollout(double=True)
    mask = loss_mask(rollout)
    with torch.no_grad():
        logits = model(input_ids=rollout[data.TOKENS]).logits
    entropies = torch.nn.functional.pad(
        torch.distributions.Categorical(logits=logits[:, :-1]).entropy(), (1, 0))
    kept = -(-3 * int(mask.sum()) // 10)  # a share of 0.3, rounded up
    threshold = entropies[mask].sort(descending=True).values[kept - 1]
    chosen = mask & (entropies >= threshold - 1e-9)
    assert chosen.sum() == kept < mask.sum()

    expected = make_rollout(double=True)
    expected[data.HIGH_ENTROPY_MASK] = chosen
    loss = {"high_entropy_only": True}
    by_hand, _ = weights_after(model, expected, loss=loss)
    learner = scored(copy.deepcopy(model), entropy_fraction=0.3,
                     loss={"proximal": "sampled", **loss}, num_micro_batches=3)
    learner.update(rollout, iteration=0)
    assert torch.equal(rollout[data.HIGH_ENTROPY_MASK], chosen)
    torch.testing.assert_close(flat(learner.loss.actor_network), by_hand, atol=1e-9, rtol=0)
    everything, _ = weights_after(model, rollout)
    assert (everything - by_hand).abs().max() > 1e-3


# -- Gradient checkpointing ------------------------------------------------------------------------


def with_checkpointing(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


@pytest.mark.parametrize("packing", [False, True])
def test_checkpointing_gives_the_same_weights(packing, model):
    rollout, loss = make_rollout(), {"packing": packing}
    plain, _ = weights_after(model, rollout, updates=2, loss=loss)
    weights, _ = weights_after(with_checkpointing(model), rollout, updates=2, loss=loss,
                               num_micro_batches=2)
    torch.testing.assert_close(weights, plain, atol=1e-6, rtol=0)


def test_a_model_that_generated_before_is_put_into_training_mode_for_the_update(model):
    learner = make_learner(with_checkpointing(model).eval())
    learner.update(make_rollout(), iteration=0)  # the probe would have raised
    assert learner._probe is None


def test_a_model_that_says_it_checkpoints_and_does_not_is_found_out(model):
    with_checkpointing(model)
    learner = make_learner(model)
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = False
    before = flat(model)
    with pytest.raises(RuntimeError, match="ran 1 times in 1 forward .* not 2: .*not recomputed"):
        learner.update(make_rollout(), iteration=0)
    assert torch.equal(flat(model), before)


def test_a_model_in_evaluation_mode_does_not_recompute_and_the_probe_says_so(model):
    with_checkpointing(model).eval()
    probe = CheckpointingProbe(model)
    for _ in range(5):  # what generation and the canary ran before proves nothing
        model(input_ids=torch.tensor([[3, 4]]))
    probe.start()
    model(input_ids=torch.tensor([[3, 4]])).logits.sum().backward()
    with pytest.raises(RuntimeError, match="not recomputed"):
        probe.check(1)


def test_a_model_whose_layers_do_not_support_checkpointing_is_refused():
    with pytest.raises(ValueError, match="gradient_checkpointing=true.*Linear.*set it to false"):
        CheckpointingProbe(torch.nn.Linear(2, 2))
