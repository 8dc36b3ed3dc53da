"""On a GPU: an engine that sleeps gives its memory back, and generates the same when awake."""

from __future__ import annotations

import pytest
import torch

from grpo.policies.client import EngineCallError
from grpo.server.engine_process import EngineProcess, server_command

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.timeout(400)]
PROMPT = list(range(10, 42))
# So much that what others on the GPU take or give back meanwhile is mostly little beside it.
CACHE_BYTES = 20 << 30


@pytest.fixture(scope="module")
def client(gpu_folder, tmp_path_factory):
    command = server_command(str(gpu_folder), dtype="bfloat16", max_model_len=128,
                             max_num_seqs=16, kv_cache_memory_bytes=CACHE_BYTES,
                             enable_sleep_mode=True)
    log = tmp_path_factory.mktemp("log") / "server.log"
    with EngineProcess(command, start_timeout=300, log_path=log) as server:
        yield server.client(timeout=120)


def greedy(client):
    return client.generate([PROMPT], max_tokens=24, temperature=0.0)[0].tokens


@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_given_back_and_the_weights_return(client, gpu_folder, level):
    expected = greedy(client)
    given_back = 0
    for _ in range(3):
        free, _ = torch.cuda.mem_get_info(0)
        client.sleep(level)
        assert client.call("GET", "/bridge/is_sleeping") == {"sleeping": True}
        given_back = torch.cuda.mem_get_info(0)[0] - free
        if given_back > 0.8 * CACHE_BYTES:
            break
        client.wake_up()  # another run took memory meanwhile
    assert given_back > 0.8 * CACHE_BYTES
    with pytest.raises(EngineCallError, match="wake_up"):
        client.collective_rpc("fingerprints")
    client.wake_up()
    if level == 2:  # the weights were dropped
        client.collective_rpc("load_checkpoint", str(gpu_folder), timeout=60)
    assert greedy(client) == expected
