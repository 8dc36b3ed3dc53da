"""Time of one GRPO step by phase, through ``grpo.py`` itself.

    python benchmarks/step_time.py --shape 1.5b --out benchmarks/results/step_time_h200.json

Makes a Qwen2-shaped model with random weights and a byte tokenizer, and prompts of an exact
length, runs ``sota-implementations/grpo/grpo.py`` on them with ``ignore_eos=true`` (so that every
completion has the full length), and writes the median of the steady iterations with machine,
versions, command and commit. The run is planned as long as its configuration says and ended after
``--iterations``. The numbers a random model produces mean nothing; its times do.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path

from machine import Recording
from runs import WatchedRun

SHAPES = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 258},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151_936},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
             "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151_936},
}
SKIPPED = 3  # iterations that still compile and capture


def make_model(shape: str, folder: Path) -> int:
    """Save a model with random weights; returns its number of parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from grpo.envs.embedded import byte_tokenizer

    cuda = torch.cuda.is_available()
    torch.manual_seed(0)
    with torch.device("cuda" if cuda else "cpu"):
        model = Qwen2ForCausalLM(Qwen2Config(
            max_position_embeddings=4096, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1,
            bos_token_id=None, **SHAPES[shape]))
    model.to(torch.bfloat16 if cuda else torch.float32).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    parameters = sum(param.numel() for param in model.parameters())
    del model
    torch.cuda.empty_cache()  # what is measured next wants the memory
    return parameters


def count_parameters(folder: Path) -> int:
    """Of a saved model; tied weights are saved, and counted, once."""
    from safetensors import safe_open

    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="np") as tensors:
            total += sum(math.prod(tensors.get_slice(name).get_shape())
                         for name in tensors.keys())
    return total


def make_problems(folder: Path, *, count: int, prompt_tokens: int) -> None:
    """GSM8K-format rows whose rendered prompts have ``prompt_tokens`` bytes, one token each."""
    template = len("system: S\nuser: \nassistant: ")
    folder.mkdir()
    for split in ("train", "test"):
        rows = [{"question": f"{split}{i:06d}".ljust(prompt_tokens - template, "?"),
                 "answer": "#### 0"} for i in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def overrides(args: argparse.Namespace, model: Path, problems: Path) -> list[str]:
    """The command line of the run."""
    chosen = [
        "--config-name", "grpo_gsm8k", f"model.name={model}",
        f"env.data_path={problems}", "+env.task.system_prompt=S", "env.task.num_test=8",
        "env.reward=negative_length", f"env.num_envs={args.prompts}",
        f"env.repeats={args.group}", f"inference_model.max_tokens={args.response_tokens}",
        "inference_model.ignore_eos=true", "train.eval_frequency=0",
        "train.checkpoint_frequency=0", "optimizer.lr=1e-6",
    ]
    return chosen + args.overrides


def prepare(args: argparse.Namespace, work: Path) -> tuple[Path, Path, int]:
    """Folders of the model and of the problems, and the model's number of parameters."""
    make_problems(work / "problems", count=max(64, args.prompts), prompt_tokens=args.prompt_tokens)
    if args.model:
        return args.model.absolute(), work / "problems", count_parameters(args.model)
    return work / "model", work / "problems", make_model(args.shape, work / "model")


def summary(run: WatchedRun) -> dict:
    """Medians of the steady iterations, as soon as there are any."""
    steady = run.rows[SKIPPED:]
    if not steady:
        return run.describe()
    phases = sorted(key for key in steady[0] if key.startswith("time/"))
    return {
        "seconds": {key.removeprefix("time/"): statistics.median(row[key] for row in steady)
                    for key in phases},
        "steady_iterations": len(steady),
        "canary_share": statistics.median(row["time/canary"] / row["time/step"] for row in steady),
        **run.describe(),
        "ratio_p01": statistics.median(row["policy/ratio_p01"] for row in steady),
        "ratio_p99": statistics.median(row["policy/ratio_p99"] for row in steady),
        "canary_max_abs_diff": max(row["canary/max_abs_diff"] for row in run.rows),
        "canary_mean_abs_diff": max(row["canary/mean_abs_diff"] for row in run.rows),
    }


def measure(args: argparse.Namespace, work: Path, recording: Recording) -> None:
    """Run ``grpo.py`` and read its metrics."""
    model, problems, parameters = prepare(args, work)
    chosen = overrides(args, model, problems)
    recording.add(parameters=parameters, run=[
        option for option in chosen if str(work) not in option and str(model) not in option])
    run = WatchedRun("grpo.py", chosen, work / "run",
                     seen=lambda run: recording.add(**summary(run)))
    try:
        recording.describe_machine()  # while the run starts
        run.follow(iterations=args.iterations, timeout=args.timeout)
    finally:
        recording.add(**summary(run))


def add_work_options(parser: argparse.ArgumentParser) -> None:
    """Options of the model and the batch."""
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--model", type=Path, help="folder of a model of this shape that was made "
                        "before; default: it is made")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--response-tokens", type=int, default=256)


def describe_work(args: argparse.Namespace) -> str:
    """The batch in words."""
    return (f"{args.prompts} prompts x {args.group} completions x ({args.prompt_tokens} + "
            f"{args.response_tokens}) tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work_options(parser)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--timeout", type=float, default=540.0, help="seconds")
    parser.add_argument("--out", type=Path, help="where the JSON result is written")
    parser.add_argument("overrides", nargs="*", help="further overrides for grpo.py")
    args = parser.parse_args()
    if args.iterations <= SKIPPED:
        parser.error(f"--iterations {args.iterations}: the first {SKIPPED} are not counted, give "
                     "more")
    recording = Recording("step_time", args.out, work=describe_work(args))
    with tempfile.TemporaryDirectory() as work:
        measure(args, Path(work), recording)
    recording.finish()


if __name__ == "__main__":
    main()
