"""The configuration of grpo-async.py: its files, its defaults, and that every key is read."""

from __future__ import annotations

import os
from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from grpo.config.asynchronous import AsyncConfig, AsyncTrainConfig
from grpo.config.keys import ASYNC_KEYS
from grpo.config.schema import ConfigError, load_config
from grpo.config.train import TrainConfig
from grpo.report.starting import Starting
from grpo.run import build_async
from grpo.run.cli.names import key_error
from grpo.run.placement import DevicePlan
from grpo.weights import factory
from grpo.weights.fleet import FleetLoRA

from .configs import FOLDER, composed, small

RUNS = sorted(path.stem for path in FOLDER.glob("*async*.yaml"))


@pytest.mark.parametrize("name", RUNS)
def test_every_run_composes_is_valid_and_survives_being_sent(name):
    values = composed(name)
    config = load_config(values, AsyncConfig)
    assert config.train.exp_name == values.train.exp_name
    assert load_config(config.model_dump(mode="json"), AsyncConfig) == config
    with pytest.raises(ConfigError, match="unknown key"):  # by grpo.py
        load_config(values)


def test_there_are_runs_to_compose():
    assert {"grpo_async", "grpo_async_gsm8k", "grpo_async_ifeval"} <= set(RUNS)


def test_the_defaults_of_yaml_and_schema_are_the_same():
    defaults = AsyncConfig()
    sections = {"ray": OmegaConf.load(FOLDER / "ray" / "default.yaml"),
                **OmegaConf.load(FOLDER / "async" / "default.yaml")}
    assert set(sections["ray"]) == set(type(defaults.ray).model_fields)
    for name, keys in sections.items():
        for key, value in keys.items():
            assert getattr(getattr(defaults, name), key) == value, f"{name}.{key}"


@pytest.mark.parametrize(("sections", "message"), [
    ({"ref_model": {"sharded": True}, "train": {"kl_to_ref_coeff": 0.1}},
     "ref_model.sharded=true is not read because the reference has no two devices of its own; set "
     "ref_model.num_devices=2 or more, or remove it"),
    ({"ref_model": {"sharded": False, "num_devices": 2}}, "ref_model.sharded=false is not read"),
    ({"ref_model": {"sharded": True, "num_devices": 2}, "train": {"kl_to_ref_coeff": 0.1},
      "ray": {"address": "auto"}}, "sharded=true joins devices of one machine, but ray.address")])
def test_parts_of_a_reference_need_two_devices_of_one_machine(sections, message):
    with pytest.raises(ConfigError, match=message):
        load_config(sections, AsyncConfig)


class Stop(BaseException):
    """What was to be seen has been seen."""


class Pool:
    """As much of a pool as a collector is built around."""

    count, outdated, dead = 2, (), ()


@pytest.mark.parametrize("key, value, read", [
    ("staleness", 3, lambda c: c.schedule.staleness),
    ("group_deadline", 7.0, lambda c: c.schedule.group_deadline),
    ("oversample", 0.5, lambda c: c.schedule.extra / c.schedule.batch_groups),
    ("max_sampling_rounds", 3, lambda c: c.schedule.max_rounds),
    ("rollout_timeout", 9.0, lambda c: c.timeout)])
def test_keys_of_the_schedule_are_read(key, value, read):
    config = load_config(small(train={"total_dialog_turns": 40, key: value}), AsyncConfig)
    actor = SimpleNamespace(pool=Pool(), policy=None,
                            weights=SimpleNamespace(heal=None, on_publish=None))
    collector = build_async.build_collector(config, actor)
    assert read(collector) == value
    assert actor.weights.on_publish == collector.published


def test_updates_in_flight_need_an_engine_that_can(tmp_path):
    config = load_config(small(train={"update_at": "in_flight"}), AsyncConfig)
    with pytest.raises(ConfigError, match="train.update_at=in_flight: workers with the transf"):
        build_async.build_actor(SimpleNamespace(config=config), None, None,
                                backend="transformers", at_end=None, starting=None)


@pytest.mark.parametrize("train, parts", [
    ({"staleness": 0, "update_at": "in_flight"}, ["train.update_at=in_flight", "nothing is being"]),
    ({"staleness": 0, "update_at": "group_border"}, ["train.update_at=group_border", "raise one"]),
    ({"oversample": 0.1}, ["train.oversample=0.1", "of the 2 groups of a batch", "raise it"])])
