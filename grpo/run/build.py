"""From the configuration to the parts of a run, one function a part."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from grpo.config.schema import Config, ConfigError
from grpo.config.unread import ON_A_CPU, REWARDS_HERE, refuse_unread
from grpo.envs.dialog import Dialog, environment, named_step
from grpo.envs.embedded import EmbeddedSpec, embedded_model
from grpo.envs.prompts import Prompt, framed, give_template, render_all
from grpo.envs.rewards import RewardScorer
from grpo.envs.tasks import Task, make_task, options_of, task_names
from grpo.envs.verifiable import VerifiableEnv
from grpo.policies.base import Policy
from grpo.policies.client import EngineClient
from grpo.policies.inprocess import vllm_available
from grpo.policies.model_source import find_model, first_line
from grpo.run.build_engine import Actor, check_transformers, describe_engine
from grpo.run.build_objective import describe_loss
from grpo.run.build_rewards import reward_function
from grpo.training.checkpoint import Checkpoint
from grpo.weights.adapters import require_peft
from grpo.weights.quantised import quantised_layers, require_torchao

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompts:
    """Rendered prompts of both splits and the widths of a batch, in tokens."""

    train: list[Prompt]
    test: list[Prompt]
    width: int  # of the longest prompt of both splits
    max_model_len: int  # prompt plus response


def quiet_libraries() -> None:
    """Keep progress bars and repeated warnings of libraries out of the run's own display."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")


def resolve_device(config: Config) -> torch.device:
    """``auto``: the GPU if there is one."""
    if uses_cuda(config):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def uses_cuda(config: Config) -> bool:
    """Whether the run is on GPUs; selects none of them yet."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but PyTorch sees no GPU; set device=cpu, or install a "
                          "CUDA build of PyTorch and check nvidia-smi")
    return config.device != "cpu" and torch.cuda.is_available()


def resolve_dtype(config: Config, device: torch.device) -> torch.dtype:
    """``auto``: bfloat16 on a GPU, float32 on a CPU."""
    if config.train_model.torch_dtype != "auto":
        return getattr(torch, config.train_model.torch_dtype)
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def resolve_backend(config: Config) -> str:
    """``auto``: vLLM where it is installed, or serves at ``inference_model.url``."""
    inference = config.inference_model
    if inference.backend != "auto":
        return inference.backend
    return "vllm" if vllm_available() or inference.url else "transformers"


def check(config: Config, task: Task, *, device: torch.device, backend: str) -> None:
    """Refuse what cannot work before anything slow is started.

    Raises:
        ValueError: naming the key and the fix.
    """
    if not reward_function(config, task).calls_apart:
        refuse_unread(config, REWARDS_HERE)
    if config.env.step is not None:
        step = named_step(config.env.step)
        if step is environment and task.split("train")[0].partner is None:
            raise ConfigError(f"env.step=environment: the problems of {task.name} have nobody who "
                              "answers the model; use env=verifiers, or another step")
    for key, name in (("ref_model.name", config.ref_model.name),
                      ("distill.teacher", config.distill.teacher)):
        if name is not None:
            find_model(name, key=key)
    if backend == "transformers":
        check_transformers(config, resolve_dtype(config, device))
    if device.type == "cpu":
        refuse_unread(config, ON_A_CPU)
        if config.optimizer.name == "adamw_cpu":
            raise ConfigError("optimizer.name=adamw_cpu keeps its state off the GPU, and the run "
                              "is on the CPU already; use adamw")
    if config.inference_model.url is not None:
        EngineClient(config.inference_model.url)  # checks the address
    if config.train_model.lora.enabled:
        require_peft()
    if config.train_model.quantization is not None:
        require_torchao()
    if config.train_model.compile and (device.type == "cpu" or backend == "transformers"):
        raise ConfigError("train_model.compile=true is for GPUs with vLLM: on a CPU it costs more "
                          "than it saves, and generation with Transformers changes its shapes at "
                          "every token; set it to false")


#: Options of tasks that are keys of section ``env``.
_TASK_KEYS = ("name", "id", "data_path", "path", "dataset_mixture", "prompt_column",
              "answer_column")


def build_task(config: Config) -> Task:
    """The task of ``env.dataset`` with the options of ``env.task``.

    Raises:
        ConfigError: if an option is given twice, or the task does not have it.
        ValueError: for an option that the task refuses.
    """
    name = config.env.dataset
    options = {key: value for key in _TASK_KEYS
               if (value := getattr(config.env, key)) is not None}
    for key in [key for key in options if key not in options_of(name)]:
        others = [other for other in task_names() if key in options_of(other)]
        raise ConfigError(f"env.{key}={options[key]!r}: the task {name!r} has no option {key!r}; "
                          f"remove it, or choose one that has: env={' or env='.join(others)}")
    for key in options.keys() & config.env.task.keys():
        raise ConfigError(f"env.{key}={options[key]!r} and env.task.{key}="
                          f"{config.env.task[key]!r} are the same option; leave one out")
    options |= config.env.task
    first = config.env.system_prompt
    if first is not None and "system_prompt" in options_of(name):
        options["system_prompt"] = first or None
    try:
        return make_task(name, **options)
    except ValueError as error:  # which names the option's own key
        if first is None or (own := "env.task.system_prompt=") not in str(error):
            raise
        raise ConfigError(str(error).replace(own, "env.system_prompt=")) from error


def model_folder(config: Config, task: Task) -> str:
    """Folder or hub id of the model a run starts from; makes the embedded one if asked for."""
    if config.model.name != "embedded":
        return find_model(config.model.name, key="model.name")
    given = {"steps": config.model.warm_start_steps, "noise": config.model.warm_start_noise}
    spec = EmbeddedSpec(**{k: v for k, v in given.items() if v is not None},
                        seed=config.train.seed)
    source = task if task.name == "arithmetic" else make_task("arithmetic")
    return str(embedded_model(source, spec))


def start_of(config: Config, task: Task, checkpoint: Checkpoint | None) -> tuple[str, Path | None]:
    """The model that a run starts or goes on from, and the folder of the adapter on it, if any.

    Raises:
        ConfigError: if the checkpoint has weights where adapters are trained, or adapters where
            weights are.
    """
    if checkpoint is None:
        return model_folder(config, task), None
    wanted, other = checkpoint.model_folder, checkpoint.adapter_folder
    if config.train_model.lora.enabled:
        wanted, other = other, wanted
    if not wanted.is_dir():
        raise ConfigError(f"resume={config.resume}: {checkpoint.folder} has no {wanted.name}/ but "
                          f"{other.name}/; set train_model.lora.enabled to what it was")
    if config.train_model.lora.enabled:
        return model_folder(config, task), wanted
    return str(wanted), None


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a model, with a padding token.

    Raises:
        ConfigError: if it has none that can be read, or one with neither padding nor end token.
    """
    from transformers import AutoTokenizer

    missing = (f"the model {path} has no tokenizer that can be read%s; save one beside it "
               "(tokenizer.save_pretrained), or give another model.name")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(missing % f" ({first_line(error)})") from error
    # Where there are no files, Transformers makes one of the model's class that knows no words.
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise ConfigError(missing % "")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise ConfigError(f"the tokenizer of {path} has neither pad_token nor eos_token; give it "
                          "one of them (tokenizer.add_special_tokens) and save it")
    return tokenizer


