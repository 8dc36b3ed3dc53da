"""The flags of ``atropos-grpo`` and ``atropos-grpo-run``, and the configuration they stand for.

Every flag is another name of one key of :class:`~grpo.config.atropos.AtroposConfig`; further keys
can be given as ``section.key=value``. A flag that the chosen mode would not read is refused, or,
where nothing that is trained depends on it, ignored with a warning.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo.config.keys import ConfigError, OptimizerName, errors_text
from grpo.run.cli.parser import OneName, device, dtype, layer_indices, ports

if TYPE_CHECKING:
    from grpo.config.atropos import AtroposConfig

Mode = Literal["shared_vllm", "lora_only", "lora_restart", "none", "bridge"]
_LORA: tuple[Mode, ...] = ("lora_only", "lora_restart")
_WHOLE: tuple[Mode, ...] = ("shared_vllm", "none", "bridge")
_RESTARTED: tuple[Mode, ...] = ("lora_restart", "none")
_SERVED: tuple[Mode, ...] = ("shared_vllm", "lora_only", "lora_restart", "none")
_NOT_SENT = "this run sends nothing to W&B"


@dataclass(frozen=True)
class Flag:
    """One option of the command line."""

    names: tuple[str, ...]  # as typed, the first one preferred
    key: str  # section.key of the configuration
    help: str
    type: Any = str  # from text to value; None for a switch
    default: Any = None  # where the configuration's own is another
    modes: tuple[Mode, ...] = ()  # that read it; empty: all
    needs: str | None = None  # another flag without which it is not read
    idle: str | None = None  # why it can be ignored where it is not read; None: it is refused
    several: bool = False  # takes several values
    choices: tuple[str, ...] | None = None
    variable: str | None = None  # of the process, read where the flag is not given

    @property
    def dest(self) -> str:
        return _dest(self.names[0])

    def unread(self, args: argparse.Namespace, mode: Mode) -> str | None:
        """Why a command line does not read it, and what to do; None if it does."""
        if self.modes and mode not in self.modes:
            return (f"is not read with --weight-bridge-mode {mode}, but with "
                    f"{' and '.join(self.modes)}; remove it, or change the mode")
        if self.needs and not getattr(args, _dest(self.needs)):
            return f"is not read without {self.needs}; add that, or remove it"
        return None

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        """Make it an option; what is not given is None."""
        options: dict[str, Any] = {"dest": self.dest, "default": None, "help": self._help()}
        if self.type is None:
            options |= {"action": "store_const", "const": True}
        else:
            options |= {"type": self.type, "choices": self.choices, "action": OneName,
                        "nargs": "+" if self.several else None}
            if self.choices is None:
                options["metavar"] = self.dest.rpartition("_")[2].upper()
        group.add_argument(*self.names, **options)

    def _help(self) -> str:
        default = "" if self.default is None else f" (default: {self.default})"
        modes = f" [{', '.join(self.modes)}]" if self.modes else ""
        variable = f" [or variable {self.variable}]" if self.variable else ""
        return (self.help + default + variable + modes).replace("%", "%%")


def _dest(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


GROUPS: dict[str, tuple[Flag, ...]] = {
    "model": (
        Flag(("--model-name", "--model"), "model.name",
             "folder or hub id, or 'embedded' for a small model that is made here; required"),
        Flag(("--dtype",), "train_model.torch_dtype",
             "auto: bfloat16 on a GPU, float32 on a CPU", dtype, "auto"),
        Flag(("--device",), "device", "of the trainer: cpu, cuda or cuda:N", device, "auto"),
        Flag(("--train-layer-indices",), "train_model.layer_indices",
             "decoder layers that are trained, such as 0-3,28-31; all else is frozen",
             layer_indices, modes=_WHOLE),
    ),
    "training": (
        Flag(("--learning-rate", "--lr"), "optimizer.lr",
             "1e-6 for large models to 1e-5; more for adapters", float, 1e-5),
        Flag(("--training-steps",), "atropos.steps", "optimizer steps", int, 10),
        Flag(("--batch-size",), "atropos.batch_size", "sequences of a micro-batch", int, 2),
        Flag(("--gradient-accumulation-steps",), "train.gradient_accumulation_steps",
             "micro-batches of a step", int, 32),
        Flag(("--seq-len",), "atropos.seq_len", "longer sequences are cut", int, 2048),
        Flag(("--warmup-steps",), "optimizer.warmup_steps",
             "steps in which the learning rate rises", int, 0),
        Flag(("--optimizer",), "optimizer.name", "over float32 masters, see the guide",
             default="adamw", choices=get_args(OptimizerName)),
        Flag(("--adafactor-scale-parameter",), "optimizer.scale_parameter",
             "scale the learning rate by the size of the weights; with --optimizer adafactor",
             None),
        Flag(("--adafactor-relative-step",), "optimizer.relative_step",
             "the learning rate follows the steps; with --optimizer adafactor", None),
        Flag(("--clip-eps",), "train.clip_epsilon", "clip ratios to 1 - eps and 1 + eps", float,
             0.2),
        Flag(("--kl-coef",), "train.kl_to_inference_coeff",
             "penalty on the distance from the policy that sampled (default: none)", float),
        Flag(("--temperature",), "inference_model.temperature",
             "that the environments sample at", float, 1.0),
        Flag(("--seed",), "train.seed", "of everything random here", int, 0),
        Flag(("--resume",), "resume", "'auto', or a run or checkpoint to go on from"),
        Flag(("--save-path",), "atropos.save_path", "for checkpoints, metrics and the report",
             default="trained_model_checkpoints"),
        Flag(("--checkpoint-interval",), "train.checkpoint_frequency",
             "steps between checkpoints; 0: the final model only", int, 3),
    ),
    "engine": (
        Flag(("--vllm-port",), "atropos.vllm_port", "where environments ask", int, 9001),
        Flag(("--forward-ports",), "atropos.forward_ports",
             "further ports that lead to the engine, such as 9004,9005,9006,9007, for environments "
             "that ignore --openai.base_url", ports),
        Flag(("--vllm-gpu",), "atropos.vllm_gpu", "GPU of the engine; default: the trainer's", int,
             modes=_SERVED, idle="there is no engine server to place"),
        Flag(("--gpu-memory-utilization", "--vllm-gpu-memory-utilization"),
             "inference_model.gpu_memory_utilization",
             "share of the GPU for the engine's weights and cache (default: 0.45)", float),
        Flag(("--kv-cache-memory-bytes",), "inference_model.kv_cache_memory_bytes",
             "size of the engine's cache instead (default on a CPU: 256 MiB)", int),
        Flag(("--max-model-len",), "inference_model.max_model_len",
             "prompt and response (default: 4096, or the model's context if that is less)", int),
        Flag(("--vllm-restart-interval",), "atropos.restart_interval",
             "steps between two engines, and one more before an evaluation that is due in between; "
             "0 with mode none: the engine reads each step's checkpoint in place", int, 3,
             modes=_RESTARTED, idle="the engine has each update at once and is not restarted"),
        Flag(("--vllm-config-path",), "atropos.bridge_config",
             "vllm_bridge_config.json of a running engine, which is waited for and used",
             modes=("shared_vllm",), variable="VLLM_BRIDGE_CONFIG_PATH",
             idle="weights go another way, and the engine is the one of --vllm-port"),
    ),
    "adapters": (
        Flag(("--lora-r",), "train_model.lora.r", "rank", int, 16, _LORA),
        Flag(("--lora-alpha",), "train_model.lora.alpha", "scaled by alpha / r", float, 32, _LORA),
        Flag(("--lora-dropout",), "train_model.lora.dropout", "in the trainer only", float, 0.05,
             _LORA),
        Flag(("--lora-target-modules",), "train_model.lora.target_modules",
             "names such as q_proj v_proj; default: all linear modules of the layers",
             modes=_LORA, several=True),
        Flag(("--lora-layer-indices",), "train_model.lora.layer_indices",
             "such as 0-3,28-31; default: all", layer_indices, modes=_LORA),
    ),
    "distillation": (
        Flag(("--distill-coef",), "distill.topk_coeff",
             "weight of the cross-entropy with the teacher's tokens that groups bring", float, 1.0,
             needs="--distill-enabled"),
        Flag(("--distill-temperature",), "distill.temperature", "of both distributions", float,
             1.0, needs="--distill-enabled"),
    ),
    "Atropos": (
        Flag(("--atropos-url",), "atropos.url", "of the API, a hub or run-api",
             default="http://127.0.0.1:8000"),
        Flag(("--group-timeout",), "atropos.timeout",
             "seconds without a new group after which to give up", float, 600.0),
        Flag(("--max-staleness",), "atropos.max_staleness",
             "do not train tokens sampled more than so many updates ago", int,
             modes=("bridge",)),
    ),
    "logging": (
        Flag(("--wandb-project",), "logging.wandb_project", "of W&B", needs="--use-wandb",
             idle=_NOT_SENT),
        Flag(("--wandb-group",), "logging.wandb_group", "of W&B", needs="--use-wandb",
             idle=_NOT_SENT),
        Flag(("--wandb-run-name",), "logging.wandb_run_name", "of W&B", needs="--use-wandb",
             idle=_NOT_SENT),
        Flag(("--log-dir",), "atropos.log_dir", "for logs of what is started here and for "
             "vllm_bridge_config.json", default="logs", variable="LOGDIR"),
        Flag(("--debug-loading",), "atropos.debug_loading",
             "show where each parameter lies, and what the engine logs", None),
        Flag(("--benchmark",), "atropos.benchmark", "summarise at the end where time went", None),
        Flag(("--dump-batch",), "atropos.dump_batch",
             "write each batch to temp.json in --save-path", None),
    ),
    "evaluation": (
        Flag(("--eval-task",), "env.dataset",
             "measure the accuracy on a task's test problems, such as arithmetic; environments "
             "also evaluate themselves"),
        Flag(("--eval-max-tokens",), "atropos.eval_max_tokens", "longest answer", int, 128,
             needs="--eval-task"),
        Flag(("--eval-interval",), "train.eval_frequency",
             "steps between evaluations; 0: before and after", int, 0, needs="--eval-task"),
    ),
}
#: Of atroposlib's example trainer, which reads them and does nothing with them -> all that they
#: could say of this one, or None where that is anything.
ONE_PROCESS = {"--trainer-rank": "0", "--world-size": "1", "--init-method": None,
               "--num-inference-nodes": "0"}
FLAGS = tuple(flag for group in GROUPS.values() for flag in group)

_MODES: dict[Mode, dict[str, dict[str, Any]]] = {
    "shared_vllm": {"inference_model": {"weight_sync": "single_copy"}},
    "lora_only": {"inference_model": {"weight_sync": "lora"},
                  "train_model": {"lora": {"enabled": True}}},
    "lora_restart": {"inference_model": {"weight_sync": "restart"},
                     "train_model": {"lora": {"enabled": True}}},
    "none": {"inference_model": {"weight_sync": "restart"}},
    "bridge": {"atropos": {"bridge": True}},
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """All flags that stand for the configuration."""
    mode = parser.add_argument_group("mode")
    mode.add_argument(
        "--weight-bridge-mode", choices=get_args(Mode), default="shared_vllm",
        help="how new weights reach what answers the environments: one copy that both use; "
             "adapters, swapped over HTTP; adapters, in a new engine; checkpoints, read or in a "
             "new engine; or the policy of the trainer's process answers (default: shared_vllm)")
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        if title == "distillation":
            group.add_argument("--distill-enabled", action="store_true",
                               help="learn from the teacher's tokens that groups bring")
        if title == "logging":
            group.add_argument("--use-wandb", action="store_true", help="log to W&B")
        for flag in flags:
            flag.add_to(group)
    for name in ONE_PROCESS:
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value",
                        help="any other key of the configuration, such as "
                             "train.aggregation=sequence")


def to_config(args: argparse.Namespace) -> AtroposConfig:
    """The configuration that a command line stands for.

    Raises:
        ConfigError: for a flag that is not read, or values that do not go together, with the fix.
    """
    if args.model_name is None:
        raise ConfigError("--model-name is missing: give a folder, a hub id, or 'embedded'")
    mode: Mode = args.weight_bridge_mode
    args.use_wandb |= any(re.match(r"logging\.backends=.*wandb", text) for text in args.overrides)
    given = {flag.dest: getattr(args, flag.dest) for flag in FLAGS
             if getattr(args, flag.dest) is not None}
    for flag in FLAGS:
        if flag.dest in given and (why := flag.unread(args, mode)):
            if not flag.idle:
                raise ConfigError(f"{flag.names[0]} {why}")
            del given[flag.dest]
            _ignore(flag.names[0], why.partition(";")[0], flag.idle)
    _check_one_process(args)
    try:
        overrides = OmegaConf.from_dotlist(args.overrides)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{' '.join(args.overrides)}: {error}; write section.key=value") from None
    _check_overrides(args, given)
    values = OmegaConf.create(_MODES[mode])
    for flag in FLAGS:
        value = given.get(flag.dest, _default(flag, args, mode, overrides))
        if value is not None:
            OmegaConf.update(values, flag.key, value)
    _settle(values, args, mode, given)
    # Not at the top, because PyTorch comes with it and --help does without.
    from grpo.config.atropos import AtroposConfig
    from grpo.config.schema import load_config

    try:
        return load_config(OmegaConf.merge(values, overrides), AtroposConfig)
    except ConfigError as error:
        raise ConfigError(in_flags(str(error))) from None


def _ignore(name: str, why: str, idle: str) -> None:
    logging.getLogger(__name__).warning("%s %s; it is ignored: %s", name, why, idle)


def _check_one_process(args: argparse.Namespace) -> None:
    """Ignore flags that say of the trainer what it is, one process; refuse what it is not."""
    for name, only in ONE_PROCESS.items():
        value = getattr(args, _dest(name))
        if value is None:
            continue
        if only not in (None, value):
            raise ConfigError(f"{name} {value} is not read: one process trains here, beside one "
                              "engine; use env=atropos in grpo.py with train_model.num_devices and "
                              "inference_model.num_devices, which start all that they need")
        _ignore(name, "is not read", "one process trains, beside one engine")


def _check_overrides(args: argparse.Namespace, given: dict[str, Any]) -> None:
    """Refuse keys that do not exist, and those that a flag sets to another value."""
    if not args.overrides:
        return
    from grpo.run.cli.names import atropos_key_errors, plain  # Hydra, which help does without

    if errors := atropos_key_errors(args.overrides):
        raise ConfigError(errors_text(errors))
    keys = {path: plain(value) for path, _, value in (
        text.partition("=") for text in args.overrides)}
    for flag in FLAGS:
        if flag.dest in given and keys.get(flag.key, given[flag.dest]) != given[flag.dest]:
            raise ConfigError(f"{flag.key}={keys[flag.key]} and its flag ({flag.names[0]}) "
                              f"{given[flag.dest]} are the same setting; give one")


def in_flags(message: str) -> str:
    """A message about keys, with the flags that set them.

    Examples:
        >>> in_flags("optimizer.lr=-1.0: Input should be greater than 0")
        'optimizer.lr (--learning-rate)=-1.0: Input should be greater than 0'
        >>> in_flags("device=cuda: the device is not there")
        'device (--device)=cuda: the device is not there'
        >>> in_flags("optimizer.lr (--learning-rate)=-1.0")
        'optimizer.lr (--learning-rate)=-1.0'
    """
    for flag in FLAGS:
        if f"({flag.names[0]})" in message:
            continue
        # A key without a section, such as device, is also a word.
        end = r"(?![\w.]*\w)" if "." in flag.key else "(?==)"
        message = re.sub(rf"(?<![\w.]){re.escape(flag.key)}{end}",
                         f"{flag.key} ({flag.names[0]})", message, count=1)
    return message


def _default(flag: Flag, args: argparse.Namespace, mode: Mode, overrides: DictConfig) -> Any:
    """What a flag stands for that was not given: nothing where another key that was leaves it
    unread, because a default must not be refused."""
    if flag.unread(args, mode):
        return None
    if flag.key == "train.clip_epsilon" and OmegaConf.select(overrides, "train.objective"):
        return None
    if flag.key == "atropos.restart_interval" and OmegaConf.select(
            overrides, "inference_model.weight_sync", default="restart") != "restart":
        return None
    if flag.key == "atropos.seq_len":
        longest = args.max_model_len or OmegaConf.select(overrides, "inference_model.max_model_len")
        return min(flag.default, longest or flag.default)
    # A variable that is set to nothing is as good as none.
    return flag.variable and os.environ.get(flag.variable) or flag.default


def _settle(
    values: DictConfig, args: argparse.Namespace, mode: Mode, given: dict[str, Any]
) -> None:
    """What stands for more than one key."""
    values.device = values.device.partition(":")[0]
    values.train.exp_name = "atropos"
    if args.use_wandb:
        OmegaConf.update(values, "logging.backends", ["wandb"])
    if "eval_task" in given:
        values.atropos.evaluate = True
    if mode == "none" and given.get("vllm_restart_interval") == 0:
        values.inference_model.weight_sync = "reload"
        del values.atropos.restart_interval


def choose_gpu(args: argparse.Namespace, config: AtroposConfig) -> None:
    """Make ``--device cuda:N`` the GPU of this process.

    Raises:
        ConfigError: if it is not there, or the engine of this process would be on another.
    """
    _, _, text = (args.device or "").partition(":")
    if not text:
        return
    import torch

    from grpo.run.build import resolve_backend
    from grpo.run.placement import visible

    number = int(text)
    if number >= torch.cuda.device_count():
        raise ConfigError(f"--device {args.device}: this machine shows "
                          f"{torch.cuda.device_count()} GPUs, numbered from 0")
    # vLLM in process takes the first GPU that it sees, and parameters that it shares move there.
    if number and config.atropos.bridge and resolve_backend(config) == "vllm":
        raise ConfigError(f"--device {args.device}: with --weight-bridge-mode bridge vLLM is in "
                          "this process, where it always takes the first GPU; start the command "
                          f"with CUDA_VISIBLE_DEVICES={visible((number,))} and --device cuda")
    torch.cuda.set_device(number)