def test_what_the_schedule_would_not_read_is_refused(train, parts):
    with pytest.raises(ConfigError) as error:
        load_config(small(train=train), AsyncConfig)
    assert all(part in str(error.value) for part in [*parts, "is not read because", "remove it"])


@pytest.mark.parametrize("train", [
    {"staleness": 0}, {"staleness": 0, "oversample": 0.5, "update_at": "group_border"}])
def test_what_is_read_at_no_staleness_is_taken(train):
    assert load_config(small(train=train), AsyncConfig).train.staleness == 0


LORA = {"lora": {"enabled": True}}


@pytest.mark.parametrize("update_at, mode, words", [
    ("auto", "keep", "adapters alone travel, through Ray's object store, in flight"),
    ("in_flight", "keep", "adapters alone travel, through Ray's object store, in flight"),
    ("group_border", "wait", "adapters alone travel, through Ray's object store, between two")])
def test_adapters_are_taken_up_when_the_run_wants_it(update_at, mode, words):
    config = load_config(small(train={"update_at": update_at}, train_model=LORA), AsyncConfig)
    assert config.weight_sync == "lora" and not config.shares_weights
    weights = factory.make_fleet_sync(config, nn.Linear(1, 1), Pool(), backend="vllm",
                                      device=torch.device("cpu"), host="127.0.0.1")
    assert isinstance(weights, FleetLoRA) and weights.pause_mode == mode
    places = SimpleNamespace(plan=SimpleNamespace(kind="cuda", engines=((1,), (2,))))
    assert build_async.describe(config, places, backend="vllm")["weights"].startswith(words)


@pytest.mark.parametrize(("update_at", "backend", "transfer", "waits"), [
    ("group_border", "vllm", None, True), ("group_border", "vllm", "gloo", True),
    ("auto", "transformers", None, True), ("auto", "vllm", None, False),
    ("in_flight", "vllm", "gloo", False)])
def test_an_update_at_a_groups_border_waits_for_groups_as_long_as_the_run_does(
        update_at, backend, transfer, waits, monkeypatch):
    monkeypatch.setattr(factory, "FleetTransfer",
                        lambda model, pool, **options: SimpleNamespace(**options))
    patience = {}
    for seconds in (50.0, 9000.0):
        config = load_config(small(train={"update_at": update_at, "rollout_timeout": seconds},
                                   train_model={} if transfer else LORA), AsyncConfig)
        weights = factory.make_fleet_sync(config, nn.Linear(1, 1), Pool(), backend=backend,
                                          device=torch.device("cpu"), host="127.0.0.1")
        patience[seconds] = weights.timeout
    assert patience[50.0] >= 300
    assert patience[9000.0] - patience[50.0] == (8950 if waits else 0)


def test_the_banner_of_transformers_workers_says_what_travels():
    places = SimpleNamespace(plan=SimpleNamespace(kind="cpu", engines=((1,),)))
    lines = [build_async.describe(load_config(small(train_model=model), AsyncConfig), places,
                                  backend="transformers")["weights"] for model in ({}, LORA)]
    assert lines[1] == f"adapters alone travel, {lines[0]}"
    assert lines[0].startswith("through Ray's object store, between two groups; a canary checks")


@pytest.mark.parametrize("key, value, read", [
    ("max_restarts", 7, lambda pool: pool.max_restarts),
    ("start_timeout", 8.0, lambda pool: pool.start_timeout)])
def test_keys_of_ray_are_read(key, value, read, monkeypatch):
    class Built(build_async.WorkerPool):
        def launch(self):
            assert read(self) == value
            raise Stop

    monkeypatch.setattr(build_async, "WorkerPool", Built)
    monkeypatch.setattr(build_async, "_make_worker", lambda *args: None)
    config = load_config(small(ray={key: value}), AsyncConfig)
    places = SimpleNamespace(plan=DevicePlan("cpu", (0,), (), ((1,),)))
    with pytest.raises(Stop), ExitStack() as at_end:
        build_async.build_actor(SimpleNamespace(config=config), None, places,
                                backend="transformers", at_end=at_end,
                                starting=Starting(print))


@pytest.mark.parametrize("train, reference, engine, alone", [
    (0, 1, 2, True), (0, 0, 1, True), (0, 1, 0, False), (0, 1, 1, False)])
