"""TorchRL's collectors publish our weights."""

from __future__ import annotations

import pickle

import pytest
import torch
from torchrl.collectors import Collector
from torchrl.collectors.llm import LLMCollector
from torchrl.weight_update import WeightSyncScheme

from grpo import data
from grpo.envs.rewards import RewardResult, RewardScorer
from grpo.envs.verifiable import VerifiableEnv
from grpo.policies.base import Sampling
from grpo.policies.transformers import TransformersPolicy
from grpo.weights.shared import SameModule
from grpo.weights.torchrl import PublishScheme
from grpo.weights.transfer import WeightTransfer

from .receivers import ThreadedEngine, Worker, assert_holds, vllm_like

EOS, PAD, WIDTH, RESPONSE = 1, 0, 6, 5


def by_length(completion: str, problem) -> RewardResult:
    return RewardResult(float(len(completion)), True)


@pytest.fixture
def env(prompts, tokenizer):
    return VerifiableEnv(prompts, RewardScorer([(by_length, 1.0)], workers=1), tokenizer,
                         num_prompts=3, group_size=2, max_prompt_tokens=WIDTH,
                         max_response_tokens=RESPONSE, eos_token_ids=(EOS,))


@pytest.fixture
def trainer(make_model, tokenizer):
    """A trainer's model, an engine's worker, and the way from one to the other."""
    model = make_model(dtype=torch.float32, vocab_size=len(tokenizer), seed=5)
    engine = ThreadedEngine([Worker(vllm_like(model))])
    weights = WeightTransfer(model, engine, backend="gloo", timeout=30.0)
    yield model, engine, weights
    weights.close()


def policy_of(model, weights) -> TransformersPolicy:
    return TransformersPolicy(model, Sampling(max_tokens=RESPONSE, seed=3), pad_token_id=PAD,
                              eos_token_ids=(EOS,), max_model_len=WIDTH + RESPONSE,
                              version=lambda: weights.version)


def step(model) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1)


def test_an_llm_collector_publishes_and_its_rows_carry_the_version(env, trainer):
    model, engine, weights = trainer
    collector = LLMCollector(env, policy=policy_of(model, weights), dialog_turns_per_batch=6,
                             total_dialog_turns=18, flatten_data=True)
    scheme = PublishScheme(weights)
    assert isinstance(scheme, WeightSyncScheme)
    scheme.create_sender().register_collector(collector)
    versions = []
    for batch in collector:
        versions.append(batch[data.POLICY_VERSION].unique().tolist())
        step(model)
        assert weights.differing()
        collector.update_policy_weights_()
        assert weights.differing() == []
        assert_holds(engine, model)
    assert versions == [[0], [1], [2]]
    assert engine.version == weights.version == 3


def test_a_sender_publishes_and_counts_in_its_collectors(env, trainer):
    """As TorchRL's recipe does; the collector's own tracker counts along."""
    model, engine, weights = trainer
    tracker = pytest.importorskip("torchrl.envs.llm.transforms.policy_version").PolicyVersion("int")
    collector = LLMCollector(env, policy=policy_of(model, weights), dialog_turns_per_batch=6,
                             total_dialog_turns=6, track_policy_version=tracker)
    sender = PublishScheme(weights).create_sender()
    sender.register_model(model)
    sender.register_collector(collector)
    sender.init_all_workers_group({})
    before = collector.policy_version
    sender.update_weights()
    sender.update_weights(model)
    assert collector.policy_version - before == weights.version == engine.version == 2
    collector.update_policy_weights_()
    assert collector.policy_version - before == weights.version == 3
    assert_holds(engine, model)
    sender.shutdown()
    sender.update_weights()
    assert (collector.policy_version - before, weights.version) == (3, 4)


def test_a_plain_collector_takes_the_scheme_in_its_constructor(env, trainer):
    model, engine, weights = trainer
    collector = Collector(env, policy_of(model, weights), frames_per_batch=6, total_frames=6,
                          trust_policy=True, use_buffers=False,
                          weight_sync_schemes={"policy": PublishScheme(weights)})
    collector.update_policy_weights_()
    assert weights.version == 1
    assert_holds(engine, model)
    collector.shutdown()


def test_weights_of_another_model_are_refused(trainer, byte_model):
    model, engine, weights = trainer
    scheme = PublishScheme(weights)
    sender = scheme.create_sender()
    with pytest.raises(ValueError, match="publishes the trainer's own model"):
        sender.update_weights(byte_model)
    with pytest.raises(ValueError, match="not the one whose weights are published"):
        sender.register_model(byte_model)
    with pytest.raises(ValueError, match="worker_ids=0"):
        scheme.send(worker_ids=0)
    assert weights.version == 0
    assert "transfer_receive" not in engine.log


def test_a_workers_copy_of_the_scheme_receives_nothing_and_cannot_publish(byte_model):
    weights = SameModule(byte_model)
    scheme = PublishScheme(weights)
    scheme.create_sender()
    copy = pickle.loads(pickle.dumps(scheme))
    assert copy.publisher is None
    copy.init_on_receiver(model_id="policy")
    copy.connect(worker_idx=0)
    assert copy.receive() is None
    with pytest.raises(RuntimeError, match="published by the trainer's process"):
        copy.send()
    assert weights.version == 0
