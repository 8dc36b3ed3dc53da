"""TorchRL's collectors, replay buffer and weight updates around GRPOLoss, on a CPU in seconds.

A random model learns to end its answers early: the reward is minus their length. ::

    python examples/torchrl_loop.py          # LLMCollector in this process
    python examples/torchrl_loop.py --ray    # RayLLMCollector, with its own copy of the model
"""

import argparse

import torch
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.objectives.llm import MCAdvantage

from grpo import GRPOLoss, data, total_loss
from grpo.collectors.torchrl import DenseRayLLMCollector
from grpo.data.torchrl import from_torchrl, to_torchrl
from grpo.envs.embedded import EmbeddedSpec, byte_tokenizer, small_qwen2
from grpo.envs.prompts import render_all
from grpo.envs.rewards import RewardScorer, get_reward
from grpo.envs.tasks import make_task
from grpo.envs.verifiable import VerifiableEnv
from grpo.policies.base import Sampling
from grpo.policies.transformers import TransformersPolicy
from grpo.weights.shared import SameModule
from grpo.weights.torchrl import PublishScheme

GROUPS, GROUP_SIZE, WIDTH, RESPONSE, PAD, EOS = 8, 8, 6, 8, 0, 1
ROWS = GROUPS * GROUP_SIZE


def make_model():
    return small_qwen2(EmbeddedSpec(hidden_size=64), len(byte_tokenizer()))


def make_env():
    task, tokenizer = make_task("arithmetic"), byte_tokenizer()
    prompts = render_all(task.split("train"), tokenizer, max_prompt_tokens=WIDTH, what="train")
    return VerifiableEnv(
        prompts, RewardScorer([(get_reward("negative_length"), 1.0)]), tokenizer,
        num_prompts=GROUPS, group_size=GROUP_SIZE, max_prompt_tokens=WIDTH,
        max_response_tokens=RESPONSE, eos_token_ids=(EOS,))


def make_policy(model=None, version=lambda: 0):
    return TransformersPolicy(
        model or make_model(), Sampling(max_tokens=RESPONSE, seed=0), pad_token_id=PAD,
        eos_token_ids=(EOS,), max_model_len=WIDTH + RESPONSE, version=version)


parser = argparse.ArgumentParser(description="GRPOLoss with TorchRL's collectors")
parser.add_argument("--ray", action="store_true", help="collect in a Ray actor")
parser.add_argument("--iterations", type=int, default=20)
args = parser.parse_args()

model = make_model()
loss, optimizer = GRPOLoss(model), torch.optim.AdamW(model.parameters(), lr=3e-3)
buffer = ReplayBuffer(storage=LazyStackStorage(ROWS), batch_size=ROWS)
buffer.append_transform(MCAdvantage(grpo_size=GROUP_SIZE, prompt_key="group_id"))
turns = {"dialog_turns_per_batch": ROWS, "total_dialog_turns": ROWS * args.iterations}
if args.ray:
    collector = DenseRayLLMCollector(make_env, policy_factory=make_policy, **turns)
else:  # trainer and policy hold one module; other ways to an engine fit the scheme, too
    weights = SameModule(model)
    collector = LLMCollector(make_env(), policy=make_policy(model, lambda: weights.version),
                             flatten_data=True, **turns)
    PublishScheme(weights).create_sender().register_collector(collector)
for batch in collector:
    buffer.extend(to_torchrl(batch.contiguous()))  # MCAdvantage compares each group
    batch = from_torchrl(buffer[:], pad_token_id=PAD)
    optimizer.zero_grad()
    total_loss(loss(batch)).backward()
    optimizer.step()
    collector.update_policy_weights_(*[model] * args.ray)
    print(f"version {int(batch[data.POLICY_VERSION][0])}: "
          f"reward {batch[data.REWARD].mean().item():.3f}", flush=True)
