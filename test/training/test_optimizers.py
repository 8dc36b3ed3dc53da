"""The optimizers inside MasterAdamW: masters stay float32, each moves the weights its own way."""

from __future__ import annotations

import importlib.util
import io

import pytest
import torch
from torch import nn

from grpo.training.optim import MasterAdamW
from grpo.training.optimizers import make_optimizer

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


def make_params(dtype=torch.bfloat16) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
            for shape in ((64, 96), (8,))]


def train(optimizer: MasterAdamW, steps: int = 3) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        sum((param.float() * torch.randn(param.shape, generator=generator)).sum()
            for param in optimizer.params).backward()
        optimizer.step()


def test_masters_on_the_host_are_those_of_adamw():
    """On a CPU the place is the same; what differs is that float32 weights get masters, too."""
    one, other = make_params(), make_params()
    train(MasterAdamW(one, lr=1e-3))
    train(MasterAdamW(other, lr=1e-3, name="adamw_cpu"))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_adafactor_is_that_of_transformers():
    from transformers.optimization import Adafactor

    ours, theirs = make_params(torch.float32), make_params(torch.float32)
    optimizer = MasterAdamW(ours, lr=1e-3, name="adafactor", clip_grad_norm=None)
    reference = Adafactor(theirs, lr=1e-3, scale_parameter=False, relative_step=False)
    train(optimizer)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        sum((param * torch.randn(param.shape, generator=generator)).sum()
            for param in theirs).backward()
        reference.step()
        reference.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_adafactors_options_change_the_steps():
    moved = {}
    for options in ({}, {"scale_parameter": True}, {"relative_step": True}):
        params, start = make_params(torch.float32), make_params(torch.float32)
        optimizer = MasterAdamW(params, lr=1e-3, name="adafactor", **options)
        train(optimizer, steps=1)
        moved[str(options)] = (params[0] - start[0]).abs().mean().item()
    assert len(set(moved.values())) == 3
    assert optimizer.lr == pytest.approx(2**-0.5, abs=1) and optimizer.lr <= 1e-2


def test_the_state_goes_on_and_is_not_taken_for_anothers():
    whole, first = make_params(), make_params()
    train(MasterAdamW(whole, lr=1e-3, name="adafactor"), steps=2)
    optimizer = MasterAdamW(first, lr=1e-3, name="adafactor")
    train(optimizer, steps=1)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    second = [nn.Parameter(param.detach().clone()) for param in first]
    resumed = MasterAdamW(second, lr=1e-3, name="adafactor")
    resumed.load_state_dict(state)
    generator = torch.Generator().manual_seed(1)
    sum((param.float() * torch.randn(param.shape, generator=generator)).sum()
        for param in second).backward()
    resumed.step()
    assert all(torch.equal(a, b) for a, b in zip(whole, second, strict=True))
    with pytest.raises(ValueError, match="has the state of optimizer.name=adafactor, this run"):
        MasterAdamW(make_params(), lr=1e-3).load_state_dict(state)


@pytest.mark.parametrize(("name", "options", "message"), [
    ("sgd", {}, "name='sgd' is unknown"),
    ("adamw", {"scale_parameter": True}, "are options of adafactor, not of adamw")])
def test_what_an_optimizer_does_not_read_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_optimizer(name, make_params(torch.float32), **{
            "scale_parameter": False, "relative_step": False, **OPTIONS, **options})


def test_eight_bit_moments_need_a_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install torchao"):
        MasterAdamW(make_params(), lr=1e-3, name="adamw_8bit")


@pytest.mark.slow  # torchao compiles its step
def test_eight_bit_moments_take_a_quarter_and_steps_stay_close():
    pytest.importorskip("torchao")
    params, reference = make_params(torch.float32), make_params(torch.float32)
    optimizer = MasterAdamW(params, lr=1e-3, name="adamw_8bit")
    train(optimizer)
    train(MasterAdamW(reference, lr=1e-3))
    assert (params[0] - reference[0]).abs().mean() < 3e-4  # of steps of about 1e-3 each
    moment = optimizer.adamw.state[params[0]]["exp_avg"]
    assert moment.codes.element_size() == 1 and moment.scale.numel() == params[0].numel() // 256
