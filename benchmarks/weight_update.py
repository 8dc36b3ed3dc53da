"""Weight updates from a trainer on GPU 0 to an engine on GPU 1, and where their time goes.

    python benchmarks/weight_update.py --out benchmarks/results/weight_update_2h200.json

Random models with the shapes of Qwen2.5 1.5B and 7B; the engine (vLLM, CUDA graphs on) loads dummy
weights, which the first update replaces. Measured in turn:

* NCCL alone: the same tensors broadcast between two bare processes, one by one, grouped, and as one
  buffer of the same size: what the hardware gives;
* ``WeightTransfer(backend="nccl")`` with several sizes of buckets, and of the tensors that travel
  packed: a whole update, and of it the send as the engine's worker sees it; the rest is pausing,
  control messages and resetting the cache;
* ``WeightTransfer(backend="ipc")``: the worker copies out of the trainer's memory over NVLink;
* generating with the engine, for the ratio of an update to a rollout.

After the timing, fingerprints prove that the engine holds the trainer's weights.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from machine import Recording

import torch  # isort: skip

SHAPES = {
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
             "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
             "tie_word_embeddings": True},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
           "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
           "tie_word_embeddings": False},
}
PROMPT, RESPONSE, ROWS = 64, 256, 256
TIMEOUT = 300.0


class Timed:
    """An engine's handle that keeps the last duration of each call."""

    def __init__(self, engine) -> None:
        self.engine, self.seconds, self.received = engine, {}, {}

    def __getattr__(self, name: str):
        return getattr(self.engine, name)

    def collective_rpc(self, method: str, *args, timeout: float):
        started = time.perf_counter()
        results = self.engine.collective_rpc(method, *args, timeout=timeout)
        self.seconds[method] = time.perf_counter() - started
        if method == "transfer_receive":
            self.received = results[0]
        return results

    def pause(self, *args, **kwargs) -> None:
        self._timed("pause", self.engine.pause, *args, **kwargs)

    def resume(self, *args, **kwargs) -> None:
        self._timed("resume", self.engine.resume, *args, **kwargs)

    def reset_prefix_cache(self, *args, **kwargs) -> bool:
        return self._timed("reset_prefix_cache", self.engine.reset_prefix_cache, *args, **kwargs)

    def _timed(self, name: str, function: Callable, *args, **kwargs):
        started = time.perf_counter()
        result = function(*args, **kwargs)
        self.seconds[name] = time.perf_counter() - started
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--buckets-mib", nargs="+", type=int, default=[64, 512, 4096])
    parser.add_argument("--small-mib", nargs="+", type=int, default=[16, 64],
                        help="tensors below this travel packed")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--bare-nccl", nargs=3, metavar=("RANK", "SIZE", "FILE"),
                        help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bare_nccl:
        rank, size, file = args.bare_nccl
        bare_nccl(int(rank), size, file, args.repeats)
        return
    if torch.cuda.device_count() < 2:
        sys.exit("needs two GPUs, and sees " + str(torch.cuda.device_count()))
    recording = Recording("weight_update", args.out, repeats=args.repeats, rows=ROWS,
                          prompt=PROMPT, response=RESPONSE)
    recording.describe_machine(also=("vllm",))
    sizes: dict[str, dict] = {}
    for size in args.sizes:
        sizes[size] = {"nccl_alone": run_bare_nccl(size, args.repeats)}
        recording.add(sizes=sizes)
        for measured in measure(size, args):
            sizes[size].update(measured)
            recording.add(sizes=sizes)
    recording.finish()


def measure(size: str, args: argparse.Namespace) -> Iterator[dict]:
    """All that is measured of a size so far, again after each way."""
    from grpo.policies.inprocess import stop_engine
    from grpo.weights import transports
    from grpo.weights.transfer import WeightTransfer

    with tempfile.TemporaryDirectory() as folder:
        model, llm, engine = start(size, folder)
        measured = {"parameters": len(list(model.parameters())), "gigabytes": gigabytes(model)}
        for mib, small in itertools.product(args.buckets_mib, args.small_mib):
            transports.SMALL_BYTES = small << 20
            weights = WeightTransfer(model, engine, backend="nccl", bucket_bytes=mib << 20,
                                     timeout=TIMEOUT)
            measured[f"direct_{mib}_mib_small_{small}"] = time_updates(
                weights, model, engine, args.repeats)
            yield measured
        weights = WeightTransfer(model, engine, backend="ipc", timeout=TIMEOUT)
        measured["ipc"] = time_updates(weights, model, engine, args.repeats)
        yield measured
        measured["generate"] = time_generate(llm, args.repeats)
        for key, value in measured.items():
            if isinstance(value, dict) and "seconds" in value and key != "generate":
                value["share_of_generate"] = value["seconds"] / measured["generate"]["seconds"]
        stop_engine(llm)
    yield measured
    del model
    torch.cuda.empty_cache()


