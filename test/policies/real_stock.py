"""vLLM's own OpenAI server, as a user starts it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from grpo.system.child_process import Child, log_tail

from ..support import free_port, wait_until

#: Which lets it start fast on a CPU.
_SMALL = ("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "64",
          "--kv-cache-memory-bytes", str(64 << 20))


@contextmanager
def vllm_server(model: Path, log: Path, *flags: str, port: int | None = None,
                **variables: str) -> Iterator[str]:
    """The address of a server with a model, which ends with the context."""
    port = port or free_port()
    server = Child(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
         "--host", "127.0.0.1", "--port", str(port), *_SMALL, *flags], log_path=log,
        env={"HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", **variables})

    def answers() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2.0).is_success
        except httpx.TransportError:
            assert server.alive(), log_tail(log, 40)
            return False

    try:
        wait_until(answers, seconds=500.0, every=0.5, said=lambda: log_tail(log, 40))
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop()
