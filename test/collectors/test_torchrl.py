"""Our environment and policy under TorchRL's Ray collector."""

from __future__ import annotations

import sys

import pytest
import torch

from grpo import data
from grpo.collectors.sync import SyncCollector
from grpo.run import build, build_engine, build_objective

from ..training.runs import save_tiny
from .asynchronous import sync_config

ray = pytest.importorskip("ray")


def parts(values: dict, path: str):
    """Model, environment and policy of a run."""
    from grpo.config.schema import load_config

    config = load_config(values)
    task, tokenizer = build.build_task(config), build.load_tokenizer(path)
    prompts = build.build_prompts(config, task, tokenizer, path)
    actor = build_engine.build_actor(build_engine.Setup(
        config=config, path=path, tokenizer=tokenizer, device=torch.device("cpu"),
        dtype=torch.float32, max_model_len=prompts.max_model_len, folder=None),
        backend="transformers")
    return config, tokenizer, actor, build.build_env(config, task, prompts, tokenizer,
                                                     actor.policy)


@pytest.mark.slow
def test_batches_are_those_of_our_collector_and_new_weights_arrive(tmp_path, tokenizer):
    from grpo.collectors.torchrl import DenseRayLLMCollector
    from grpo.run.local_ray import start_ray

    path = str(save_tiny(tmp_path / "model", tokenizer, seed=0))
    values = sync_config(path).model_dump(mode="json")
    config, tokenizer, actor, env = parts(values, path)
    env.reset()  # as LLMCollector does when it is built
    ours = SyncCollector(env, actor.policy)
    # The actor cannot import this file.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    stop = start_ray(address="local", num_cpus=2, num_gpus=0, include_dashboard=False)
    try:
        collector = DenseRayLLMCollector(
            lambda: parts(values, path)[3],
            policy_factory=lambda: parts(values, path)[2].policy, dialog_turns_per_batch=16,
            total_dialog_turns=48, sync_iter=True, remote_config={"num_cpus": 1}, timeout=120)
        assert (collector.total_dialog_turns, collector.dialog_turns_per_batch) == (48, 16)
        loss = build_objective.build_loss(config, actor.model, tokenizer)
        learner = build_objective.build_learner(config, loss)
        advantage = build_objective.build_advantage(config)
        count = 0
        for count, batch in enumerate(collector, 1):  # noqa: B007
            expected = ours.collect()
            assert torch.equal(batch[data.TOKENS], expected[data.TOKENS])
            assert torch.allclose(batch[data.LOG_PROBS], expected[data.LOG_PROBS], atol=1e-5)
            assert batch[data.POLICY_VERSION].unique().tolist() == [collector.policy_version]
            learner.update(advantage(batch), iteration=count)
            actor.weights.publish()
            collector.update_policy_weights_(actor.model)
        assert count == 3 == collector.policy_version
        collector.shutdown()
    finally:
        stop()