def context_of(config: Config, model_path: str) -> int | None:
    """Tokens of the model's context, if it says; refuses rows that are longer."""
    from transformers import AutoConfig

    context = getattr(AutoConfig.from_pretrained(model_path), "max_position_embeddings", None)
    length = config.inference_model.max_model_len
    if context is not None and length is not None and length > context:
        raise ConfigError(f"inference_model.max_model_len={length} is more than the model's "
                          f"context of {context} tokens")
    return context


def build_prompts(config: Config, task: Task, tokenizer: Any, model_path: str) -> Prompts:
    """Render both splits; prompts that leave no room for a response are skipped and counted."""
    inference, context = config.inference_model, context_of(config, model_path)
    limit = inference.max_model_len or context
    if limit is None:
        raise ConfigError("the model does not say how long its context is; set "
                          "inference_model.max_model_len")
    if config.max_tokens >= limit:
        raise ConfigError(f"inference_model.max_tokens={config.max_tokens} leaves no room for a "
                          f"prompt in a context of {limit} tokens")
    room = limit - config.max_tokens
    room = min(room, config.env.max_prompt_tokens or room)
    train, test = (rendered(config, task, split, tokenizer, max_prompt_tokens=room)
                   for split in ("train", "test"))
    if config.env.num_envs > len(train):
        raise ConfigError(f"env.num_envs={config.env.num_envs} different prompts a batch, but "
                          f"{task.name} has only {len(train)} to train on; lower env.num_envs")
    width = max(len(prompt.tokens) for prompt in train + test)
    return Prompts(train, test, width, inference.max_model_len or width + config.max_tokens)


