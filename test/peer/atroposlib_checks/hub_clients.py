"""The parts of atroposlib's environments and example trainer that call the API, against our hub."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import requests
from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from example_trainer import api, data

URL = os.environ["GRPO_PEER_URL"]
GROUP = {"tokens": [[5, 6, 7], [5, 8, 9]], "masks": [[-100, 6, 7], [-100, 8, 9]],
         "inference_logprobs": [[1.0, -0.5, -0.25], [1.0, -1.5, -2.0]],
         "generation_params": {"temperature": 0.5}}


class Env(BaseEnv):
    async def get_next_item(self):
        return None

    async def evaluate(self):
        pass


@pytest.fixture
def env():
    requests.get(f"{URL}/reset_data", timeout=10)
    config = BaseEnvConfig(tokenizer_name=os.environ["GRPO_PEER_MODEL"], group_size=2,
                           use_wandb=False, rollout_server_url=URL, wandb_name="peer",
                           max_token_length=64, total_steps=10, include_messages=True)
    env = Env(config, [APIServerConfig(base_url=URL + "/v1", model_name="x", api_key="x",
                                       health_check=False)], testing=True)
    return env


@pytest.fixture
def trainer():
    return SimpleNamespace(
        atropos_url=URL, wandb_group=None, wandb_project=None, batch_size=2,
        gradient_accumulation_steps=2, seq_len=128, save_path="x", checkpoint_interval=3,
        training_steps=7)


async def test_an_environment_and_the_example_trainer_meet(env, trainer):
    assert api.check_atropos_api(URL, timeout=5)
    assert (await env._register_env())["status"] == "wait for trainer to start"
    api.register_trainer(trainer)
    assert api.get_batch(URL) == {"batch": None}
    await env.setup_wandb()
    await env.register_env()
    await env.get_server_info()
    assert (env.env_id, env.wandb_prepend, env.checkpoint_interval) == (0, "peer_0", 3)
    assert (env.config.batch_size, env.max_token_len) == (4, 128)
    for score in (1.0, 2.0):
        await env.handle_send_to_api({**GROUP, "scores": [0.0, score]})
    await env.get_status()
    assert env.status_dict["queue_size"] == env.status_dict["self_queue_size"] == 2
    assert env.status_dict["env_weight"] == 1.0
    batches, _ = data.get_data(batch_size=2, seq_len=128, atropos_url=URL)
    tokens, labels, advantages, temperatures, log_probs = batches[0]
    assert len(batches) == 1 and len(tokens) == 2
    assert tokens[0][:, :3].tolist() == [[5, 6, 7], [5, 8, 9]]
    assert labels[0][:, :2].tolist() == [[6, 7], [8, 9]]
    assert advantages[0].flatten().tolist() == [-1.0, 1.0]
    assert temperatures[0].flatten().tolist() == [0.5, 0.5]
    assert log_probs[0][:, :2].tolist() == [[-0.5, -0.25], [-1.5, -2.0]]
    await env.get_status()
    assert env.status_dict["current_step"] == 1 and env.status_dict["queue_size"] == 0


async def test_a_list_of_groups_of_which_one_is_broken(env, trainer):
    api.register_trainer(trainer)
    api.get_batch(URL)
    await env.register_env()
    await env.get_server_info()
    await env.handle_send_to_api([{**GROUP, "scores": [0.0, score]}
                                  for score in (1.0, float("nan"), 3.0)])
    batch = api.get_batch(URL)["batch"]
    assert [group["scores"] for group in batch] == [[0.0, 1.0], [0.0, 3.0]]
    assert batch[0]["env_id"] == 0 and batch[0]["messages"][0][0]["role"] == "user"
