"""Seconds a step by number of GPUs, as a table, from the results that are there.

    python benchmarks/scaling.py            # prints what stands in benchmarks/README.md

Reads the results of ``async_step.py`` and, for ``grpo.py`` on several GPUs, of ``step_time.py``.
Times of different runs are of different machines of a kind and times of day: only the ratio to
``grpo.py`` on one GPU within a run compares.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
HEADER = ("run", "GPUs", "s a step", "tokens/s", "grpo.py on one GPU, same run", "times as fast",
          "of ideal")


def rows(results: Path) -> Iterator[tuple[str, ...]]:
    """One line a measured arrangement."""
    for path in sorted(results.glob("step_time_*_ranks.json")):
        result = json.loads(path.read_text())
        gpus = int(next(option for option in result["run"]
                        if option.startswith("train_model.num_devices=")).split("=")[1])
        seconds = result["seconds"]["step"]
        yield (f"`grpo.py`, {gpus} to train", str(gpus), f"{seconds:.2f}", _rate(result, seconds),
               "", "", "")
    found = [json.loads(path.read_text()) for path in results.glob("async_step_*.json")]
    for result in sorted(found, key=lambda result: (_gpus(result), result["layout"])):
        seconds, ratio = result["async"]["seconds"], result.get("ratio")
        compared = ("", "", "") if ratio is None else (
            f"{result['sync']['seconds']:.2f} s", f"{1 / ratio:.2f}",
            f"{1 / ratio / _gpus(result):.0%}")
        # Another run computed on the same GPUs meanwhile, so alone it is faster.
        shared = " (GPUs shared with another run)" if "disturbed_by" in result else ""
        yield (f"`grpo-async.py`, {_words(result['layout'])}, staleness {result['staleness']}"
               f"{shared}", str(_gpus(result)), f"{seconds:.2f}", _rate(result, seconds), *compared)


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
