"""The reward of a judge beside this library's own OpenAI server, with a real vLLM."""

from __future__ import annotations

import pytest

from grpo import data
from grpo.envs.rewards import RewardScorer, get_reward
from grpo.envs.rewards.registry import with_options
from grpo.envs.tasks import Problem


@pytest.mark.slow
@pytest.mark.vllm
def test_a_judge_is_asked_over_the_servers_chat_route(real_server, folders, monkeypatch):
    """Its weights are random: it answers, but gives no score, and the row says so."""
    monkeypatch.setenv("JUDGE_KEY", real_server.token or "none")
    fn = with_options(get_reward("judge"), {
        "url": f"{real_server.url}/v1", "model": folders[0], "max_tokens": 8,
        "key_variable": "JUDGE_KEY"})
    problem = Problem(prompt="6*7=", answer="42", id="p0")
    batch = RewardScorer([(fn, 1.0)])(["42", "43"], [problem] * 2)
    assert batch.fault.tolist() == [data.FAULT_FAILED] * 2
    assert all("the judge's last line is" in message for message in batch.messages)
    unknown = with_options(get_reward("judge"), {
        "url": f"{real_server.url}/v1", "model": "no such", "key_variable": "JUDGE_KEY"})
    (message,) = RewardScorer([(unknown, 1.0)])(["42"], [problem]).messages
    assert "in 1 tries" in message and "no such" in message
