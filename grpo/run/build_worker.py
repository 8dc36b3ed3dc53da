"""From the configuration to the parts of a worker of an asynchronous run, in its own process."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from grpo.collectors.group_scoring import Environments
from grpo.collectors.rollout_worker import WorkerParts, WorkerSetup
from grpo.config.schema import ConfigError
from grpo.config.sent import load_sent
from grpo.envs.prompts import Prompt, give_template
from grpo.envs.tasks import task_class
from grpo.envs.verifiable import VerifiableEnv
from grpo.policies.base import Policy
from grpo.policies.handle import InProcessEngine
from grpo.policies.samplers import TransformersSampler, VLLMSampler
from grpo.policies.scoring import ReferenceScorer
from grpo.policies.transformers import TransformersPolicy
from grpo.policies.vllm import VLLMPolicy
from grpo.run.build import build_dialog, load_tokenizer, quiet_libraries
from grpo.run.build_engine import Setup, start_engine_of
from grpo.run.build_model import load_model
from grpo.run.build_objective import scoring_budget
from grpo.run.build_rewards import reward_function
from grpo.run.placement import KEEPS_DEVICES
from grpo.training.parallel import ShardedReference
from grpo.training.ranks import Ranks
from grpo.weights.adapters import make_lora
from grpo.weights.lora_slot import lora_request

# Groups that are scored at a time, at least, where rewards run side by side; at most in one call
# where they take no time.
_SCORING_THREADS, _SCORED_TOGETHER = 4, 32
_SWITCH_SECONDS = 1e-3


def build_worker(setup: WorkerSetup, number: int, prompts: list[Prompt]) -> WorkerParts:
    """What the rollout worker of a number works with."""
    # A call that brings weights waits for the engine's thread to give the interpreter away.
    sys.setswitchinterval(_SWITCH_SECONDS)
    quiet_libraries()
    config = load_sent(setup.config)
    kind = config.train_model.quantization
    if kind is not None and not Path(setup.path).is_dir():
        raise ConfigError(f"train_model.quantization={kind}: workers start from the values that "
                          f"the trainer wrote to {setup.path}, which {socket.gethostname()} does "
                          "not see; set hydra.run.dir to a folder that all hosts share, or the "
                          "key to null")
    shared = Setup(config=config, path=setup.path, tokenizer=load_tokenizer(setup.path),
                   device=torch.device(setup.device), dtype=getattr(torch, setup.dtype),
                   max_model_len=setup.max_model_len, folder=Path())
    policy, engine, sampler = _start_engine(setup, shared, number)
    if config.env.is_atropos:  # whose environments bring problems and rewards
        return WorkerParts(policy, engine, sampler, None, groups_a_call=1, group_rows=1)
    # The problems have come with the prompts. The engine's thread draws random numbers, too, so
    # nobody can tell who has drawn.
    give_template(shared.tokenizer, config.env.chat_template, [p.problem for p in prompts])
    score = reward_function(config, task_class(config.env.dataset), try_first=False)
    score.prepare()
    dialog = build_dialog(config, score, shared.tokenizer, policy)

    def make(groups: int) -> VerifiableEnv:
        return VerifiableEnv(
            prompts, score, shared.tokenizer, num_prompts=groups, group_size=config.env.repeats,
            max_prompt_tokens=setup.prompt_width, max_response_tokens=config.max_tokens,
            eos_token_ids=policy.eos_token_ids, seed=config.train.seed, dialog=dialog)

    workers = config.env.reward_workers
    if score.quick:
        environments = Environments(make, together=_SCORED_TOGETHER)
    else:  # a group waits in its thread while its calls run
        environments = Environments(
            make, threads=1 if workers == 1 else _SCORING_THREADS + workers // config.env.repeats)
    return WorkerParts(policy, engine, sampler, environments,
                       groups_a_call=config.env.num_envs, group_rows=config.env.repeats)


def build_reference(
    config: dict[str, Any], path: str, device: str, dtype: str, join: dict[str, Any] | None = None
) -> ReferenceScorer | ShardedReference:
    """The frozen reference of an :class:`~grpo.config.asynchronous.AsyncConfig` in plain values; or
    a part of it, in a process that others ``join`` (:meth:`grpo.training.ranks.Ranks.join`)."""
    quiet_libraries()
    checked = load_sent(config)
    options = {"temperature": checked.inference_model.temperature,
               "max_tokens": scoring_budget(checked), "fp32_head": checked.train_model.fp32_head}
    # On its way to being sharded a model needs none of the GPU's own memory.
    home = torch.device(device if join is None else "cpu")
    model = load_model(path, checked, device=home, dtype=getattr(torch, dtype))
    if join is None:
        return ReferenceScorer(model, **options)
    return ShardedReference(model, Ranks.join(device, **join, device_index=0), **options)


def _start_engine(
    setup: WorkerSetup, shared: Setup, number: int
) -> tuple[Policy, InProcessEngine | None, Any]:
    """Policy, handle of its engine, and what its driver drives."""
    config, lora = shared.config, shared.config.train_model.lora
    if setup.backend == "transformers":
        model = load_model(setup.path, config, device=shared.device, dtype=shared.dtype)
        if lora.enabled:
            make_lora(model, **lora.options())
        model.eval()
        policy = TransformersPolicy(model.requires_grad_(False), shared.sampling,
                                    max_model_len=setup.max_model_len, **shared.policy_options())
        return policy, None, TransformersSampler(policy)
    from grpo.policies.lifecycle import end_compile_workers

    # Ray has read it. vLLM keeps compiled layers and kernels by all such variables, and without it
    # finds those of `grpo.py` on the same host.
    os.environ.pop(KEEPS_DEVICES, None)
    parallel = {} if setup.tensor_parallel_size == 1 else {
        "separate_process": True, "tensor_parallel_size": setup.tensor_parallel_size}
    llm = start_engine_of(shared, max_num_seqs=setup.rows, seed=config.train.seed + number,
                          alone=setup.alone, model_path=setup.path, **parallel)
    end_compile_workers()
    policy = VLLMPolicy(llm, shared.sampling, **shared.policy_options(),
                        lora_request=lora_request() if lora.enabled else None)
    # Seeds make a run repeatable where its arithmetic is; on a GPU they only cost time.
    return policy, InProcessEngine(llm), VLLMSampler(policy, seeded=setup.device == "cpu")
