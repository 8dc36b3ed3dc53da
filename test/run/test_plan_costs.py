"""The times of a plan: its constants are those of the results, and what it predicts for several
GPUs from one GPU's phases is what was measured."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

import pytest

from grpo.policies.model_shape import LoRA
from grpo.run.plan.costs import (
    H200,
    Layout,
    Training,
    decode_seconds,
    phases_of,
    publish_seconds,
    train_seconds,
)
from grpo.run.plan.simulate import Outcome

from ..support import BENCHMARKS, benchmark


def result(name: str) -> dict:
    return json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())


SCALING = benchmark("scaling")
SHAPE, WORK, EAGER = SCALING.shape(), SCALING.WORK, SCALING.EAGER
FAST = Training(compiled=True, packed=True, micro_batch=20_480)


def predicted(layout: Layout, training: Training, *, of_one_gpu: bool = True) -> Outcome:
    return SCALING.predicted(layout, training, SCALING.costs_of_one_gpu() if of_one_gpu else H200)


def close(seconds: float, measured: float, within: float) -> None:
    assert abs(seconds / measured - 1) < within, (seconds, measured)


class TestPrediction:
    """Within 20 %, from the phases of one GPU."""

    def test_one_gpu(self):
        close(predicted(Layout(train=1, engines=0), FAST, of_one_gpu=False).step,
              result("step_time_h200")["seconds"]["step"], 0.03)
        close(predicted(Layout(train=1, engines=0), EAGER).step,
              result("async_step_2h200")["sync"]["seconds"], 0.03)

    def test_one_trains_one_generates(self):
        measured = result("async_step_2h200")["async"]
        found = predicted(Layout(train=1, engines=1, staleness=1), EAGER)
        close(found.step, measured["seconds"], 0.2)
        idle = measured["medians"]["async/worker_0_idle"]
        assert found.engine_idle == pytest.approx(idle, abs=0.08) and found.wait < 0.01

    def test_two_train(self):
        """The seconds beside the bytes of a sharded layer are of this very run; generation, the
        update and the canary are not."""
        measured = result("step_time_2h200_ranks")["seconds"]
        layout = Layout(train=2, engines=0)
        close(predicted(layout, EAGER).step, measured["step"], 0.2)
        close(publish_seconds(H200, SHAPE, layout), measured["sync"], 0.2)

    def test_two_train_two_generate(self):
        """Iterations 2 to 4, before another run was on the same GPUs."""
        seconds = result("async_step_4h200")["async"]["seconds_per_iteration"][1:4]
        layout = Layout(train=2, engines=2, staleness=1)
        close(predicted(layout, EAGER).step, statistics.fmean(seconds), 0.2)

    def test_two_train_one_generates_one_scores(self):
        """Another run was on the same GPUs from the beginning, so only a phase is compared that the
        hosts' cores have little part in; a run that is alone takes less than that."""
        measured = result("async_step_4h200_reference")["async"]
        layout = Layout(train=2, engines=1, reference=1, staleness=1)
        training = replace(EAGER, scores=True)
        found = predicted(layout, training)
        close(found.train, measured["medians"]["time/train"], 0.2)
        assert found.step < measured["seconds"]


