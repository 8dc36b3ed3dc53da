"""One server around the stand-in engine a test file, one around a real engine for all of them."""

from __future__ import annotations

import pytest
import torch

from grpo.server.engine_process import EngineProcess, server_command

from .serving import server


@pytest.fixture(scope="module")
def shared():
    with server(info={"max_lora_rank": 8}) as (engine, client):
        yield engine, client


@pytest.fixture
def client(shared):
    yield shared[1]
    shared[1].resume()


@pytest.fixture
def engine(shared):
    return shared[0]


@pytest.fixture(scope="session")
def folders(tmp_path_factory, tokenizer):
    """Two checkpoints of one shape with other weights."""
    from grpo.envs.embedded import EmbeddedSpec, small_qwen2

    folders = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp(f"model{seed}")
        model = small_qwen2(EmbeddedSpec(), len(tokenizer))
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "norm" not in name:
                    param.normal_(std=0.2)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folders.append(str(folder))
    return folders


@pytest.fixture(scope="session")
def real_server(folders, tmp_path_factory):
    """A server that allows every way of an update; the last test of all ends it."""
    pytest.importorskip("vllm")
    log_dir = tmp_path_factory.mktemp("log")
    command = server_command(
        folders[0], dtype="float32", max_model_len=1024, max_num_seqs=32, shared_weights=True,
        log_dir=log_dir, kv_cache_memory_bytes=64 << 20, enable_lora=True, max_lora_rank=8,
        max_loras=2, adapter_root=tmp_path_factory.getbasetemp())
    with EngineProcess(command, start_timeout=240, log_path=log_dir / "server.log",
                       env={"PYTHONFAULTHANDLER": "1"}) as server:
        server.log_dir = log_dir
        yield server


@pytest.fixture
def real_client(real_server, folders):
    """Afterwards the server has its first weights and no adapter again."""
    client = real_server.client()
    yield client
    client.pause("abort")  # a test that failed may have left a request
    client.resume()
    client.unload_lora()
    client.collective_rpc("load_checkpoint", folders[0], timeout=30)
    assert client.reset_prefix_cache()
