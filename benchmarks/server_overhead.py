"""What the HTTP server costs: tokens a second through ``/generate``, over those of the bare engine.

    python benchmarks/server_overhead.py --out benchmarks/results/server_overhead_cpu.json

One engine (``AsyncLLM``), one process, one event loop, started as the server starts them. Rounds
alternate between calling the engine directly and answering a client process that sends the same
requests all at once, each on a connection of its own. What disturbs the machine so disturbs both
sides, and each pair of rounds gives a ratio. Both forms of an answer are measured:

* ``tokens``: token ids and one log-prob a token, as ``EngineClient.generate`` asks; vLLM without
  detokenising;
* ``text``: text and log-probs by token id, as Atropos' environments ask; vLLM detokenises, too.

Random weights and a fixed length of every response, so both sides sample the same number of tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from machine import Recording
from step_time import SHAPES, make_model

from grpo.policies.client import EngineClient
from grpo.server.serve import http_server, make_app, parser, start_engine
from grpo.system.lifeline import bind

FORMS = ("tokens", "text")
Round = Callable[[], Awaitable[float]]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__,
                                      formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--shape", choices=list(SHAPES), default="tiny")
    options.add_argument("--requests", type=int, default=64, help="at once")
    options.add_argument("--n", type=int, default=1, help="samples a request")
    options.add_argument("--prompt", type=int, default=64, help="tokens")
    options.add_argument("--response", type=int, default=128, help="tokens")
    options.add_argument("--repeats", type=int, default=9, help="pairs of rounds")
    options.add_argument("--out", type=Path)
    options.add_argument("--client", nargs=2, metavar=("URL", "FORM"), help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.client:
        client(args, *args.client)
        return
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    recording = Recording("server_overhead", args.out, **{
        name: getattr(args, name) for name in
        ("shape", "requests", "n", "prompt", "response", "repeats")})
    with tempfile.TemporaryDirectory() as folder:
        recording.add(parameters=make_model(args.shape, Path(folder)))
        recording.describe_machine()
        asyncio.run(measure(args, folder, recording))
    recording.finish()


async def measure(args: argparse.Namespace, model: str, recording: Recording) -> None:
    """Rounds of both sides by turns, for each form of an answer."""
    import torch

    server_args = parser().parse_args([
        "--model", model, "--max-model-len", str(args.prompt + args.response),
        "--dtype", "bfloat16" if torch.cuda.is_available() else "float32",
        "--max-num-seqs", str(args.requests * args.n)])
    engine = start_engine(server_args)
    try:
        http = http_server(await make_app(engine, server_args))
        sock = bind("127.0.0.1", 0)
        serving = asyncio.ensure_future(http.serve(sockets=[sock]))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        for form in FORMS:
            process = await asyncio.create_subprocess_exec(
                sys.executable, __file__, *sys.argv[1:], "--client", url, form,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
            rounds = {"bare": bare(engine, args, form), "server": through(process)}
            await compare(engine, rounds, args, lambda found, form=form: recording.add(
                **{form: found}))
            process.stdin.close()
            await process.wait()
        http.should_exit = True
        await serving
    finally:
        engine.shutdown()


async def compare(engine, rounds: dict[str, Round], args: argparse.Namespace,
                  record: Callable[[dict], None]) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in rounds}
    for repeat in range(args.repeats + 1):
        # Neither side always comes first.
        for name in list(rounds)[:: 1 if repeat % 2 else -1]:
            await engine.reset_prefix_cache()
            seconds[name].append(await rounds[name]())
        if repeat:
            record(summary(seconds, args))


def summary(seconds: dict[str, list[float]], args: argparse.Namespace) -> dict:
    """Rates of both sides, in pairs of rounds."""
    tokens = args.requests * args.n * args.response
    kept = {name: values[1:] for name, values in seconds.items()}  # the first pair warms up
    ratios = [bare / server for bare, server in zip(kept["bare"], kept["server"], strict=True)]
    return {"ratio": statistics.median(ratios), "ratios": ratios,
            **{f"{name}_tokens_per_second": tokens / statistics.median(values)
               for name, values in kept.items()}}


def prompts(args: argparse.Namespace) -> list[list[int]]:
    return [[5 + (7 * row + i) % 200 for i in range(args.prompt)] for row in range(args.requests)]


def bare(engine, args: argparse.Namespace, form: str) -> Round:
    """The engine itself, with the sampling parameters that the server builds."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(n=args.n, max_tokens=args.response, ignore_eos=True, logprobs=0,
                            flat_logprobs=True, detokenize=form == "text",
                            output_kind=RequestOutputKind.FINAL_ONLY)

    async def one(row: int, prompt: list[int]) -> int:
        sampled = 0
        async for output in engine.generate({"prompt_token_ids": prompt}, params.clone(),
                                            f"{time.monotonic_ns()}-{row}"):
            sampled = sum(len(part.token_ids) for part in output.outputs)
        return sampled

    async def round() -> float:
        started = time.perf_counter()
        sampled = await asyncio.gather(*[one(*item) for item in enumerate(prompts(args))])
        elapsed = time.perf_counter() - started
        check(sum(sampled), args)
        return elapsed

    return round


def through(process: asyncio.subprocess.Process) -> Round:
    """The client process: a line starts a round, a line with its seconds ends it."""
    async def round() -> float:
        process.stdin.write(b"go\n")
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError("the client process ended; see its error above")
        return float(line)

    return round


def client(args: argparse.Namespace, url: str, form: str) -> None:
    """Send the requests, all at once, whenever a line comes in."""
    engine, bodies = EngineClient(url, timeout=600), []
    for prompt in prompts(args):
        body = {"prompt_token_ids": prompt, "n": args.n, "max_tokens": args.response,
                "ignore_eos": True, "logprobs": 0}
        bodies.append(body if form == "text" else
                      {**body, "flat_logprobs": True, "return_text": False})
    with ThreadPoolExecutor(args.requests) as pool:
        for _ in sys.stdin:
            started = time.perf_counter()
            answers = list(pool.map(lambda body: engine.call("POST", "/generate", body), bodies))
            elapsed = time.perf_counter() - started
            check(sum(len(ids) for answer in answers for ids in answer["token_ids"]), args)
            print(elapsed, flush=True)


def check(sampled: int, args: argparse.Namespace) -> None:
    expected = args.requests * args.n * args.response
    if sampled != expected:
        sys.exit(f"{sampled} tokens were sampled instead of {expected}")


if __name__ == "__main__":
    main()
