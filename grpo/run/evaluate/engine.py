"""What generates in an evaluation: an engine here, or a server at an address."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from grpo.config.schema import Config, ConfigError
from grpo.config.unread import ON_A_CPU, VLLM_ALONE, refuse_unread
from grpo.policies.base import Policy, Sampling
from grpo.policies.openai_server import OpenAIPolicy
from grpo.policies.transformers import TransformersPolicy
from grpo.policies.vllm import VLLMPolicy
from grpo.run import build
from grpo.run.build_engine import Setup, check_transformers, load_trained, start_engine_of
from grpo.run.evaluate.options import EvaluateOptions
from grpo.run.evaluate.source import Source
from grpo.weights.adapters import require_peft

#: Completions at a time; and of a model whose weights are below so many bytes, on a CPU.
_ROWS, _MANY_ROWS, _SMALL = 256, 2048, 16 * 2**20


def open_policy(
    setup: Setup, source: Source, options: EvaluateOptions, at_end: ExitStack
) -> Policy:
    """What generates; ``at_end`` gets what ends it."""
    if options.url is not None:
        shared = setup.policy_options()
        del shared["ignore_eos"]
        policy = OpenAIPolicy(
            options.url, _sampling(setup.config), tokenizer=setup.tokenizer, send=options.send,
            model=options.served_model, api_key=os.environ.get("OPENAI_API_KEY"),
            timeout=options.timeout, connections=options.connections,
            max_model_len=setup.max_model_len, **shared)
    elif build.resolve_backend(setup.config) == "vllm":
        policy = _with_vllm(setup, source, options)
    else:
        policy = _with_transformers(setup, source)
    at_end.callback(policy.close)
    return policy


def check(config: Config, options: EvaluateOptions, device: torch.device) -> None:
    """Refuse what the engine would not read, once it is chosen.

    Raises:
        ConfigError: naming key, value and fix.
    """
    if options.url is None and build.resolve_backend(config) == "transformers":
        check_transformers(config, build.resolve_dtype(config, device))
    elif options.url is None:
        refuse_unread(config, VLLM_ALONE)
    if device.type == "cpu":
        refuse_unread(config, ON_A_CPU)


def quick(
    config: Config, options: EvaluateOptions, device: torch.device, path: str
) -> tuple[Config, EvaluateOptions]:
    """Engine and batch of what was left open: a small model on a CPU, such as the embedded one,
    is done with all its problems before vLLM has started.

    Examples of what decides otherwise are a key that only vLLM reads or heeds, such as
    ``train_model.fp32_head``, and ``backend=vllm``.
    """
    weights = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    small = options.url is None and device.type == "cpu" and 0 < weights < _SMALL
    if small and config.inference_model.backend == "auto":
        changed = config.changed(inference_model={"backend": "transformers"})
        with suppress(ConfigError):
            check_transformers(changed, build.resolve_dtype(changed, device))
            config = changed
    at_once = _MANY_ROWS if small and build.resolve_backend(config) == "transformers" else _ROWS
    return config, options.model_copy(update={"batch_size": options.batch_size or at_once})


def _sampling(config: Config) -> Sampling:
    return Sampling(max_tokens=config.max_tokens)


def _with_vllm(setup: Setup, source: Source, options: EvaluateOptions) -> Policy:
    request = None
    if source.adapter is not None:
        from vllm.lora.request import LoRARequest

        rank = json.loads((source.adapter / "adapter_config.json").read_text())["r"]
        config = setup.config.changed(train_model={"lora": {"enabled": True, "r": rank}})
        setup = Setup(**{**vars(setup), "config": config})
        request = LoRARequest("evaluated", 1, str(source.adapter.absolute()))
    llm = start_engine_of(setup, max_num_seqs=options.batch_size, alone=True)
    return VLLMPolicy(llm, _sampling(setup.config), lora_request=request,
                      **setup.policy_options())


def _with_transformers(setup: Setup, source: Source) -> Policy:
    model: Any = load_trained(setup, setup.device)
    if source.adapter is not None:
        require_peft()
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(source.adapter)).merge_and_unload()
    return TransformersPolicy(model.eval().requires_grad_(False), _sampling(setup.config),
                              max_model_len=setup.max_model_len, **setup.policy_options())
