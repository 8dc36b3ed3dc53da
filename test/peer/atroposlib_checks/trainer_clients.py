"""What atroposlib's example trainer asks of an inference server, against ours."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

import pytest
import requests
from example_trainer import run, trainers, vllm_manager

URL, ADAPTER = os.environ["GRPO_PEER_URL"], os.environ["GRPO_PEER_ADAPTER"]
PORT = urlsplit(URL).port


def log_probs(**options):
    """The form in which their server tests call ``/generate``."""
    response = requests.post(f"{URL}/generate", timeout=60, json={
        "prompt": "hello", "max_tokens": 6, "temperature": 0.0, "logprobs": 1, **options})
    assert response.status_code == 200
    body = response.json()
    assert body["prompt"] == "hello" and body["finish_reasons"] == ["length"]
    assert len(body["text"]) == 1 and len(body["prompt_token_ids"]) == 5
    assert [[int(next(iter(position[0]))) for position in body["logprobs"][0]]] == body["token_ids"]
    return [next(iter(position[0].values())) for position in body["logprobs"][0]]


@pytest.fixture(autouse=True)
def base_model():
    yield
    assert requests.post(f"{URL}/lora/unload", timeout=60).status_code == 200


def test_health():
    assert vllm_manager.check_vllm_health(PORT)
    assert vllm_manager.wait_for_vllm_ready(PORT, timeout=5)
    assert run.wait_for_vllm(PORT, timeout=5)
    assert requests.get(f"{URL}/health_generate", timeout=60).status_code == 200


def hotswap_of_the_manager():
    return vllm_manager.hotswap_lora_adapter("training_adapter", ADAPTER, PORT)


def hotswap_of_the_trainer():
    return trainers._hotswap_lora_adapter(PORT, ADAPTER)


@pytest.mark.parametrize("hotswap", [hotswap_of_the_manager, hotswap_of_the_trainer])
def test_a_hot_swapped_adapter_is_used_by_the_next_request(hotswap):
    before = log_probs()
    assert hotswap()
    status = requests.get(f"{URL}/lora/status", timeout=60).json()
    assert status["active_adapter_path"] == ADAPTER and status["lora_available"]
    assert max(abs(a - b) for a, b in zip(before, log_probs(), strict=True)) > 1e-2
    requests.post(f"{URL}/lora/unload", timeout=60)
    assert max(abs(a - b) for a, b in zip(before, log_probs(), strict=True)) < 1e-4


def test_pause_resume_and_facts_as_their_server_answers_them():
    def call(method, path):
        response = requests.request(method, f"{URL}{path}", timeout=60)
        assert response.status_code == 200
        return response.json()

    assert call("POST", "/bridge/pause")["status"] == "paused"
    assert call("GET", "/bridge/is_paused")["paused"]
    assert call("POST", "/bridge/resume")["status"] == "resumed"
    assert not call("GET", "/bridge/is_sleeping")["sleeping"]
    facts = call("GET", "/bridge/info")
    assert {"enabled", "shared_weights", "update_count", "last_update_time", "model_name",
            "device"} <= facts.keys()
    assert {"model", "dtype", "shared_weights_enabled"} <= call(
        "GET", "/bridge/state_dict_info").keys()
    assert {"engine_type", "vllm_version"} <= call("GET", "/bridge/debug").keys()
