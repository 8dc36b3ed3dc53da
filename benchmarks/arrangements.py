"""Every arrangement of trainer and engine beside bare vLLM: generation, update and canary.

    python benchmarks/arrangements.py --shape 1.5b --out benchmarks/results/arrangements_h200.json

Each arrangement has a process of its own, one after another on the same device: ``bare`` is vLLM as
it comes, with the same engine settings and sampling parameters and nothing of ours; the others
generate through :class:`~grpo.policies.vllm.VLLMPolicy`, batch and log-prob tensors included, while
the trainer's model shares or sends its weights. Before each timed rollout the weights are moved and
published, and afterwards the canary must agree. ``ratio_to_bare`` compares the best rollouts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import Recording
from step_time import SHAPES, make_model

ARRANGEMENTS = ("bare", "single_copy", "shared_copy", "lora_views", "lora_write")
BACKEND_NOTE = {
    "bare": "vLLM alone",
    "single_copy": "one process, one copy of the weights",
    "shared_copy": "two processes, one copy (CUDA IPC; shared memory on a CPU)",
    "lora_views": "adapters that are views of the engine's stacked buffers",
    "lora_write": "adapters written into the engine's stacked buffers",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--arrangements", nargs="+", choices=ARRANGEMENTS,
                        default=list(ARRANGEMENTS))
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--response-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds an arrangement")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs=3, metavar=("ARRANGEMENT", "MODEL", "FILE"),
                        help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        name, model, file = args.only
        Path(file).write_text(json.dumps(measure(name, model, args)))
        return
    recording = Recording(
        "arrangements", args.out,
        work=f"{args.rows} rows x ({args.prompt_tokens} + {args.response_tokens}) tokens")
    recording.describe_machine(also=("vllm", "peft"))
    measured: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        recording.add(parameters=make_model(args.shape, Path(folder) / "model"))
        for name in args.arrangements:
            file = Path(folder) / f"{name}.json"
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--only", name,
                            str(Path(folder) / "model"), str(file)], check=True,
                           timeout=args.timeout)
            measured[name] = {"what": BACKEND_NOTE[name], **json.loads(file.read_text())}
            add_ratios(measured)
            recording.add(arrangements=measured)
    recording.finish()


def add_ratios(measured: dict[str, dict]) -> None:
    if "bare" in measured:
        for values in measured.values():
            values["ratio_to_bare"] = (values["tokens_per_second"]
                                       / measured["bare"]["tokens_per_second"])


def measure(name: str, path: str, args: argparse.Namespace) -> dict:
    """Times of one arrangement, in this process."""
    import torch

    from grpo.policies.inprocess import start_engine

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    # More than one prompt length, as in training; none of them shares a prefix.
    prompts = [[3 + (7 * row + i * i) % 250 for i in range(args.prompt_tokens - row % 4)]
               for row in range(args.rows)]
    engine = start_engine(
        path, device=device, dtype=torch.bfloat16 if cuda else torch.float32,
        max_model_len=args.prompt_tokens + args.response_tokens, max_num_seqs=args.rows,
        separate_process=name == "shared_copy",
        max_lora_rank=16 if name.startswith("lora") else None)
    if name == "bare":
        return time_bare(engine, prompts, args)
    return time_ours(name, engine, path, prompts, device, args)


def time_bare(engine, prompts: list[list[int]], args: argparse.Namespace) -> dict:
    from vllm import SamplingParams

    params = SamplingParams(temperature=1.0, max_tokens=args.response_tokens, ignore_eos=True,
                            logprobs=0, flat_logprobs=True, detokenize=False)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    seconds = []
    for _ in range(2 + args.repeats):
        engine.reset_prefix_cache()
        started = time.perf_counter()
        engine.generate(requests, params, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
    return rates(seconds[2:], args)


def time_ours(name: str, engine, path: str, prompts: list[list[int]], device,
              args: argparse.Namespace) -> dict:
    import torch

    from grpo.objectives import TokenScorer
    from grpo.policies.base import Sampling
    from grpo.policies.vllm import VLLMPolicy
    from grpo.weights.canary import Canary

    model = load(path, device)
    weights, model = connect(name, engine, model)
    policy = VLLMPolicy(engine, Sampling(max_tokens=args.response_tokens), pad_token_id=0,
                        eos_token_ids=(1,), version=lambda: weights.version, ignore_eos=True,
                        lora_request=getattr(weights, "lora_request", None))
    canary = Canary(policy, TokenScorer(model), weights, prompts=prompts[:4])
    batch = policy.pad_prompts(prompts)
    seconds: dict[str, list[float]] = {"generate": [], "publish": [], "canary": []}
    for number in range(2 + args.repeats):
        move(model, number)
        if device.type == "cuda":
            torch.cuda.synchronize()
        for phase, action in (("publish", weights.publish), ("canary", canary.check),
                              ("generate", lambda: policy(batch.clone()))):
            started = time.perf_counter()
            action()
            seconds[phase].append(time.perf_counter() - started)
    return {**rates(seconds["generate"][2:], args),
            "publish_seconds": statistics.median(seconds["publish"][2:]),
            "canary_seconds": statistics.median(seconds["canary"][2:]),
            "differing_afterwards": weights.differing()}


def connect(name: str, engine, model):
    """The weight sync of an arrangement, and the model it trains."""
    from grpo.policies.handle import InProcessEngine
    from grpo.weights.adapters import make_lora
    from grpo.weights.lora import LoRASync
    from grpo.weights.shared import SharedCopy, SingleCopy

    if name == "single_copy":
        return SingleCopy(model, engine), model
    if name == "shared_copy":
        return SharedCopy(model, InProcessEngine(engine)), model
    model = make_lora(model, r=16, alpha=16)
    return LoRASync(model, InProcessEngine(engine), how=name.removeprefix("lora_")), model


def load(path: str, device):
    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)


def move(model, number: int) -> None:
    """A small step of what is trained, as an optimizer would make in place."""
    import torch

    torch.manual_seed(number)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(1e-3 * torch.randn_like(param))


def rates(seconds: list[float], args: argparse.Namespace) -> dict:
    return {"tokens_per_second": args.rows * args.response_tokens / min(seconds),
            "seconds": min(seconds), "seconds_median": statistics.median(seconds)}


if __name__ == "__main__":
    main()
