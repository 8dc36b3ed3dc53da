"""From the configuration to the parts of a run, one function a part."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from grpo.build_objective import describe_loss
from grpo.config import Config, ConfigError
from grpo.embedded import EmbeddedSpec, embedded_model
from grpo.engines.inprocess import start_engine, vllm_available
from grpo.envs import Prompt, VerifiableEnv, render_all
from grpo.policies import Policy, Sampling, TransformersPolicy, VLLMPolicy
from grpo.rewards import compute_rewards, get_reward
from grpo.tasks import Task, make_task
from grpo.weights import SameModule, SingleCopy, WeightSync


@dataclass(frozen=True)
class Prompts:
    """Rendered prompts of both splits and the widths of a batch.

    Attributes:
        train: prompts to learn from.
        test: held-out prompts.
        width: ``P``, tokens of the longest prompt of both splits.
        max_model_len: prompt plus response, in tokens.
    """

    train: list[Prompt]
    test: list[Prompt]
    width: int
    max_model_len: int


@dataclass(frozen=True)
class Actor:
    """The model that is trained, what generates with it, and how its weights get there."""

    model: nn.Module
    policy: Policy
    weights: WeightSync


def quiet_libraries() -> None:
    """Keep progress bars and repeated warnings of libraries out of the run's own display."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")


def resolve_device(config: Config) -> torch.device:
    """``auto``: the GPU if there is one."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but PyTorch sees no GPU; set device=cpu, or install a "
                          "CUDA build of PyTorch and check nvidia-smi")
    use_cuda = config.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")


def resolve_dtype(config: Config, device: torch.device) -> torch.dtype:
    """``auto``: bfloat16 on a GPU, float32 on a CPU."""
    if config.train_model.torch_dtype != "auto":
        return getattr(torch, config.train_model.torch_dtype)
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def resolve_backend(config: Config) -> str:
    """``auto``: vLLM where it is installed."""
    if config.inference_model.backend != "auto":
        return config.inference_model.backend
    return "vllm" if vllm_available() else "transformers"


def check(config: Config, task: Task, *, device: torch.device, backend: str) -> None:
    """Refuse what cannot work before anything slow is started.

    Raises:
        ValueError: naming the key and the fix.
    """
    reward_function(config, task)
    for key, name in (("ref_model.name", config.ref_model.name),
                      ("distill.teacher", config.distill.teacher)):
        if name is not None:
            model_path(name, key=key)
    if backend == "transformers":
        _refuse_engine_options(config)
    if config.train_model.compile and (device.type == "cpu" or backend == "transformers"):
        raise ConfigError("train_model.compile=true is for GPUs with vLLM: on a CPU it costs more "
                          "than it saves, and generation with Transformers changes its shapes at "
                          "every token; set it to false")


def build_task(config: Config) -> Task:
    """The task of ``env.dataset`` with the options of ``env.task``."""
    data_path = {} if config.env.data_path is None else {"data_path": config.env.data_path}
    return make_task(config.env.dataset, **data_path, **config.env.task)


def model_folder(config: Config, task: Task) -> str:
    """Folder or hub id of the model a run starts from; makes the embedded one if asked for."""
    if config.model.name != "embedded":
        return model_path(config.model.name, key="model.name")
    given = {"steps": config.model.warm_start_steps, "noise": config.model.warm_start_noise}
    spec = EmbeddedSpec(**{k: v for k, v in given.items() if v is not None},
                        seed=config.train.seed)
    source = task if task.name == "arithmetic" else make_task("arithmetic")
    return str(embedded_model(source, spec))


def model_path(name: str, *, key: str) -> str:
    """The value of a key that names a model: a folder, which must have one, or a hub id."""
    path = Path(name)
    looks_local = path.is_absolute() or name.startswith((".", "~"))
    if looks_local and not (path.expanduser() / "config.json").exists():
        embedded = ", or 'embedded'" if key == "model.name" else ""
        raise ConfigError(f"{key}={name}: there is no config.json in that folder; give a folder "
                          f"written by save_pretrained, or a hub id{embedded}")
    return str(path.expanduser()) if looks_local else name


def load_tokenizer(path: str) -> Any:
    """The model's tokenizer, with a padding token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(path: str, config: Config, *, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A Hugging Face causal language model in ``dtype`` on ``device``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        os.path.expanduser(path), dtype=dtype,
        attn_implementation=config.train_model.attn_implementation)
    return model.to(device)


