"""MasterAdamW: float32 masters, exact accumulation, clipping, schedules, resuming."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from grpo.training.optim import MasterAdamW, lr_factor


def make_params(dtype=torch.float32, seed=0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
            for shape in [(3, 4), (5,), (2, 2)]]


def gradients(params, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(param.shape, generator=generator) for param in params]


def backward(params, grads) -> None:
    """A backward pass that gives each parameter the gradient of that value."""
    sum((param * grad.to(param.dtype)).sum()
        for param, grad in zip(params, grads, strict=True)).backward()


def run(optimizer, params, steps) -> None:
    for step in steps:
        backward(params, gradients(params, step))
        optimizer.step()


@pytest.mark.parametrize("options", [
    {"lr": 0.1, "weight_decay": 0.0},
    {"lr": 0.01, "weight_decay": 0.3, "betas": (0.8, 0.95), "eps": 1e-4}])
def test_float32_parameters_are_trained_exactly_as_by_adamw(options):
    params, expected = make_params(), make_params()
    optimizer = MasterAdamW(params, clip_grad_norm=None, **options)
    adamw = torch.optim.AdamW(expected, **options)
    run(optimizer, params, range(5))
    for step in range(5):
        adamw.zero_grad()
        backward(expected, gradients(expected, step))
        adamw.step()
    for ours, theirs in zip(params, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_clipped_steps_are_those_of_adamw_after_clip_grad_norm():
    params, expected = make_params(), make_params()
    optimizer = MasterAdamW(params, lr=0.1, eps=1.0, clip_grad_norm=0.5)
    adamw = torch.optim.AdamW(expected, lr=0.1, eps=1.0, weight_decay=0.0)
    for step in range(3):
        backward(params, gradients(params, step))
        norm = optimizer.step()
        adamw.zero_grad()
        backward(expected, gradients(expected, step))
        assert norm == pytest.approx(nn.utils.clip_grad_norm_(expected, 0.5).item())
        adamw.step()
        # One norm over all parameters, reported as it was before clipping.
        assert norm == pytest.approx(math.sqrt(sum(
            g.square().sum().item() for g in gradients(params, step))))
    for ours, theirs in zip(params, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_updates_too_small_for_bfloat16_add_up_in_the_masters():
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = MasterAdamW([weight], lr=1e-4)
    for _ in range(10):
        weight.sum().backward()
        optimizer.step()
    assert weight.tolist() == [1.0] * 4  # 0.999 rounds to 1
    assert optimizer.masters[0].tolist() == pytest.approx([0.999] * 4, abs=1e-6)
    for _ in range(30):
        weight.sum().backward()
        optimizer.step()
    # 0.996, which a bfloat16 weight updated 40 times by 0.0001 would never have reached.
    assert weight.tolist() == [0.99609375] * 4


def test_bfloat16_weights_are_the_rounded_masters_of_a_float32_run():
    params = make_params(torch.bfloat16)
    masters = [nn.Parameter(p.detach().float()) for p in params]
    optimizer, reference = MasterAdamW(params, lr=0.01), MasterAdamW(masters, lr=0.01)
    for step in range(5):
        grads = [g.bfloat16() for g in gradients(params, step)]
        backward(params, grads)
        backward(masters, [g.float() for g in grads])
        optimizer.step()
        reference.step()
    for param, own, expected in zip(params, optimizer.masters, masters, strict=True):
        assert torch.equal(own, expected)
        assert torch.equal(param, expected.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_micro_batches_are_added_up_in_float32(dtype):
    # In half precision 1 + 2**-12 is 1: the small ones would be lost, one by one.
    weight = nn.Parameter(torch.zeros(1, dtype=dtype))
    optimizer = MasterAdamW([weight], lr=1e-3)
    values = [1.0] + [2.0**-12] * 64
    for value in values:
        (weight * torch.tensor(value, dtype=dtype)).sum().backward()
    assert weight.grad is None
    assert optimizer.masters[0].grad.item() == sum(values)
    assert optimizer.step() == pytest.approx(sum(values))


def test_a_weight_used_twice_gets_both_gradients():
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = MasterAdamW([weight], lr=1e-3)
    (weight.sum() + 2 * weight.sum()).backward()
    assert optimizer.masters[0].grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_cleared_after_a_step(dtype):
    params = make_params(dtype)
    optimizer = MasterAdamW(params, lr=0.01)
    run(optimizer, params, [0])
    assert all(t.grad is None for t in [*params, *optimizer.masters])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_changes_nothing_and_says_what_to_do(bad, dtype):
    params = make_params(dtype)
    optimizer = MasterAdamW(params, lr=0.1)
    run(optimizer, params, [0])
    before = [p.detach().clone() for p in params]
    state = copy.deepcopy(optimizer.state_dict())
    grads = gradients(params, 1)
    grads[1][2] = bad
    backward(params, grads)
    with pytest.raises(FloatingPointError, match="weights are unchanged.*lower optimizer.lr"):
        optimizer.step()
    assert all(map(torch.equal, params, before))
    assert optimizer.state_dict()["steps"] == state["steps"] == 1
    assert torch.equal(optimizer.state_dict()["adamw"][1]["exp_avg"],
                       state["adamw"][1]["exp_avg"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_keep_their_memory(dtype):
    shared = torch.randn(6, 4).to(dtype)
    params = [nn.Parameter(shared[:2]), nn.Parameter(shared[2:])]
    for param, rows in zip(params, (shared[:2], shared[2:]), strict=True):
        param.data = rows
    addresses = [p.data_ptr() for p in params]
    before = shared.clone()
    optimizer = MasterAdamW(params, lr=0.1)
    run(optimizer, params, range(2))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, params, range(2))
    assert [p.data_ptr() for p in params] == addresses
    assert torch.equal(shared, torch.cat([p.detach() for p in params]))
    assert not torch.equal(shared, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_continues_identically(dtype):
    options = {"lr": 0.05, "schedule": "cosine", "warmup_steps": 2, "total_steps": 8,
               "weight_decay": 0.1}
    params = make_params(dtype)
    optimizer = MasterAdamW(params, **options)
    run(optimizer, params, range(3))
    state = copy.deepcopy(optimizer.state_dict())
    restored = [nn.Parameter(p.detach().clone()) for p in params]
    again = MasterAdamW(restored, **options)
    again.load_state_dict(state)
    for step in range(3, 8):
        assert again.lr == optimizer.lr
        run(optimizer, params, [step])
        run(again, restored, [step])
    assert all(map(torch.equal, params, restored))
    assert all(map(torch.equal, optimizer.masters, again.masters))


def test_a_restored_optimizer_keeps_the_options_it_was_built_with():
    params = make_params()
    optimizer = MasterAdamW(params, lr=0.1)
    run(optimizer, params, [0])
    changed = MasterAdamW(make_params(), lr=0.02, betas=(0.5, 0.6), weight_decay=0.3)
    changed.load_state_dict(optimizer.state_dict())
    assert changed.lr == 0.02
    run(changed, changed.params, [1])
    group = changed.adamw.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.02, (0.5, 0.6), 0.3)


def test_frozen_parameters_are_left_alone_and_a_frozen_model_is_refused():
    params = make_params()
    params[0].requires_grad_(False)
    assert [p is q for p, q in zip(MasterAdamW(params, lr=0.1).params, params[1:], strict=True)]
    with pytest.raises(ValueError, match="no parameter to train"):
        MasterAdamW(params[:1], lr=0.1)


def test_a_decaying_schedule_needs_to_know_the_end():
    with pytest.raises(ValueError, match="schedule='linear' needs total_steps"):
        MasterAdamW(make_params(), lr=0.1, schedule="linear")


def test_the_schedule_sets_the_size_of_the_steps():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = MasterAdamW([weight], lr=0.1, schedule="linear", warmup_steps=2, total_steps=4)
    sizes = []
    for _ in range(4):
        before, lr = weight.item(), optimizer.lr
        weight.sum().backward()
        optimizer.step()
        # A constant gradient makes Adam's step as long as the learning rate.
        assert before - weight.item() == pytest.approx(lr, rel=1e-3)
        sizes.append(lr)
    assert sizes == pytest.approx([0.05, 0.1, 0.1, 0.05])


@given(schedule=st.sampled_from(["constant", "linear", "cosine"]), warmup=st.integers(0, 10),
       decay=st.integers(1, 30), final=st.floats(0, 1))
def test_a_schedule_rises_then_never_rises_again_and_ends_at_its_fraction(
        schedule, warmup, decay, final):
    total = warmup + decay
    factors = [lr_factor(i, schedule=schedule, warmup_steps=warmup, total_steps=total,
                         final_fraction=final) for i in range(total + 3)]
    assert factors[:warmup] == pytest.approx([(i + 1) / warmup for i in range(warmup)])
    rest = factors[warmup:]
    assert rest[0] == 1.0
    assert all(a >= b - 1e-12 for a, b in zip(rest, rest[1:], strict=False))
    assert factors[total:] == pytest.approx([1.0 if schedule == "constant" else final] * 3)


def test_halfway_a_cosine_has_lost_half():
    assert lr_factor(5, schedule="cosine", warmup_steps=0, total_steps=10,
                     final_fraction=0.2) == pytest.approx(0.6)
    assert lr_factor(2, schedule="cosine", warmup_steps=0, total_steps=10) == pytest.approx(
        0.5 * (1 + math.cos(math.pi / 5)))


def test_a_skipped_step_moves_nothing_whatever_the_momentum():
    weight = nn.Parameter(torch.ones(3))
    optimizer = MasterAdamW([weight], lr=0.1, weight_decay=0.1)
    weight.sum().backward()
    optimizer.step()
    before = weight.detach().clone()
    weight.sum().backward()
    assert optimizer.skip() == 0.0
    assert torch.equal(weight, before)
    assert optimizer.steps == 2 and weight.grad is None


def test_masters_of_another_precision_are_refused():
    half, full = nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), nn.Parameter(torch.ones(2))
    state = MasterAdamW([half], lr=0.1).state_dict()
    with pytest.raises(ValueError, match="train_model.torch_dtype"):
        MasterAdamW([full], lr=0.1).load_state_dict(state)
