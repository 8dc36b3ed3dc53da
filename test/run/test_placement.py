"""Who gets which device; every conflict is an error that says what was asked for."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import ExitStack

import pytest

from grpo.config.asynchronous import AsyncConfig
from grpo.config.schema import Config, ConfigError, load_config
from grpo.report.starting import Starting
from grpo.run.placement import Places, plan_devices, positions, unused_reference, visible

from ..support import wait_until, with_variable

KL = {"train": {"kl_to_ref_coeff": 0.1}}


def plan(available: int | None = 4, kind: str = "cuda", **sections):
    return plan_devices(load_config(sections, AsyncConfig), kind=kind, available=available)


@pytest.mark.parametrize("sections, train, reference, engines", [
    ({}, (0,), (), ((1,),)),
    ({"train_model": {"num_devices": 2}, "inference_model": {"num_devices": 2}},
     (0, 1), (), ((2,), (3,))),
    ({"train_model": {"num_devices": 2}, "ref_model": {"num_devices": 1}, **KL},
     (0, 1), (2,), ((3,),)),
    ({"ref_model": {"num_devices": 2}, **KL}, (0,), (1, 2), ((3,),)),
    ({"ref_model": {"devices": [2, 3]}, **KL}, (0,), (2, 3), ((1,),)),
    ({"ref_model": {"num_devices": 9}}, (0,), (), ((1,),)),
    ({"ref_model": {"devices": [1]}}, (0,), (), ((1,),)),
    ({"inference_model": {"tensor_parallel_size": 2}}, (0,), (), ((1, 2),)),
    ({"inference_model": {"devices": [0, 1]}, "train_model": {"num_devices": 2}},
     (2, 3), (), ((0,), (1,))),
    ({"train_model": {"devices": [3]}, "inference_model": {"devices": [1, 2],
                                                           "tensor_parallel_size": 2}},
     (3,), (), ((1, 2),)),
])
def test_each_role_gets_devices_of_its_own(sections, train, reference, engines):
    made = plan(**sections)
    assert (made.train, made.reference, made.engines) == (train, reference, engines)
    used = [*train, *reference, *(device for engine in engines for device in engine)]
    assert len(set(used)) == len(used)


@pytest.mark.parametrize("sections, message", [
    ({"inference_model": {"num_devices": 4}},
     "train_model wants 1 GPU; inference_model wants 4 GPUs: 5 GPUs in all, but there are 4"),
    ({"inference_model": {"devices": [4]}}, "there is no GPU 4, the 4 of this machine are 0 to 3"),
    ({"inference_model": {"devices": [1, 2], "num_devices": 1}}, "contradict each other"),
    ({"inference_model": {"num_devices": 3, "tensor_parallel_size": 2}},
     "3 devices, which cannot be divided into engines of .*tensor_parallel_size=2"),
    ({"train_model": {"devices": [1, 1]}}, r"train_model.devices=\[1, 1\] names a GPU twice"),
    ({"ray": {"address": "auto"}, "train_model": {"devices": [0]}},
     "ray.address=auto is a cluster"),
    ({"ref_model": {"devices": [1, 2], "num_devices": 1}, **KL}, "contradict each other"),
    ({"ref_model": {"num_devices": 3}, **KL}, "ref_model wants 3 GPUs; .*: 5 GPUs in all"),
    ({"inference_model": {"engine": "server"}}, "inference_model.engine=server is not read"),
    ({"train_model": {"lora": {"enabled": True}}, "ref_model": {
        "num_devices": 2, "sharded": True}, **KL},
     "ref_model.sharded=true is not read because with train_model.lora.enabled=true the reference "
     "is the trainer's own"),
])
def test_what_cannot_be_is_an_error_with_the_request(sections, message):
    with pytest.raises(ConfigError, match=message):
        plan(**sections)


@pytest.mark.parametrize(("sections", "roles"), [
    ({"train_model": {"devices": [0]}, "inference_model": {"devices": [0]},
      "ref_model": {"devices": [0]}, **KL}, {0: ("train", "engine", "reference")}),
    ({"train_model": {"devices": [0, 1]}, "inference_model": {"devices": [1, 2]}},
     {0: ("train",), 1: ("train", "engine"), 2: ("engine",)}),
    ({"train_model": {"devices": [3]}, "ref_model": {"devices": [3]}, **KL},
     {0: ("engine",), 3: ("train", "reference")}),
    ({"inference_model": {"devices": [0, 1]}, "ref_model": {"devices": [1]}, **KL},
     {0: ("engine",), 1: ("engine", "reference"), 2: ("train",)})])
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_roles_share_the_devices_that_they_both_name(sections, roles, kind):
    made = plan(available=4 if kind == "cuda" else None, kind=kind, **sections)
    assert made.roles() == roles
    together = {frozenset(there) for there in roles.values()}
    assert made.shared("train", "engine") == any({"train", "engine"} <= t for t in together)
    assert made.shared("engine") == any("engine" in t and len(t) > 1 for t in together)


def test_what_several_name_is_counted_once():
    shared = {"train_model": {"devices": [0, 1]}, "inference_model": {"devices": [0, 1]}}
    assert plan(available=3, **shared, ref_model={"num_devices": 1}, **KL).reference == (2,)
    with pytest.raises(ConfigError, match="3 GPUs in all, but there are 2"):
        plan(available=2, **shared, ref_model={"num_devices": 1}, **KL)


def test_roles_that_share_cores_on_a_cpu_have_as_many_each(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    for devices, threads in (([0], "8"), ([0, 1], "4")):
        made = plan(available=None, kind="cpu", train_model={"devices": [0]},
                    inference_model={"devices": devices})
        options = Places(made, cluster=False).engine(0)
        assert options["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == threads


def test_the_reference_of_adapters_has_a_device_only_if_it_is_another_model():
    sections = {"train_model": {"lora": {"enabled": True}}, **KL}
    assert plan(**sections).reference == ()
    assert plan(**sections, ref_model={"num_devices": 2}).reference == ()
    assert plan(**sections, ref_model={"name": "other", "num_devices": 1}).reference == (1,)


@pytest.mark.parametrize("sections, said", [
    ({"ref_model": {"num_devices": 2}}, "ref_model.num_devices=2 stays idle and reserves nothing"),
    ({"ref_model": {"devices": [3]}}, "ref_model.devices=[3] stays idle and reserves nothing")])
@pytest.mark.parametrize("schema", [Config, AsyncConfig])
def test_devices_for_no_reference_are_said_to_be_idle(sections, said, schema):
    [line] = unused_reference(load_config(sections, schema))
    assert line.startswith(said) and "set train.kl_to_ref_coeff=" in line
    # What is trained changes nothing about it, only what would make use of them.
    lora = {"train_model": {"lora": {"enabled": True}}}
    [line] = unused_reference(load_config({**sections, **lora}, schema))
    assert line.startswith(said) and line.endswith("remove it")
    assert unused_reference(load_config({**sections, **KL}, AsyncConfig)) == []
    assert unused_reference(AsyncConfig()) == []


@pytest.mark.parametrize("schema", [Config, AsyncConfig])
def test_devices_for_the_reference_of_adapters_are_said_to_be_idle(schema):
    sections = {"train_model": {"num_devices": 2, "lora": {"enabled": True}}, **KL,
                "inference_model": {"num_devices": 2}}
    [line] = unused_reference(load_config({**sections, "ref_model": {"num_devices": 2}}, schema))
    assert line == ("ref_model.num_devices=2 stays idle and reserves nothing: with "
                    "train_model.lora.enabled=true the reference is the trainer's own model "
                    "without its adapters; name another model as ref_model.name to use it")
    other = {**sections, "ref_model": {"num_devices": 2, "name": "other"}}
    assert unused_reference(load_config(other, schema)) == []


def test_the_reference_of_adapters_may_be_told_to_be_where_it_is_anyway():
    sections = {"train_model": {"devices": [0, 1], "lora": {"enabled": True}}, **KL}
    there = load_config({**sections, "ref_model": {"devices": [1, 0]}}, Config)
    assert not there.has_workers and unused_reference(there) == []
    elsewhere = load_config({**sections, "ref_model": {"devices": [2]}}, Config)
    assert not elsewhere.has_workers  # for it starts nothing
    [line] = unused_reference(elsewhere)
    assert line.startswith("ref_model.devices=[2] stays idle and reserves nothing: with train_mod")


def test_the_table_has_a_line_for_each_copy_of_the_reference():
    assert plan(available=5, ref_model={"num_devices": 2}, **KL).table() == [
        "train       GPU 0", "reference 0 GPU 1", "reference 1 GPU 2", "engine 0    GPU 3",
        "free        GPU 4"]


def test_on_a_cpu_devices_are_processes():
    made = plan(available=None, kind="cpu", inference_model={"num_devices": 3})
    assert len(made.engines) == 3
    assert made.table()[0] == "train       process 0"


@pytest.mark.parametrize("sections, message", [
    ({"inference_model": {"devices": [1]}}, "numbers GPUs, but this run is on a CPU"),
    ({"inference_model": {"tensor_parallel_size": 2}}, "tensor_parallel_size=2 needs GPUs")])
def test_a_cpu_has_no_numbers_and_no_parallel_engines(sections, message):
    with pytest.raises(ConfigError, match=message):
        plan(available=None, kind="cpu", **sections)


def test_visible_devices_are_those_that_this_process_sees(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert visible((0, 2)) == "4,7"


@pytest.mark.parametrize("given, cores, threads", [(None, 16, "4"), (None, 2, "1"), ("7", 16, "7")])
def test_processes_on_a_cpu_share_its_cores(monkeypatch, given, cores, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    places = Places(plan(available=None, kind="cpu", inference_model={"num_devices": 2},
                         ref_model={"num_devices": 1}, **KL), cluster=False)
    for options in (places.engine(1), places.reference(0)):
        # Records of their calls would grow in Ray's head process for as long as the run goes on.
        assert options == {"num_cpus": 1, "enable_task_events": False,
                           "runtime_env": {"env_vars": {"OMP_NUM_THREADS": threads}}}


@pytest.fixture
def ours(request, monkeypatch):
    """``CUDA_VISIBLE_DEVICES`` of this process."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if request.param is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", request.param)