def start(size: str, folder: str):
    """The trainer's model on GPU 0 and an engine on GPU 1, from a configuration alone."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from vllm import LLM

    from grpo.policies.handle import InProcessEngine
    from grpo.system.child_process import variables_for_children

    config = Qwen2Config(**SHAPES[size], max_position_embeddings=4096, rms_norm_eps=1e-6,
                         architectures=["Qwen2ForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda:0"):
        model = Qwen2ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    ours = os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1"
    # The engine takes its first GPU; it sees the trainer's as well, to map its memory.
    with variables_for_children({"CUDA_VISIBLE_DEVICES": ",".join(reversed(ours.split(",")[:2]))}):
        llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
                  max_model_len=PROMPT + RESPONSE, max_num_seqs=ROWS, gpu_memory_utilization=0.6,
                  distributed_executor_backend="mp", disable_log_stats=True,
                  worker_extension_cls="grpo.weights.worker.extension.WeightWorker")
    return model, llm, Timed(InProcessEngine(llm))


def time_updates(weights, model, engine: Timed, repeats: int) -> dict:
    """Median of whole updates and their parts, after a first one that connects."""
    started = time.perf_counter()
    weights.publish()
    first = time.perf_counter() - started
    seconds, parts = [], []
    for _ in range(repeats):
        with torch.no_grad():
            next(model.parameters()).mul_(1.01)
        torch.cuda.synchronize()
        engine.seconds, engine.received = {}, {}
        started = time.perf_counter()
        weights.publish()
        seconds.append(time.perf_counter() - started)
        part = dict(engine.seconds)
        if engine.received:
            part["inside_the_worker"] = engine.received["seconds"]
        parts.append(part)
    different = weights.differing()
    weights.close()
    median = statistics.median(seconds)
    result = {"seconds": median, "best": min(seconds), "gigabytes_per_second":
              gigabytes(model) / median, "first_with_connection": first,
              "parts": {name: statistics.median(part[name] for part in parts) for name in parts[0]},
              "differing_afterwards": different}
    if "inside_the_worker" in result["parts"]:
        result["worker_gigabytes_per_second"] = (
            gigabytes(model) / result["parts"]["inside_the_worker"])
    return result


def time_generate(llm, repeats: int) -> dict:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=RESPONSE, ignore_eos=True, detokenize=False, logprobs=0)
    prompts = [{"prompt_token_ids": [5 + (7 * row + i) % 1000 for i in range(PROMPT)]}
               for row in range(ROWS)]
    seconds = []
    for _ in range(max(3, repeats // 3)):
        llm.reset_prefix_cache()
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
    return {"seconds": min(seconds), "tokens_per_second": ROWS * RESPONSE / min(seconds)}


def run_bare_nccl(size: str, repeats: int) -> dict:
    """Two processes that only broadcast; the receiver's numbers."""
    import json

    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "rendezvous")
        ranks = [subprocess.Popen([sys.executable, __file__, "--repeats", str(repeats),
                                   "--bare-nccl", str(rank), size, file]) for rank in range(2)]
        try:
            for process in ranks:
                if process.wait(timeout=TIMEOUT):
                    raise RuntimeError("NCCL failed between two bare processes; see above")
        finally:
            for process in ranks:
                process.kill()
        return json.loads(Path(file + ".json").read_text())


def bare_nccl(rank: int, size: str, file: str, repeats: int) -> None:
    import json

    import torch.distributed as dist
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{file}", rank=rank, world_size=2,
                            device_id=device)
    with torch.device("meta"):
        shapes = [param.shape for param in Qwen2ForCausalLM(
            Qwen2Config(**SHAPES[size])).parameters()]
    tensors = [torch.ones(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
    count = sum(tensor.numel() for tensor in tensors)
    whole = torch.ones(count, dtype=torch.bfloat16, device=device)

    def one_by_one() -> None:
        for tensor in tensors:
            dist.broadcast(tensor, 0)

    def grouped() -> None:
        with dist._coalescing_manager(device=device):
            one_by_one()

    ways = {"one_by_one": one_by_one, "grouped": grouped,
            "one_buffer": lambda: dist.broadcast(whole, 0)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 2):
        for name, way in ways.items():
            dist.barrier()
            torch.cuda.synchronize()
            started = time.perf_counter()
            way()
            torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - started)
    if rank == 1:
        medians = {name: statistics.median(values[2:]) for name, values in seconds.items()}
        Path(file + ".json").write_text(json.dumps(
            {name: {"seconds": value, "gigabytes_per_second": 2e-9 * count / value}
             for name, value in medians.items()}))
    dist.destroy_process_group()


def gigabytes(model) -> float:
    return 1e-9 * sum(param.numel() * param.element_size() for param in model.parameters())


if __name__ == "__main__":
    main()