def test_all_start_together_but_an_engine_that_shares_its_gpu_alone(
        train, reference, engine, alone, monkeypatch):
    """vLLM fails where a neighbour takes or gives back memory while it measures it."""
    seen = []

    class Seen(build_async.WorkerPool):
        def launch(self):
            seen.append(f"{self.kind} launched")

        def meet(self):
            if f"{self.kind} met" not in seen:
                seen.append(f"{self.kind} met")

    def stop(*args, **options):
        raise Stop

    monkeypatch.setattr(build_async, "WorkerPool", Seen)
    monkeypatch.setattr(build_async, "_make_worker", lambda *args: None)
    monkeypatch.setattr(build_async, "load_trained",
                        lambda *args: seen.append("model of the trainer"))
    for name in ("prepare_model", "build_loss", "build_learner"):
        monkeypatch.setattr(build_async, name, MagicMock())
    monkeypatch.setattr(build_async, "make_fleet_sync", stop)
    config = load_config(small(), AsyncConfig)
    places = SimpleNamespace(plan=DevicePlan("cuda", (train,), (reference,), ((engine,),)),
                             trainer=(train,))
    setup = SimpleNamespace(config=config, device=torch.device("cpu"), adapter=None,
                            tokenizer=None)
    with pytest.raises(Stop), ExitStack() as at_end:
        build_async.build_actor(setup, None, places, backend="transformers", at_end=at_end,
                                starting=Starting(print), reference=Seen(
                                    None, count=1, kind="reference worker"))
    rest = ["reference worker launched", "model of the trainer"]
    assert seen == ["rollout worker launched", *(
        [*rest, "rollout worker met"] if alone else ["rollout worker met", *rest])]


@pytest.mark.parametrize("ray, wanted", [({}, "local"), ({"address": "10.0.0.1:6379"},
                                                        "10.0.0.1:6379")])
def test_without_an_address_ray_is_the_runs_own(ray, wanted, monkeypatch):
    """Whatever cluster the environment names."""
    def init(**options):
        assert options["address"] == wanted
        raise Stop

    module = pytest.importorskip("ray")
    monkeypatch.setattr(module, "init", init)
    monkeypatch.setattr(module, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    with pytest.raises(Stop), ExitStack() as at_end:
        build_async.open_ray(load_config(small(device="cpu", ray=ray), AsyncConfig), at_end,
                             Starting(print))
    assert "RAY_AUTH_TOKEN" not in os.environ  # which is that of a Ray that runs


@pytest.mark.parametrize("model, sent", [("models/tiny", "{}/models/tiny"),
                                         ("Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-1.5B")])
def test_workers_get_whole_paths_because_they_run_in_another_folder(model, sent, tmp_path,
                                                                    monkeypatch):
    for folder in ("models/tiny", "data"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    expected = (f"{tmp_path}/data", sent.format(tmp_path))
    config = load_config(small(env={"data_path": "data", "dataset": "gsm8k", "task": {}}),
                         AsyncConfig)
    places = SimpleNamespace(plan=DevicePlan("cpu", (0,), (1,), ((2,),)),
                             reference=lambda number: {})
    setup = SimpleNamespace(config=config, path=model, engine_path=model, dtype=torch.float32,
                            max_model_len=9)
    worker = build_async.worker_setup(setup, SimpleNamespace(width=3), places, "transformers")
    assert (worker.config["env"]["data_path"], worker.path) == expected
    assert config.env.data_path == "data"  # as checkpoints have it
    monkeypatch.setattr(pytest.importorskip("ray"), "remote", remote := MagicMock())
    monkeypatch.setattr(build_async, "WorkerPool", lambda make, **options: make(0))
    build_async.build_reference_pool(config, places, model, torch.float32, ExitStack())
    build, path = remote.return_value.options.return_value.remote.call_args.args
    assert (build.args[0]["env"]["data_path"], build.args[1]) == expected == (expected[0], path)


def test_a_key_that_this_script_alone_has_is_answered_with_its_name():
    own = AsyncTrainConfig.model_fields.keys() - TrainConfig.model_fields.keys()
    assert own == set(ASYNC_KEYS)
    for path in [*(f"train.{key}" for key in sorted(own)), "ray.address"]:
        assert "start grpo-async.py" in key_error(path, 1, composed("grpo"), adds=False)
        assert key_error(path, 1, composed("grpo_async"), adds=False) is None
        section, key = path.split(".")
        with pytest.raises(ConfigError, match=f"{section}.*start grpo-async.py"):
            load_config({section: {key: 1}})
