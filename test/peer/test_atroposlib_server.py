"""Our server as atroposlib sees it: its own server tests and its client classes, unmodified.

They run in a Python of their own, because atroposlib needs an older transformers; see
``conftest.py``.
"""

from __future__ import annotations

import functools

import pytest
import torch

from grpo.envs.tokenizer_files import save_tokenizer
from grpo.server.engine_process import EngineProcess, server_command

from .conftest import CHECKS

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer):
    """A random model whose tokenizer transformers 4 can load, too."""
    from grpo.envs.embedded import EmbeddedSpec, small_qwen2

    folder = tmp_path_factory.mktemp("model")
    small_qwen2(EmbeddedSpec(), len(tokenizer)).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory):
    """An adapter that changes what the model says."""
    from transformers import AutoModelForCausalLM

    from grpo.weights.adapters import adapters, make_lora, save_adapter

    tuned = make_lora(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), r=4)
    with torch.no_grad():
        for factors in adapters(tuned).values():
            factors.b.normal_(std=0.2)
    return save_adapter(tuned, tmp_path_factory.mktemp("adapters") / "adapter_step_1")


@pytest.fixture(scope="module")
def server(python, model, tmp_path_factory):
    pytest.importorskip("vllm")
    command = server_command(str(model), dtype="float32", max_model_len=1024, max_num_seqs=32,
                             enable_lora=True, kv_cache_memory_bytes=64 << 20)
    log = tmp_path_factory.mktemp("log") / "server.log"
    with EngineProcess(command, start_timeout=240, log_path=log) as server:
        yield server


@pytest.fixture
def run(peer_tests, server, model, adapter):
    """Run tests that call our server."""
    # Their tests give no key, which later openai clients refuse.
    return functools.partial(
        peer_tests, "-p", "atroposlib.tests.conftest", "--run-gpu", OPENAI_ADMIN_KEY="none",
        GRPO_PEER_URL=server.url, GRPO_PEER_MODEL=str(model), GRPO_PEER_ADAPTER=str(adapter))


def test_its_own_server_tests_pass(run):
    run(CHECKS / "own_server_tests.py", at_least=8)


def test_its_client_classes_work(run):
    run(CHECKS / "environment_clients.py", at_least=9)


def test_the_clients_of_its_trainer_work(run, server):
    run(CHECKS / "trainer_clients.py", at_least=3)
    assert server.client().call("GET", "/lora/status")["load_count"] >= 2
