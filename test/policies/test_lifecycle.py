"""What an engine's process leaves behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from grpo.policies.lifecycle import starting

# A worker that has compiled in processes of its own, and is killed together with its children.
COMPILED = """
import os, signal, sys
from pathlib import Path
from torch._inductor import config
config.compile_threads, config.worker_start_method = 2, "subprocess"
from torch._inductor.async_compile import AsyncCompile
from grpo.policies.lifecycle import end_compile_workers

def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

AsyncCompile.process_pool().submit(abs, -1).result()
own = children(os.getpid())
theirs = [pid for child in own for pid in children(child)]
if sys.argv[1] == "ended":
    end_compile_workers()
for pid in own:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
print(len(theirs), sum(Path(f"/proc/{pid}").exists() for pid in theirs), flush=True)
for pid in theirs:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
os._exit(0)
"""


def compiled(how: str) -> list[int]:
    """How many processes the worker's children had, and how many of them are left."""
    done = subprocess.run([sys.executable, "-c", COMPILED, how], capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr
    return [int(count) for count in done.stdout.split()[-2:]]


@pytest.mark.slow
def test_processes_that_compiled_are_gone_before_a_worker_is_killed():
    had, left = compiled("killed")
    assert had > 0 and left > 0  # what the call is for
    had, left = compiled("ended")
    assert had > 0 and left == 0


@pytest.mark.vllm
def test_engines_of_older_releases_need_no_free_port(monkeypatch):
    from vllm.utils import network_utils
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    from grpo.policies.lifecycle import starting

    # Newer ones choose the file themselves, as the one that is here: a stand-in for the others.
    monkeypatch.delattr(network_utils, "get_file_store_init_method")
    for module in (multiproc_executor, uniproc_executor):
        monkeypatch.setattr(module, "get_distributed_init_method",
                            network_utils.get_distributed_init_method)
    with starting():
        methods = {module.get_distributed_init_method("127.0.0.1", 29500)
                   for module in (multiproc_executor, uniproc_executor)}
    assert len(methods) == 2 and all(method.startswith("file:///") for method in methods)


def test_an_engine_that_starts_tries_plain_sampling_and_no_other():
    """vLLM's own method has to be there, or starts on GPUs would be slow without a word."""
    from vllm import SamplingParams

    tried = SamplingParams.for_sampler_warmup
    with starting():
        params = SamplingParams.for_sampler_warmup()
        assert (params.top_p, params.top_k, params.logprobs) == (1.0, 0, 0)
        assert params.repetition_penalty == 1.0 and params.min_tokens == 0
    assert SamplingParams.for_sampler_warmup is tried
    assert SamplingParams.for_sampler_warmup().top_p < 1.0
