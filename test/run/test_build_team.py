"""Which devices a synchronous run trains on, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from grpo.config.asynchronous import with_workers
from grpo.config.schema import ConfigError, load_config
from grpo.run.build_team import _variables, choose_devices
from grpo.run.placement import plan_devices

from ..config.configs import small

TWO = {"backend": "vllm", "engine": "process"}


def config(**train_model):
    return load_config(small(train_model=train_model, inference_model={**TWO, "max_tokens": 3}))


@pytest.fixture
def gpus(monkeypatch):
    """A machine with four GPUs; the list of those that were selected."""
    selected = []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    return selected


@pytest.mark.parametrize(("keys", "expected"), [
    ({}, (0,)), ({"num_devices": 1}, (0,)), ({"num_devices": 3}, (0, 1, 2)),
    ({"devices": [3, 1]}, (3, 1)), ({"devices": [3, 1], "num_devices": 2}, (3, 1))])
def test_the_first_gpus_train_unless_others_are_named(gpus, keys, expected):
    assert choose_devices(config(**keys), backend="vllm") == expected
    assert gpus == ([expected[0]] if len(expected) > 1 else [])


@pytest.mark.parametrize(("keys", "parts"), [
    ({"num_devices": 5}, "GPU 0, 1, 2, 3, 4, but there are 4: no GPU 4; lower train_model.num"),
    ({"devices": [1, 7]}, "GPU 1, 7, but there are 4: no GPU 7"),
    ({"devices": [2]}, "devices=[2]: on one device .* CUDA_VISIBLE_DEVICES=2 and remove the key")])
def test_gpus_that_are_not_there_are_refused(gpus, keys, parts):
    with pytest.raises(ConfigError, match=parts.replace("[", r"\[").replace("]", r"\]")):
        choose_devices(config(**keys), backend="vllm")


def test_on_a_cpu_devices_are_processes_without_numbers():
    on_cpu = config(num_devices=2).model_copy(update={"device": "cpu"})
    assert choose_devices(on_cpu, backend="vllm") == ()
    numbered = config(devices=[0, 1]).model_copy(update={"device": "cpu"})
    with pytest.raises(ConfigError, match=r"devices=\[0, 1\] numbers GPUs.*use num_devices"):
        choose_devices(numbered, backend="vllm")


@pytest.mark.parametrize("own", [[0], [0, 1]])
def test_engine_and_reference_may_be_told_to_be_where_they_are_anyway(gpus, own):
    sections = {"train_model": {"devices": own}, "ref_model": {"devices": own},
                "inference_model": {"backend": "vllm", "devices": own[:1]}}
    given = load_config(small(**sections, train={"kl_to_ref_coeff": 0.1}))
    plain = config(num_devices=len(own))
    assert not given.has_workers
    assert given.engine == ("in_process" if len(own) == 1 else plain.engine)
    assert given.weight_sync == plain.weight_sync
    assert choose_devices(given, backend="vllm") == tuple(own)
    on_cpu = given.model_copy(update={"device": "cpu"})
    assert choose_devices(on_cpu, backend="vllm") == ()
    for apart in ({"inference_model": {"devices": [2]}}, {"inference_model": {"num_devices": 1}},
                  {"ref_model": {"devices": [2]}}, {"ref_model": {"num_devices": 1}}):
        assert load_config(small(**{**sections, **apart}, train={"kl_to_ref_coeff": 0.1})
                           ).has_workers, apart


@pytest.mark.parametrize("own, devices, size", [([0], [0], 2), ([0, 1], [0], 4)])
def test_an_engine_of_several_devices_is_not_on_the_first_that_trains(own, devices, size):
    engine = {"devices": devices, "tensor_parallel_size": size}
    given = load_config(small(train_model={"devices": own}, inference_model=engine))
    assert given.has_workers
    with pytest.raises(ConfigError, match=f"inference_model has 1 devices, which cannot be divided "
                                          f"into engines of .*tensor_parallel_size={size}"):
        plan_devices(with_workers(given), kind="cuda", available=4)


def test_several_devices_without_vllm_are_refused_with_what_to_install():
    with pytest.raises(ConfigError, match="2 devices of train_model.*not installed: pip install"):
        choose_devices(config(num_devices=2), backend="transformers")


@pytest.mark.parametrize("before", [None, "4,5,6,7"])
def test_a_process_is_shown_gpus_by_the_names_that_this_one_knows_them_by(monkeypatch, before):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    assert _variables((2,)) == {"CUDA_VISIBLE_DEVICES": "2" if before is None else "6"}
    assert _variables(()) == {}  # on a CPU
