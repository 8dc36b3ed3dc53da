"""Weight updates from a trainer that FSDP2 shards over several GPUs to a tensor-parallel engine.

    python benchmarks/sharded_update.py --trainer 0,1 --engine 0,1      # on the same two GPUs
    python benchmarks/sharded_update.py --trainer 0,1 --engine 2,3      # on four

On the same GPUs each rank writes into the memory of the worker beside it (CUDA IPC), on others rank
0 broadcasts with NCCL while the next parameters are gathered. Random models with the shapes of
Qwen2.5; the engine (vLLM, CUDA graphs on) starts with other weights. After every update
fingerprints prove that each worker holds its shard of the trainer's parameters; with ``--size
tiny`` the engine's log-probs of fixed tokens are compared with those of the unsharded model, too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from machine import Recording
from weight_update import SHAPES

import torch  # isort: skip

SIZES = {**SHAPES, "tiny": {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000,
    "tie_word_embeddings": True}}
PROMPTS = [[5 + (7 * row + i) % 200 for i in range(40)] for row in range(8)]
TIMEOUT = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1.5B", choices=list(SIZES))
    parser.add_argument("--trainer", default="0,1", help="GPUs of the trainer's ranks")
    parser.add_argument("--engine", default="0,1", help="GPUs of the engine's workers")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    trainer = [int(gpu) for gpu in args.trainer.split(",")]
    needed = 1 + max(trainer + [int(gpu) for gpu in args.engine.split(",")])
    if torch.cuda.device_count() < needed:
        sys.exit(f"needs {needed} GPUs, and sees {torch.cuda.device_count()}")
    recording = Recording("sharded_update", args.out, size=args.size, trainer=args.trainer,
                          engine=args.engine)
    recording.describe_machine(also=("vllm",))
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        save_config(args.size, folder)
        others = [context.Process(target=run_rank, args=(rank, trainer, folder, args), daemon=True)
                  for rank in range(1, len(trainer))]
        for process in others:
            process.start()
        try:
            run_rank(0, trainer, folder, args, recording)
            for process in others:
                process.join(TIMEOUT)
        finally:
            for process in others:
                process.kill()
    if failed := [process.exitcode for process in others if process.exitcode]:
        sys.exit(f"{len(failed)} of the trainer's ranks failed; see above")
    recording.finish()


def run_rank(rank: int, trainer: list[int], folder: str, args: argparse.Namespace,
             recording: Recording | None = None) -> None:
    """Measure as one of the trainer's ranks; the first one records."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from grpo.weights.transfer import WeightTransfer

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    # Started first: its worker processes must not inherit the state of ours.
    llm = start_engine(folder, args) if rank == 0 else None
    device = torch.device("cuda", trainer[rank])
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=rank,
                            world_size=len(trainer), device_id=device)
    model = make_model(folder, device)
    whole = make_model(folder, device) if args.size == "tiny" and rank == 0 else None
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    engine = None
    if rank == 0:
        from grpo.policies.handle import InProcessEngine

        engine = InProcessEngine(llm)
    same = args.trainer == args.engine
    weights = WeightTransfer(model, engine, backend="ipc" if same else "nccl", timeout=TIMEOUT)
    update(weights, llm, whole, args.updates, recording)
    weights.close()
    dist.destroy_process_group()
    if rank == 0:
        from grpo.policies.inprocess import stop_engine

        stop_engine(llm)


def update(weights, llm, whole, updates: int, recording: Recording | None) -> None:
    """Publish ``updates`` times, each time other values; all ranks call it."""
    leads, seconds, gaps = weights.trainer.leads, [], []
    before = weights.differing()
    if leads and not before:
        raise RuntimeError("the engine started with the trainer's weights; nothing would be shown")
    for number in range(1 + updates):
        scale(weights.model, number)
        if whole is not None:
            scale(whole, number)
        torch.cuda.synchronize()
        started = time.perf_counter()
        weights.publish()
        seconds.append(time.perf_counter() - started)
        if different := weights.differing():
            raise RuntimeError(f"after update {number + 1} the engine's {different[:5]} differ")
        if whole is not None:
            gaps.append(log_prob_gap(llm, whole))
        if recording is not None:
            recording.add(**summary(weights.model, seconds),
                          **({"mean_log_prob_gap": gaps} if gaps else {}))


def summary(model, seconds: list[float]) -> dict:
    """Of the updates so far; the first one connects."""
    gigabytes = 1e-9 * sum(p.numel() * p.element_size() for p in model.parameters())
    first = {"gigabytes": gigabytes, "first_with_connection": seconds[0],
             "differing_after_each_update": 0}
    if not seconds[1:]:
        return first
    median = statistics.median(seconds[1:])
    return {**first, "seconds": median, "best": min(seconds[1:]),
            "gigabytes_per_second": gigabytes / median}


@torch.no_grad()
def scale(model, number: int) -> None:
    """Other values, the same ones in a sharded and a whole model."""
    for position, param in enumerate(model.parameters()):
        param.mul_(1.0 + 0.01 * ((number + position) % 7 - 3))


def log_prob_gap(llm, whole) -> float:
    """Mean difference of the sampled tokens' log-probs between engine and unsharded model, nats."""
    from grpo import data
    from grpo.objectives import TokenScorer
    from grpo.policies.base import Sampling
    from grpo.policies.vllm import VLLMPolicy

    policy = VLLMPolicy(llm, Sampling(max_tokens=12), pad_token_id=0, eos_token_ids=(1,))
    batch = policy.generate_from_ids(PROMPTS).to(next(whole.parameters()).device)
    mask_BT = batch[data.ASSISTANT_MASK]
    with torch.no_grad():
        ours_BT, _ = TokenScorer(whole)(batch[data.TOKENS], batch[data.ATTENTION_MASK], mask_BT)
    gap = (ours_BT - batch[data.LOG_PROBS])[mask_BT].abs().mean().item()
    if not gap < 0.1:
        raise RuntimeError(f"log-probs differ by {gap:.3f} nats in the mean (allowed: 0.1)")
    return gap


def start_engine(folder: str, args: argparse.Namespace):
    from vllm import LLM

    from grpo.system.child_process import variables_for_children

    gpus = args.engine.split(",")
    with variables_for_children({"CUDA_VISIBLE_DEVICES": args.engine}):
        return LLM(folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
                   max_model_len=320, max_num_seqs=64, gpu_memory_utilization=0.3,
                   tensor_parallel_size=len(gpus), distributed_executor_backend="mp",
                   disable_log_stats=True, logprobs_mode="processed_logprobs",
                   disable_custom_all_reduce=True,
                   worker_extension_cls="grpo.weights.worker.extension.WeightWorker")


def save_config(size: str, folder: str) -> None:
    from transformers import Qwen2Config

    Qwen2Config(**SIZES[size], max_position_embeddings=4096, rms_norm_eps=1e-6, eos_token_id=1,
                bos_token_id=None, pad_token_id=0, architectures=["Qwen2ForCausalLM"],
                dtype="bfloat16").save_pretrained(folder)


def make_model(folder: str, device: torch.device):
    from transformers import AutoConfig, Qwen2ForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = Qwen2ForCausalLM(AutoConfig.from_pretrained(folder))
    torch.set_default_dtype(torch.float32)
    return model


if __name__ == "__main__":
    main()
