"""The work of ``step_time.py`` by TRL's GRPOTrainer: vLLM on the same GPU, Liger's loss.

    python benchmarks/peer_trl.py --shape 1.5b --out benchmarks/results/peer_trl_h200.json

Needs ``pip install trl liger-kernel datasets``. One optimizer step a batch, bfloat16 weights, vLLM
in the trainer's process with TRL's own share of the GPU, no gradient checkpointing, micro-batches
of ``--micro-batch-rows``. Writes seconds from the start of one step, which generates, to that of
the next, without the first ones, and the peak of the GPU's memory in use. Compare with a result of
``step_time.py`` from the same machine and hour alone: steps of both wait for the host's processor.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import string
import tempfile
import time
from pathlib import Path

from gpu_memory import PeakMemory
from machine import Recording
from step_time import add_work_options, count_parameters, describe_work, make_model

SKIPPED = 2  # steps that still compile and warm up


def measure(args: argparse.Namespace, model: Path, work: Path, recording: Recording) -> None:
    """Train for ``args.iterations`` steps; each is written as it ends."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    recording.describe_machine(also=("vllm", "trl", "liger-kernel"))
    cuda = torch.cuda.is_available()
    started = time.monotonic()
    weights = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16 if cuda else torch.float32)
    # A random model means nothing by its end-of-text; every completion has the full length.
    weights.generation_config.eos_token_id = None
    letters = random.Random(0)
    prompts = ["".join(letters.choices(string.ascii_lowercase, k=args.prompt_tokens))
               for _ in range(args.prompts * args.iterations)]
    with PeakMemory() as memory:
        clock = make_clock(recording, memory)
        trainer = GRPOTrainer(
            model=weights, reward_funcs=vowels, args=settings(args, work, cuda=cuda),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            processing_class=AutoTokenizer.from_pretrained(model), callbacks=[clock])
        recording.add(startup_seconds=round(time.monotonic() - started, 1))
        trainer.train()
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history
               if "completions/mean_length" in row]
    recording.add(completion_tokens_mean=statistics.mean(lengths))


def settings(args: argparse.Namespace, work: Path, *, cuda: bool):
    """TRL's configuration of the same work."""
    from trl import GRPOConfig

    rows = args.prompts * args.group
    return GRPOConfig(
        output_dir=str(work), max_steps=args.iterations, num_generations=args.group,
        per_device_train_batch_size=args.micro_batch_rows,
        gradient_accumulation_steps=rows // args.micro_batch_rows,
        max_completion_length=args.response_tokens, temperature=1.0, learning_rate=1e-6, beta=0.0,
        use_vllm=args.vllm, vllm_mode="colocate",
        vllm_max_model_length=args.prompt_tokens + args.response_tokens,
        use_liger_kernel=args.liger, gradient_checkpointing=False, bf16=cuda, use_cpu=not cuda,
        generation_kwargs={"ignore_eos": True} if args.vllm else None, logging_steps=1,
        save_strategy="no", report_to=[])


def vowels(completions: list[str], **_: object) -> list[float]:
    """A reward that differs between the completions of a group."""
    draw = random.Random(len(completions[0]))
    return [sum(letter in "aeiou" for letter in text) + 0.01 * draw.random()
            for text in completions]


def make_clock(recording: Recording, memory: PeakMemory):
    """A callback that writes the time of each step when the next one begins, or all have ended."""
    import torch
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.stamps: list[float] = []

        def on_step_begin(self, *_: object, **__: object) -> None:
            self.stamp()

        def on_train_end(self, *_: object, **__: object) -> None:
            self.stamp()

        def stamp(self) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.stamps.append(time.monotonic())
            seconds = [after - before for before, after in
                       zip(self.stamps, self.stamps[1:], strict=False)]
            steady = seconds[SKIPPED:]
            recording.add(
                seconds_per_iteration=seconds, steady_iterations=len(steady),
                **({"seconds": {"step": statistics.median(steady)}} if steady else {}),
                memory_gib={"before": memory.before_gib, "peak": memory.peak_gib})

    return Clock()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work_options(parser)
    parser.add_argument("--micro-batch-rows", type=int, default=32)
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--no-vllm", dest="vllm", action="store_false",
                        help="generate with Transformers")
    parser.add_argument("--no-liger", dest="liger", action="store_false", help="TRL's own loss")
    parser.add_argument("--out", type=Path, help="where the JSON result is written")
    args = parser.parse_args()
    rows = args.prompts * args.group
    if rows % args.micro_batch_rows:
        parser.error(f"--micro-batch-rows {args.micro_batch_rows} does not divide the {rows} rows "
                     "of a batch")
    if args.iterations <= SKIPPED:
        parser.error(f"--iterations {args.iterations}: the first {SKIPPED} are not counted, give "
                     "more")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    recording = Recording("peer_trl", args.out, work=describe_work(args))
    with tempfile.TemporaryDirectory() as work:
        model = args.model or Path(work, "model")
        recording.add(parameters=count_parameters(model) if args.model
                      else make_model(args.shape, model))
        measure(args, model, Path(work), recording)
    recording.finish()


if __name__ == "__main__":
    main()