@pytest.mark.parametrize("ours, ids, expected", [
    (None, ["3", "1"], (1, 3)), ("", ["0"], (0,)), ("4,6,7", ["7", "4"], (0, 2)),
    ("GPU-a, GPU-b", ["GPU-b"], (1,)), ("4,6", [], ())], indirect=["ours"])
def test_gpus_that_ray_names_are_numbered_as_this_process_does(ours, ids, expected):
    assert positions(ids) == expected


@pytest.mark.parametrize("ours, ids, message", [
    ("0,1", ["1", "4"], "the GPUs 1,4, .*CUDA_VISIBLE_DEVICES=0,1; start"),
    (None, ["GPU-a"], r"the GPUs GPU-a, .*CUDA_VISIBLE_DEVICES=\(not set\); start")],
    indirect=["ours"])
def test_gpus_that_this_process_does_not_see_are_an_error(ours, ids, message):
    with pytest.raises(ConfigError, match=message):
        positions(ids)


@pytest.mark.slow
@pytest.mark.parametrize("numbers", ["0,1,2,3", "4,5,6,7"])
def test_ray_puts_actors_where_the_plan_says_and_a_cluster_reserves_them(
        numbers, monkeypatch):
    """Ray counts GPUs that it is told of, so no real one is needed."""
    ray = pytest.importorskip("ray")
    from grpo.run.placement import DevicePlan

    class Seeing:
        def devices(self):
            return os.environ["CUDA_VISIBLE_DEVICES"]

    def seen(options: dict) -> str:
        actor = ray.remote(Seeing).options(**options).remote()
        try:
            return ray.get(actor.devices.remote(), timeout=60)
        finally:
            ray.kill(actor)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", numbers)
    names = numbers.split(",")
    ray.init("local", num_cpus=8, num_gpus=4, include_dashboard=False, log_to_driver=False,
             logging_level="ERROR")
    try:
        made = DevicePlan("cuda", (0,), (1, 2), ((3,),), 4)
        here = Places(made, cluster=False)
        assert [seen(here.engine(0)), *(seen(here.reference(number)) for number in range(2))] == [
            names[3], names[1], names[2]]
        cluster = Places(made, cluster=True, timeout=60)
        places = [seen(cluster.engine(0)), *(seen(cluster.reference(i)) for i in range(2)),
                  *(names[device] for device in cluster.trainer)]
        assert sorted(places) == names
        cluster.release()
        too_much = DevicePlan("cuda", (0, 1), (), ((2,), (3,), (4,)), 4)
        with pytest.raises(ConfigError, match="could not reserve(.|\n)*engine 2    GPU 4"):
            Places(too_much, cluster=True, timeout=1)
    finally:
        ray.shutdown()


