"""Policies: prompt tokens in, response tokens with log-probs out."""

from grpo.policies.base import Completions, Policy, Sampling
from grpo.policies.server import ServerPolicy
from grpo.policies.transformers import TransformersPolicy
from grpo.policies.vllm import VLLMPolicy

__all__ = ["Completions", "Policy", "Sampling", "ServerPolicy", "TransformersPolicy",
           "VLLMPolicy"]
