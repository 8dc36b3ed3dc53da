"""The policy of this process as the inference server of environments."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

from torch import nn

from grpo.atropos.bridge import Bridge
from grpo.atropos.bridge_engine import EngineDriver
from grpo.atropos.bridge_env import AtroposBridgeEnv, RequestedSampling, StepDriver
from grpo.atropos.bridge_server import BridgeServer
from grpo.atropos.collector import Driver
from grpo.config.atropos import AtroposConfig
from grpo.policies.base import Policy
from grpo.system.lifeline import TOKEN_VARIABLE

_ROWS = 64  # requests that a policy without continuous batching answers at a time


def serve_policy(
    config: AtroposConfig, policy: Policy, cleanup: ExitStack, *, tokenizer: Any, backend: str,
    model: nn.Module, max_model_len: int,
) -> tuple[Bridge, Driver]:
    """Serve a policy at ``atropos.vllm_port`` until ``cleanup`` ends.

    Args:
        config: the run's.
        policy: in this process.
        cleanup: stops the server.
        tokenizer: of the model.
        backend: of the policy; with ``vllm`` requests join as they come and may use any of its
            sampling options.
        model: says how many tokens there are.
        max_model_len: prompt plus continuation, in tokens.

    Returns:
        The bridge, and what answers its calls.
    """
    bridge = Bridge(
        tokenizer=tokenizer, eos_token_ids=policy.eos_token_ids, max_model_len=max_model_len,
        vocab_size=model.get_input_embeddings().num_embeddings,
        model_names=(config.model.name,), temperature_only=backend != "vllm")
    cleanup.enter_context(BridgeServer(
        bridge, port=config.atropos.vllm_port, token=os.environ.get(TOKEN_VARIABLE) or None))
    if backend == "vllm":
        return bridge, EngineDriver(bridge, policy)
    env = AtroposBridgeEnv(
        bridge, rows=_ROWS, max_prompt_tokens=max_model_len - 1,
        max_response_tokens=policy.sampling.max_tokens, pad_token_id=policy.pad_token_id)
    cleanup.callback(env.close)
    return bridge, StepDriver(env, RequestedSampling(policy))