@pytest.mark.parametrize(("address", "message"), [
    ("local", "Ray could not be started: The current node timed out; .*ray.address=auto"),
    ("host:1", "ray.address=host:1: The current node timed out; check the address")])
def test_a_ray_that_does_not_start_is_an_error_of_one_paragraph(monkeypatch, address, message):
    ray = pytest.importorskip("ray")
    from grpo.run.local_ray import start_ray

    def init(**options):
        raise Exception("The current node\n timed out")  # as Ray itself does

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConfigError, match=message):
        start_ray(address=address)


def test_the_ray_of_a_run_keeps_no_record_of_calls():
    ray = pytest.importorskip("ray")
    from grpo.run.build_async import open_ray

    config = load_config({"device": "cpu"}, AsyncConfig)
    with ExitStack() as at_end:
        places = open_ray(config, at_end, Starting(print))

        class Answering:
            def number(self) -> int:
                return 1

        actor = ray.remote(Answering).options(**places.engine(0)).remote()
        assert ray.get([actor.number.remote() for _ in range(5)], timeout=60) == [1] * 5
        ray.kill(actor)
        time.sleep(2)  # they would be sent each second
        assert ray.timeline() == []


def test_nothing_of_the_ray_of_a_run_is_there_once_it_has_ended(tmp_path, monkeypatch):
    """On a busy machine workers go some time after Ray's ``shutdown``, and hold a GPU's memory
    until then. Here two stand-ins for it start one and leave it."""
    ray = pytest.importorskip("ray")
    from grpo.run.local_ray import start_ray

    variables = os.environ | {"GRPO_TEST_RAY": str(tmp_path)}
    before = subprocess.Popen(["sleep", "300"])
    started = []
    monkeypatch.setattr(ray, "init", lambda **options: started.append(
        subprocess.Popen(["sh", "-c", "sleep 2; exit 0"], env=variables)))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    end = start_ray(address="local")
    wait_until(lambda: len(with_variable("GRPO_TEST_RAY", tmp_path)) == 2)
    end()
    assert with_variable("GRPO_TEST_RAY", tmp_path) == []
    assert started[0].wait() == 0 and before.poll() is None  # it had the time it took
    before.kill()
    before.wait()