def rendered(
    config: Config, task: Task, split: Literal["train", "test"], tokenizer: Any, *,
    max_prompt_tokens: int,
) -> list[Prompt]:
    """The prompts of a split, with what section ``env`` puts around each of them. The tokenizer
    gets a chat template if it needs one."""
    env = config.env
    first = env.system_prompt and task.system_message(env.system_prompt)
    problems = [framed(problem, system_prompt=first,
                       thinking_prompt=env.thinking_prompt) for problem in task.split(split)]
    if give_template(tokenizer, env.chat_template, problems):
        logger.warning("the tokenizer of %s has no chat template: prompts are plain text, 'User: "
                       "...' and 'Assistant:', and its copies that this run saves have that "
                       "template; set env.chat_template for another one", config.model.name)
    return render_all(problems, tokenizer, max_prompt_tokens=max_prompt_tokens,
                      what=f"{task.name} {split}")


def build_env(
    config: Config, task: Task, prompts: Prompts, tokenizer: Any, policy: Policy
) -> VerifiableEnv:
    """The training environment: ``env.num_envs`` groups of ``env.repeats`` completions."""
    score = reward_function(config, task)
    score.prepare()
    return VerifiableEnv(
        prompts.train, score, tokenizer, num_prompts=config.env.num_envs,
        group_size=config.env.repeats, seed=config.train.seed,
        dialog=build_dialog(config, score, tokenizer, policy), **_widths(prompts, policy))


def build_dialog(
    config: Config, score: RewardScorer, tokenizer: Any, policy: Policy
) -> Dialog | None:
    """What answers the model, if ``env.step`` says that somebody does."""
    if config.env.step is None:
        return None
    return Dialog(named_step(config.env.step), tokenizer, score, max_steps=config.env.max_steps,
                  max_tokens=policy.sampling.max_tokens, eos_token_ids=policy.eos_token_ids,
                  workers=config.env.reward_workers)


def _widths(prompts: Prompts, policy: Policy) -> dict[str, Any]:
    return {"max_prompt_tokens": prompts.width, "max_response_tokens": policy.sampling.max_tokens,
            "eos_token_ids": policy.eos_token_ids}


def describe(
    config: Config, actor: Actor, task: Task, prompts: Prompts, *,
    device: torch.device, dtype: torch.dtype, backend: str, run_dir: Path,
) -> dict[str, str]:
    """What was resolved, for the start-up banner."""
    count = sum(param.numel() for param in actor.model.parameters())
    count += sum(layer.in_features * layer.out_features
                 for _, layer in quantised_layers(actor.model))
    trained = sum(param.numel() for name, param in actor.model.named_parameters()
                  if ".lora_" in name)
    model = f"{config.model.name}, {(count - trained) / 1e6:,.1f} M parameters, {str(dtype)[6:]}"
    if (kind := config.train_model.quantization) is not None:
        model += f", linear layers kept as {kind}"
    if trained:
        model += f", LoRA of rank {config.train_model.lora.r}: {trained / 1e6:,.2f} M parameters"
    if config.model.name == "embedded":
        model += (", made here and warm-started on additions of which a share is deliberately "
                  "wrong: there is something to learn")
    return {
        "model": model,
        "task": f"{task.name}: {len(prompts.train):,} training and {len(prompts.test):,} held-out "
                "problems",
        "batch": f"{config.groups_per_batch} prompts x {config.env.repeats} "
                 f"completions of at most {config.max_tokens} tokens"
                 + (f" in at most {config.env.max_steps} turns, answered by {config.env.step}"
                    if config.env.step else ""),
        "run": describe_length(config, problems=len(prompts.train)),
        "loss": describe_loss(config),
        **describe_engine(config, device=device, backend=backend),
        "device": describe_device(config, device),
        "folder": str(run_dir),
    }


def describe_length(config: Config, *, problems: int) -> str:
    """The length of a run in all its units, with the keys that count in them."""
    steps = config.optimizer_steps
    warmup = config.optimizer.warmup(steps)
    too_short = f" (all of them in the warm-up of {warmup})" if warmup >= steps else ""
    epochs = config.total_turns / config.env.repeats / problems
    drawn = "at least " if config.train.max_sampling_rounds else ""
    return (f"{config.iterations:,} iterations (train.max_steps), {steps:,} optimizer steps"
            f"{too_short}, {config.total_turns:,} completions (train.total_dialog_turns), {drawn}"
            f"{epochs:.3g} passes over the training problems (train.data_epochs), seed "
            f"{config.train.seed}")


def describe_device(config: Config, device: torch.device) -> str:
    """What the trainer computes on, such as ``2 x NVIDIA H200``."""
    ranks = config.train_model.ranks
    if device.type != "cuda":
        return "CPU" if ranks == 1 else f"CPU, {ranks} ranks"
    name = torch.cuda.get_device_name(device)
    return name if ranks == 1 else f"{ranks} x {name}"
