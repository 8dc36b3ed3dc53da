"""Tokens a second through the bridge, and of the same policy without environments.

    python benchmarks/bridge.py --out benchmarks/results/bridge_cpu.json

One in-process vLLM engine in one run generates completions of the same prompts and lengths both
ways, in turns: ``direct`` hands all prompts to the engine at once, as a rollout does; ``bridge``
has a client process keep ``--concurrent`` requests open over HTTP, and answers them by
:class:`~grpo.atropos.bridge_driver.BridgeDriver`, which also remembers every log-prob. Lengths lie
evenly between half and one and a half times ``--response-tokens``. ``ratio`` is the median over the
rounds of bridge by direct.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import REPO, Recording

# A process of its own, as environments are. Each thread keeps one request open.
CLIENT = """
import http.client, json, sys, threading
port, concurrent, requests, samples, tokens, prompt_tokens = map(int, sys.argv[1:])
numbers = iter(range(requests))
lock = threading.Lock()
def work():
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    while True:
        with lock:
            number = next(numbers, None)
        if number is None:
            return
        prompt = [2 + (number * 7 + i) % 250 for i in range(prompt_tokens)]
        size = tokens // 2 + number * 37 % (tokens + 1)
        connection.request("POST", "/generate", json.dumps({
            "prompt": {"prompt_token_ids": prompt}, "n": samples, "max_tokens": size,
            "temperature": 1.0, "logprobs": 0, "ignore_eos": True}))
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200, body
threads = [threading.Thread(target=work) for _ in range(concurrent)]
print("ready", flush=True)
sys.stdin.readline()
[t.start() for t in threads]
[t.join() for t in threads]
"""


def make_model(folder: Path, args: argparse.Namespace) -> None:
    """A Qwen2-shaped model with random weights and the byte tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from grpo.envs.embedded import byte_tokenizer

    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(
        vocab_size=258, hidden_size=args.hidden, intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=2048, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1,
        bos_token_id=None)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def lengths(args: argparse.Namespace) -> list[int]:
    """Tokens of each request's completions; the client counts them in the same way."""
    tokens = args.response_tokens
    return [tokens // 2 + number * 37 % (tokens + 1) for number in range(args.requests)]


def direct(policy, args: argparse.Namespace) -> float:
    """Seconds for all completions, handed over at once, with what ``VLLMPolicy`` asks for."""
    from vllm import SamplingParams

    prompts, parameters = [], []
    for number, size in enumerate(lengths(args)):
        prompt = [2 + (number * 7 + i) % 250 for i in range(args.prompt_tokens)]
        prompts += [{"prompt_token_ids": prompt}] * args.samples
        parameters += [SamplingParams(temperature=1.0, max_tokens=size, ignore_eos=True, logprobs=0,
                                      flat_logprobs=True, detokenize=False)] * args.samples
    start = time.perf_counter()
    outputs = policy.engine.generate(prompts, parameters, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == args.total
    return seconds


def through_bridge(driver, url: str, args: argparse.Namespace) -> float:
    """Seconds for all completions, from the first request to the last reply."""
    options = [args.concurrent, args.requests, args.samples, args.response_tokens,
               args.prompt_tokens]
    counts, wanted = driver.bridge.counts, args.requests * args.samples
    replies = counts["replies"] + wanted
    with subprocess.Popen([sys.executable, "-c", CLIENT, url.rpartition(":")[2],
                           *map(str, options)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as client:
        client.stdout.readline()  # it has started
        start = time.perf_counter()
        client.stdin.write(b"\n")
        client.stdin.flush()
        while counts["replies"] < replies:
            driver.advance(0.01)
            if time.perf_counter() > start + args.timeout or client.poll():
                client.kill()
                raise RuntimeError(f"{replies - counts['replies']} of {wanted} completions are "
                                   f"missing after {time.perf_counter() - start:.0f} s")
        seconds = time.perf_counter() - start
        if client.wait(timeout=30):
            raise RuntimeError("the client failed; its message is above")
    return seconds


def measure(args: argparse.Namespace, folder: Path, recording: Recording) -> None:
    import torch

    from grpo.atropos.bridge import Bridge
    from grpo.atropos.bridge_driver import BridgeDriver
    from grpo.atropos.bridge_server import BridgeServer
    from grpo.envs.embedded import byte_tokenizer
    from grpo.policies.base import Sampling
    from grpo.policies.inprocess import start_engine
    from grpo.policies.samplers import VLLMSampler
    from grpo.policies.vllm import VLLMPolicy

    make_model(folder, args)
    cuda = torch.cuda.is_available()
    engine = start_engine(
        str(folder), device=torch.device("cuda" if cuda else "cpu"),
        dtype=torch.bfloat16 if cuda else torch.float32,
        max_model_len=args.prompt_tokens + 3 * args.response_tokens // 2 + 8,
        max_num_seqs=args.concurrent * args.samples)
    policy = VLLMPolicy(engine, Sampling(max_tokens=args.response_tokens), pad_token_id=0,
                        eos_token_ids=(1,), ignore_eos=True)
    bridge = Bridge(tokenizer=byte_tokenizer(), eos_token_ids=(1,), model_names=("policy",),
                    max_model_len=policy.max_model_len, vocab_size=258, temperature_only=False)
    driver = BridgeDriver(bridge, VLLMSampler(policy, seeded=False))
    recording.describe_machine(also=("uvicorn", "fastapi", "uvloop"))
    recording.add(parameters=sum(p.numel() for p in _model(engine).parameters()))
    seconds: dict[str, list[float]] = {"direct": [], "bridge": []}
    with BridgeServer(bridge) as server:
        direct(policy, args)  # warms up
        for turn in range(args.rounds):
            # In turns, so that neither way always has the machine's better moment.
            for way in (("direct", "bridge") if turn % 2 else ("bridge", "direct")):
                seconds[way].append(direct(policy, args) if way == "direct" else
                                    through_bridge(driver, server.url, args))
                print(f"{way}: {args.total / seconds[way][-1]:,.0f} tokens/s", file=sys.stderr,
                      flush=True)
            recording.add(**summary(seconds, args))


def summary(seconds: dict[str, list[float]], args: argparse.Namespace) -> dict:
    """Rates of both ways, in pairs of one turn."""
    ratios = [a / b for a, b in zip(seconds["direct"], seconds["bridge"], strict=True)]
    return {"tokens_per_second": {way: args.total / statistics.median(of_way)
                                  for way, of_way in seconds.items()},
            "seconds": seconds, "ratio": statistics.median(ratios), "ratios": ratios}


def _model(engine):
    from grpo.policies.inprocess import engine_module

    return engine_module(engine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--samples", type=int, default=1, help="of each request (n)")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--response-tokens", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds a round")
    parser.add_argument("--out", type=Path, help="where the JSON result is written")
    args = parser.parse_args()
    args.total = args.samples * sum(lengths(args))
    sys.path.insert(0, str(REPO))
    recording = Recording(
        "bridge", args.out,
        work=f"{args.requests} requests x {args.samples} samples x ({args.prompt_tokens} + "
             f"{args.response_tokens} on average) tokens, {args.concurrent} requests open")
    with tempfile.TemporaryDirectory() as work:
        measure(args, Path(work), recording)
    recording.finish()


if __name__ == "__main__":
    main()