def eos_token_ids(path: str, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a response: the tokenizer's, and those of the generation configuration."""
    from transformers import AutoConfig, GenerationConfig

    ids = {tokenizer.eos_token_id}
    try:
        source = GenerationConfig.from_pretrained(path)
    except OSError:  # models without that file
        source = AutoConfig.from_pretrained(path)
    more = source.eos_token_id
    ids |= set(more) if isinstance(more, list) else {more}
    return tuple(sorted(i for i in ids if i is not None))


def build_prompts(config: Config, task: Task, tokenizer: Any, model_path: str) -> Prompts:
    """Render both splits; prompts that leave no room for a response are skipped and counted."""
    from transformers import AutoConfig

    inference = config.inference_model
    context = getattr(AutoConfig.from_pretrained(model_path), "max_position_embeddings", None)
    limit = inference.max_model_len or context
    if limit is None:
        raise ConfigError("the model does not say how long its context is; set "
                          "inference_model.max_model_len")
    if context is not None and limit > context:
        raise ConfigError(f"inference_model.max_model_len={limit} is more than the model's "
                          f"context of {context} tokens")
    if config.max_tokens >= limit:
        raise ConfigError(f"inference_model.max_tokens={config.max_tokens} leaves no room for a "
                          f"prompt in a context of {limit} tokens")
    room = limit - config.max_tokens
    room = min(room, config.env.max_prompt_tokens or room)
    train, test = (render_all(task.split(split), tokenizer, max_prompt_tokens=room,
                              what=f"{task.name} {split}") for split in ("train", "test"))
    width = max(len(prompt.tokens) for prompt in train + test)
    return Prompts(train, test, width, inference.max_model_len or width + config.max_tokens)


def build_actor(
    config: Config, path: str, tokenizer: Any, prompts: Prompts, *,
    device: torch.device, dtype: torch.dtype, backend: str,
) -> Actor:
    """Model, policy and the one copy of the weights between them."""
    inference = config.inference_model
    sampling = Sampling(max_tokens=config.max_tokens, temperature=inference.temperature,
                        seed=config.train.seed)
    common = {"pad_token_id": tokenizer.pad_token_id, "ignore_eos": inference.ignore_eos,
              "eos_token_ids": eos_token_ids(path, tokenizer)}
    if backend == "vllm":
        engine = _build_engine(config, path, prompts, device=device, dtype=dtype)
        model = load_model(path, config, device=torch.device("cpu"), dtype=dtype)
        weights: WeightSync = SingleCopy(model, engine)
        policy: Policy = VLLMPolicy(engine, sampling, version=lambda: weights.version, **common)
    else:
        model = load_model(path, config, device=device, dtype=dtype)
        weights = SameModule(model)
        policy = TransformersPolicy(model, sampling, max_model_len=prompts.max_model_len,
                                    version=lambda: weights.version, **common)
    prepare_model(model, config)
    return Actor(model, policy, weights)


def _build_engine(
    config: Config, path: str, prompts: Prompts, *, device: torch.device, dtype: torch.dtype
) -> Any:
    inference = config.inference_model
    rows = config.env.num_envs * config.env.repeats
    return start_engine(
        path, device=device, dtype=dtype, max_model_len=prompts.max_model_len,
        max_num_seqs=inference.max_num_seqs or min(rows, 1024), seed=config.train.seed,
        enforce_eager=inference.enforce_eager,
        gpu_memory_utilization=inference.gpu_memory_utilization,
        kv_cache_memory_bytes=inference.kv_cache_memory_bytes)


def _refuse_engine_options(config: Config) -> None:
    for key in ("max_num_seqs", "gpu_memory_utilization", "kv_cache_memory_bytes"):
        if (value := getattr(config.inference_model, key)) is not None:
            raise ConfigError(f"inference_model.{key}={value} is not read by "
                              "inference_model.backend=transformers; remove it")
    if config.inference_model.enforce_eager:
        raise ConfigError("inference_model.enforce_eager=true is not read by "
                          "inference_model.backend=transformers; remove it")


def prepare_model(model: nn.Module, config: Config) -> None:
    """Training mode, gradient checkpointing and compiled layers, as configured."""
    model.train()
    model.requires_grad_(True)
    _switch_dropout_off(model)
    if config.train_model.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.train_model.compile:
        layers = getattr(model.base_model, "layers", None)
        if layers is None:
            raise ConfigError(f"train_model.compile=true: {type(model).__name__} has no list of "
                              "decoder layers to compile; set it to false")
        for layer in layers:
            layer.forward = torch.compile(layer.forward)


def _switch_dropout_off(model: nn.Module) -> None:
    """The engine samples without dropout, so with it on-policy ratios would not be 1."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


def build_env(
    config: Config, task: Task, prompts: Prompts, tokenizer: Any, policy: Policy
) -> VerifiableEnv:
    """The training environment: ``env.num_envs`` groups of ``env.repeats`` completions."""
    return VerifiableEnv(
        prompts.train, reward_function(config, task), tokenizer, num_prompts=config.env.num_envs,
        group_size=config.env.repeats, seed=config.train.seed, **_widths(prompts, policy))


def build_eval_env(
    config: Config, task: Task, prompts: Prompts, tokenizer: Any, policy: Policy
) -> VerifiableEnv:
    """Every held-out problem once, in order."""
    rows = min(len(prompts.test), config.env.num_envs * config.env.repeats)
    return VerifiableEnv(
        prompts.test, reward_function(config, task), tokenizer, num_prompts=rows, group_size=1,
        shuffle=False, **_widths(prompts, policy))


def _widths(prompts: Prompts, policy: Policy) -> dict[str, Any]:
    return {"max_prompt_tokens": prompts.width, "max_response_tokens": policy.sampling.max_tokens,
            "eos_token_ids": policy.eos_token_ids}


def reward_function(config: Config, task: Task) -> Callable:
    """Texts and problems to rewards: ``env.reward``, or the task's own."""
    chosen = config.env.reward or task.default_reward
    weighted = chosen if isinstance(chosen, dict) else {chosen: 1.0}
    functions = [(get_reward(name), weight) for name, weight in weighted.items()]
    return functools.partial(compute_rewards, functions, timeout=config.env.reward_timeout)


def describe(
    config: Config, actor: Actor, task: Task, prompts: Prompts, *,
    device: torch.device, dtype: torch.dtype, backend: str, run_dir: Path,
) -> dict[str, str]:
    """What was resolved, for the start-up banner."""
    count = sum(param.numel() for param in actor.model.parameters())
    model = f"{config.model.name}, {count / 1e6:,.1f} M parameters, {str(dtype)[6:]}"
    if config.model.name == "embedded":
        model += (", made here and warm-started on additions of which a share is deliberately "
                  "wrong: there is something to learn")
    graphs = device.type == "cuda" and not config.inference_model.enforce_eager
    engine = f"{backend}, in process" + (", CUDA graphs" if backend == "vllm" and graphs else "")
    sharing = "one copy, shared by trainer and engine; a canary checks it after every update"
    steps, warmup = config.optimizer_steps, config.optimizer.warmup_steps
    too_short = f" (all of them in the warm-up of {warmup})" if warmup >= steps else ""
    return {
        "model": model,
        "task": f"{task.name}: {len(prompts.train):,} training and {len(prompts.test):,} held-out "
                "problems",
        "batch": f"{config.turns_per_batch // config.env.repeats} prompts x {config.env.repeats} "
                 f"completions of at most {config.max_tokens} tokens",
        "run": f"{config.iterations} iterations, {steps} optimizer steps{too_short}, seed "
               f"{config.train.seed}",
        "loss": describe_loss(config),
        "engine": engine,
        "weights": sharing,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "folder": str(run_dir),
    }