class TestTable:
    """Each constant is what the result that it names says."""

    def test_of_one_gpu(self):
        seconds = result("step_time_h200")["seconds"]
        layout = Layout(train=1, engines=0)
        phases = phases_of(H200, SHAPE, WORK, layout, FAST)
        close(256 * phases.decode(256) + 32 * phases.prefill, seconds["generate"], 0.01)
        close(phases.train(65_536), seconds["train"] + seconds["optimizer"], 0.01)
        close(phases.publish, seconds["sync"] + seconds["canary"], 0.01)
        eager = result("async_step_2h200")["sync"]["medians"]
        close(train_seconds(H200, SHAPE, WORK, layout, EAGER, 65_536),
              eager["time/train"] + eager["time/optimizer"], 0.01)

    def test_of_the_trainers_process(self):
        for name, found in (("sync", H200.driver_row), ("async", H200.driver_row_apart)):
            seconds = result("async_step_2h200")[name]["medians"]
            phases = [key for key in seconds
                      if key.startswith("time/") and key not in ("time/step", "time/wait")]
            close(256 * found, seconds["time/step"] - sum(seconds[key] for key in phases), 0.03)

    def test_of_the_ways_between_devices(self):
        update = result("weight_update_2h200")["sizes"]["1.5B"]
        close(H200.link_rate, update["nccl_alone"]["one_by_one"]["gigabytes_per_second"] * 1e9, .01)
        close(H200.transfer_rate,
              update["direct_256_mib_small_16"]["gigabytes_per_second"] * 1e9, 0.01)
        close(H200.transfer_floor, result("sharded_update_tiny_2h200")["seconds"], 0.01)
        layout = Layout(train=2, engines=0)
        close(train_seconds(replace(H200, optimizer=0.0), SHAPE, WORK, layout, EAGER, 65_536),
              result("step_time_2h200_ranks")["seconds"]["train"], 0.02)

    def test_of_references_and_adapters(self):
        scored = result("async_step_4h200_reference")["async"]["medians"]
        busy = (1 - scored["async/reference_idle"]) * scored["time/step"]
        full = result("async_step_2h200")
        close(H200.score_share, busy / full["sync"]["medians"]["time/train"], 0.01)
        lora = result("async_lora_2h200")["async"]["medians"]["time/train"]
        close(H200.lora_train, lora / full["async"]["medians"]["time/train"], 0.01)
        bare, adapter = (result(name)["arrangements"][key]["tokens_per_second"]
                         for name, key in (("arrangements_h200", "single_copy"),
                                           ("arrangements_lora_h200", "lora_views")))
        close(H200.lora_decode, bare / adapter, 0.01)

    def test_few_rows_take_an_engine_as_long_as_many(self):
        """64 rows on an H100, whose process is as busy: above what the GPU would need."""
        found = result("server_overhead_h100")
        step = found["requests"] / found["tokens"]["bare_tokens_per_second"]
        alone = decode_seconds(replace(H200, decode_floor=0.0), SHAPE, WORK,
                               Layout(train=1, engines=0), 64)
        assert step > H200.decode_floor > 2 * alone


def test_what_more_devices_change():
    one = Layout(train=1, engines=1)
    big = replace(SHAPE, parameters=70 * 10**9)
    tp = replace(one, tensor_parallel=4)
    assert decode_seconds(H200, big, WORK, tp, 64) == pytest.approx(
        decode_seconds(H200, big, WORK, one, 64) / 4 + 2 * 28 * 20e-6)
    assert decode_seconds(H200, SHAPE, WORK, tp, 8) == H200.decode_floor
    four, eight = (train_seconds(H200, SHAPE, WORK, Layout(train=n, engines=1), EAGER, 65_536)
                   for n in (4, 8))
    assert four / 2 < eight < four
    near, far = (publish_seconds(H200, SHAPE, one, hosts=hosts) for hosts in (1, 2))
    assert far == pytest.approx(SHAPE.parameters * 2 / 50e9) and near < far
    adapters = replace(one, lora=LoRA(rank=16))
    assert publish_seconds(H200, SHAPE, adapters) < 0.02 * near
    assert publish_seconds(H200, SHAPE, Layout(train=1, engines=0)) == 0.001


def test_what_the_trainer_computes_is_counted():
    layout = Layout(train=1, engines=1)

    def seconds(training: Training) -> float:
        return train_seconds(replace(H200, optimizer=0.0), SHAPE, WORK, layout, training, 65_536)

    assert seconds(replace(EAGER, epochs=2)) == pytest.approx(2 * seconds(EAGER))
    assert seconds(replace(EAGER, scores=True)) == pytest.approx(
        (1 + H200.score_share) * seconds(EAGER))
    one_device = seconds(EAGER)
    # A batch is scored once, however often it is trained on.
    assert seconds(replace(EAGER, epochs=4, scores=True, own_scores=1)) == pytest.approx(
        (4 + 2 * H200.score_share) * seconds(EAGER))
    assert seconds(replace(EAGER, checkpointing=True)) == pytest.approx(
        (1 + H200.score_share) * seconds(EAGER))
    layout, pieces = Layout(train=2, engines=1), 81_920 // (2 * 8192)
    gathers = pieces * (28 * H200.gather + SHAPE.parameters / H200.link_rate)
    assert seconds(replace(EAGER, epochs=4, scores=True)) - seconds(replace(EAGER, epochs=4)) == (
        pytest.approx(H200.score_share * one_device / 2 + gathers))
    layout = Layout(train=1, engines=1)
    packed = seconds(replace(EAGER, packed=True))
    assert packed / seconds(EAGER) == pytest.approx((65_536 + 2048) / 81_920)
    assert train_seconds(H200, SHAPE, WORK, layout, EAGER, 65_536) - seconds(EAGER) == \
        pytest.approx(0.0234, abs=1e-4)
