"""Seconds a step by number of GPUs, as a table, from the results that are there.

    python benchmarks/scaling.py            # prints what stands in benchmarks/README.md

Reads the results of ``async_step.py`` and, for ``grpo.py`` on several GPUs, of ``step_time.py``.
Times of different runs are of different machines of a kind and times of day: only the ratio to
``grpo.py`` on one GPU within a run compares. ``predicted`` is what ``python -m grpo.run.plan``
simulates (``docs/scale.md``) from the phases of that run on one GPU, for GPUs of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from grpo.policies.model_shape import ModelShape  # noqa: E402
from grpo.run.plan.costs import (  # noqa: E402
    H200,
    Costs,
    Layout,
    Training,
    phases_of,
    train_seconds,
)
from grpo.run.plan.simulate import Outcome, Simulation, Work  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results"
HEADER = ("run", "GPUs", "s a step", "predicted", "tokens/s", "grpo.py on one GPU, same run",
          "times as fast", "of ideal")
#: "32 prompts x 8 completions x (64 + 256) tokens", and what these runs chose for training.
WORK = Work(groups=32, rows=8, prompt_tokens=64, max_tokens=256, mean_tokens=256, sigma=0.0)
EAGER = Training(compiled=False, packed=False, micro_batch=8192)


def shape() -> ModelShape:
    """Of the model of these runs."""
    from step_time import SHAPES
    from transformers import Qwen2Config

    return ModelShape.of(Qwen2Config(tie_word_embeddings=True, **SHAPES["1.5b"]))


def costs_of_one_gpu(results: Path = RESULTS) -> Costs:
    """Of the host of these runs, by its run on one GPU alone. What travels between GPUs is as in
    the plan's table."""
    seconds = json.loads((results / "async_step_2h200.json").read_text())["sync"]["medians"]
    rest = seconds["time/step"] - sum(seconds[f"time/{phase}"] for phase in (
        "advantage", "canary", "generate", "optimizer", "reward", "sync", "train"))
    one, sizes, rows = Layout(train=1, engines=0), shape(), WORK.groups * WORK.rows
    prefill = phases_of(H200, sizes, WORK, one, EAGER).prefill * WORK.groups
    train = train_seconds(replace(H200, optimizer=0.0), sizes, WORK, one, EAGER,
                          rows * WORK.max_tokens)
    return replace(
        H200, decode_floor=(seconds["time/generate"] - prefill) / WORK.max_tokens,
        canary=seconds["time/canary"], eager_rate=H200.eager_rate * train / seconds["time/train"],
        optimizer=seconds["time/optimizer"] / sizes.parameters,
        driver_row=rest / rows, driver_row_apart=rest / rows)


def predicted(layout: Layout, training: Training, costs: Costs) -> Outcome:
    """A simulated run."""
    return Simulation(WORK, phases_of(costs, shape(), WORK, layout, training),
                      engines=max(1, layout.engines), staleness=layout.staleness,
                      references=layout.reference).go()


def rows(results: Path) -> Iterator[tuple[str, ...]]:
    """One line a measured arrangement."""
    costs = costs_of_one_gpu(results)
    for path in sorted(results.glob("step_time_*_ranks.json")):
        result = json.loads(path.read_text())
        gpus = int(next(option for option in result["run"]
                        if option.startswith("train_model.num_devices=")).split("=")[1])
        seconds = result["seconds"]["step"]
        found = predicted(Layout(train=gpus, engines=0), EAGER, costs)
        yield (f"`grpo.py`, {gpus} to train", str(gpus), f"{seconds:.2f}", f"{found.step:.2f}",
               _rate(result, seconds),
               "", "", "")
    found = [json.loads(path.read_text()) for path in results.glob("async_step_*.json")]
    for result in sorted(found, key=lambda result: (_gpus(result), result["layout"])):
        seconds, ratio = result["async"]["seconds"], result.get("ratio")
        compared = ("", "", "") if ratio is None else (
            f"{result['sync']['seconds']:.2f} s", f"{1 / ratio:.2f}",
            f"{1 / ratio / _gpus(result):.0%}")
        train, engines, *reference = map(int, result["layout"].split("+"))
        layout = Layout(train=train, engines=engines, staleness=result["staleness"],
                        reference=sum(reference))
        found = predicted(layout, replace(EAGER, scores=bool(reference)), costs)
        # Another run computed on the same GPUs meanwhile, so alone it is faster.
        shared = " (GPUs shared with another run)" if "disturbed_by" in result else ""
        yield (f"`grpo-async.py`, {_words(result['layout'])}, staleness {result['staleness']}"
               f"{shared}", str(_gpus(result)), f"{seconds:.2f}", f"{found.step:.2f}",
               _rate(result, seconds), *compared)


def _gpus(result: dict) -> int:
    return sum(map(int, result["layout"].split("+")))


def _words(layout: str) -> str:
    roles = ("to train", "to generate", "to score")
    return ", ".join(f"{count} {role}" for count, role in zip(layout.split("+"), roles,
                                                              strict=False))


def _rate(result: dict, seconds: float) -> str:
    prompts, group, prompt, response = (int(word.strip("(),")) for word in result["work"].split()
                                        if word.strip("(),").isdigit())
    return f"{prompts * group * (prompt + response) / seconds:,.0f}"


def table(results: Path = RESULTS) -> str:
    """Markdown."""
    lines = [HEADER, ("---",) * len(HEADER), *rows(results)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    argparse.ArgumentParser(description=__doc__,
                            formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(table())


if __name__ == "__main__":
    main()
