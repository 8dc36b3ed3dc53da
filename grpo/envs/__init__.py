"""Environments: ``EnvBase`` with dense observations."""

from grpo.envs.prompts import Prompt, PromptStream, render, render_all
from grpo.envs.verifiable import VerifiableEnv

__all__ = ["Prompt", "PromptStream", "VerifiableEnv", "render", "render_all"]
