"""Names about the parts of a run: problems and rewards, precision and adapters, the engine, where
metrics and files go."""

from __future__ import annotations

from typing import Any

from grpo.config.keys import ConfigError
from grpo.config.trl_names.values import Values

# -- problems and rewards -------------------------------------------------------------------------

#: Data sets that have a task of their own.
_TASKS = {"openai/gsm8k": "gsm8k"}
#: What they read of it.
_OF_THE_TASK = {"dataset_config": "main", "dataset_train_split": "train",
                "dataset_test_split": "test"}
#: Keys of today that leave nothing of a data set that a name says.
_OTHERS = {"env", "env.dataset", "env.dataset_mixture"}


def data(values: Values) -> dict[str, Any]:
    """The data set, or a mixture."""
    if values.own.get("env", "dataset") != "dataset" or values.own.keys() & {
            "env.dataset", "env.path", "env.dataset_mixture"} or not _OTHERS.isdisjoint(
                values.swept):
        if values.named("dataset_name", "datasets", "dataset_mixture"):
            values.notes.append("  another data set is chosen behind it")
        return {}
    keys: dict[str, Any] = {}
    name, column = values["dataset_name"], values.given.get("dataset_prompt_column")
    if values.named("datasets", "dataset_mixture"):
        keys["env"] = "dataset"
        if values.named("dataset_mixture"):
            keys["env.dataset_mixture"] = values["dataset_mixture"]
        else:
            keys["env.dataset_mixture"] = {"datasets": [_entry(one) for one in values["datasets"]]}
            if values.named("test_split_size"):
                keys["env.dataset_mixture"]["test_split_size"] = values["test_split_size"]
    elif name in _TASKS and column is None:
        for given, of_the_task in _OF_THE_TASK.items():
            if (value := values.given.get(given, of_the_task)) != of_the_task:
                raise ConfigError(f"dataset_name={name} {given}={value}: its task reads "
                                  f"{of_the_task}; write dataset_prompt_column and reward_funcs, "
                                  "too, which make a data set by its columns of it")
        return {"env": _TASKS[name]}
    elif name is not None:
        keys |= {"env": "dataset", "env.path": name}
    elif more := [one for one in (*_OF_THE_TASK, "dataset_prompt_column") if values.named(one)]:
        raise ConfigError(f"{', '.join(more)}: says more of a data set; give dataset_name or "
                          "datasets, too")
    if values.named("test_split_size") and not values.named("datasets"):
        raise ConfigError("test_split_size: it is of datasets, which are mixed; of one data set "
                          "write env.task.num_test, and put it into dataset_mixture")
    if keys:
        keys["env.prompt_column"] = values.today(
            "env.prompt_column", "dataset_prompt_column", column or "prompt")
        first = values.today("env.system_prompt", "system_prompt",
                             values.given.get("system_prompt", ""))
        keys["env.task.chat"] = chat = column is not None or bool(first)
        if chat:
            keys["env.system_prompt"] = first
    for given, key in (("dataset_config", "config"), ("dataset_train_split", "train_split"),
                       ("dataset_test_split", "test_split")):
        if values.named(given):
            keys[f"env.task.{key}"] = values[given]
    return keys


_ENTRY = {"path": "id", "name": "config", "fraction": "weight"}


def _entry(given: dict[str, Any]) -> dict[str, Any]:
    """An entry of TRL's ``datasets``, or of open-r1's."""
    if unread := sorted(given.keys() & {"data_dir", "data_files"}):
        raise ConfigError(f"datasets: {unread[0]} is not read; give the file or folder as path")
    if "fraction" in given:
        raise ConfigError("datasets: fraction is a share of the mixture there; write weight, the "
                          "share of the data set that is used")
    return {_ENTRY.get(key, key): value for key, value in given.items()}


#: Names of TRL's and open-r1's rewards -> those of today.
_REWARDS = {"accuracy_reward": "accuracy", "get_soft_overlong_punishment":
            "soft_overlong_punishment"}
_NO_REWARD = {
    "think_format_reward": "write format, which asks for <answer> as well, or a function",
    "reasoning_accuracy_reward": "write accuracy, which reads the whole completion",
    "code_format": "write format, or a function", "ioi_code": "write code", "cf_code": "write code",
    "binary_code": "write code, whose success is that all tests pass",
}
#: Names of open-r1's options -> reward and option.
_OPTIONS = {
    **{f"cosine_{name}": ("cosine", name) for name in (
        "min_value_wrong", "max_value_wrong", "min_value_correct", "max_value_correct", "max_len")},
    "repetition_n_grams": ("repetition_penalty", "ngram_size"),
    "repetition_max_penalty": ("repetition_penalty", "max_penalty"),
    "max_completion_len": ("soft_overlong_punishment", "max_completion_len"),
    "soft_punish_cache": ("soft_overlong_punishment", "soft_punish_cache"),
}


def rewards(values: Values) -> dict[str, Any]:
    """Rewards by name, and their options."""
    keys: dict[str, Any] = {}
    names = values["reward_funcs"]
    names = [names] if isinstance(names, str) else list(names or ())
    options: dict[str, dict[str, Any]] = {}
    if names:
        for name in names:
            if name in _NO_REWARD:
                raise ConfigError(f"reward_funcs={name}: it is not here; {_NO_REWARD[name]}")
        if "get_soft_overlong_punishment" in names:  # what TRL's script gives it
            options["soft_overlong_punishment"] = {"max_completion_len": 1280,
                                                   "soft_punish_cache": 256}
        chosen = [_REWARDS.get(name, _import_path(name)) for name in names]
        keys["env.reward"] = chosen
        if "accuracy" in chosen and values["dataset_name"] not in _TASKS and values.named(
                "dataset_name", "datasets", "dataset_mixture"):
            keys["env.answer_column"] = "solution"
    for name, (reward, option) in _OPTIONS.items():
        if values.named(name):
            options.setdefault(reward, {})[option] = values[name]
    if names:
        options = {reward: one for reward, one in options.items() if reward in keys["env.reward"]}
    if options:
        keys["env.reward_options"] = options
    return keys


def _import_path(name: str) -> str:
    """TRL's ``package.module.function`` as ``package.module:function``."""
    module, dot, function = name.rpartition(".")
    return f"{module}:{function}" if dot and ":" not in name else name


# -- the model ------------------------------------------------------------------------------------


def precision(values: Values) -> dict[str, Any]:
    """What weights are in; masters are always float32."""
    name = "dtype" if values.named("dtype") else "torch_dtype"
    kind, half = values.given.get(name), values["bf16"]
    if values["fp16"] or kind == "float16":
        raise ConfigError("fp16 (dtype=float16): small gradients vanish in its range; write "
                          "bf16=true")
    if kind not in (None, "auto", "float32", "bfloat16"):
        raise ConfigError(f"{name}={kind}: known are auto, float32 and bfloat16")
    if kind == "float32" and half:
        kind = "auto"  # float32 masters, bfloat16 computation: so it is on GPUs
    if kind is None and half is not None:
        kind = "auto" if half else "float32"
    return {} if kind is None else {"train_model.torch_dtype": kind}


def lora(values: Values) -> dict[str, Any]:
    """Adapters, and what is beneath them."""
    if not values["use_peft"]:
        if mine := [name for name in values.given if name.startswith(("lora_", "load_in_"))
                    and values.given[name]]:
            values.notes.append(f"  {', '.join(mine)}: not read without use_peft=true")
        return {"train_model.lora.enabled": False} if values.named("use_peft") else {}
    keys: dict[str, Any] = {"train_model.lora.enabled": True}
    for name in ("r", "alpha", "dropout"):
        if values.named(f"lora_{name}"):
            keys[f"train_model.lora.{name}"] = values[f"lora_{name}"]
    modules = values["lora_target_modules"]
    if modules not in (None, "all-linear", ["all-linear"]):
        keys["train_model.lora.target_modules"] = (
            [modules] if isinstance(modules, str) else list(modules))
    if values["load_in_4bit"] or values["load_in_8bit"]:
        keys["train_model.quantization"] = "nf4" if values["load_in_4bit"] else "int8"
    return keys


def engine(values: Values) -> dict[str, Any]:
    """What generates, and where."""
    server = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port")
    if values.named("use_vllm") and not values["use_vllm"]:
        return {"inference_model.backend": "transformers"}
    keys = {"inference_model.backend": "vllm"} if values.named("use_vllm") else {}
    mode = values["vllm_mode"]
    if mode not in ("colocate", "server"):
        raise ConfigError(f"vllm_mode={mode}: known are colocate and server")
    if mode == "colocate":
        if values.named(*server):
            values.notes.append("  vllm_server_*: not read without vllm_mode=server")
        return keys
    host = str(values["vllm_server_host"]).replace("0.0.0.0", "127.0.0.1")
    url = values["vllm_server_base_url"] or f"http://{host}:{values['vllm_server_port']}"
    values.notes.append("  the server is python -m grpo.server.serve; inference_model.url=null: "
                        "the run starts one")
    return keys | {"inference_model.engine": "server", "inference_model.url": url}


# -- where things go ------------------------------------------------------------------------------


def loggers(values: Values) -> dict[str, Any]:
    """Loggers, and what the run is called."""
    keys: dict[str, Any] = {}
    names = values["report_to"]
    names = [names] if isinstance(names, str) else list(names or ())
    if values.named("report_to"):
        if unknown := [one for one in names if one not in ("wandb", "tensorboard", "none", "all")]:
            raise ConfigError(f"report_to={unknown[0]}: metrics go to metrics.jsonl, and to wandb "
                              "and tensorboard; give some of these, or none")
        chosen = ["wandb", "tensorboard"] if "all" in names else [
            one for one in names if one != "none"]
        keys["logging.backends"] = chosen
    else:
        chosen = list(values.own.get("logging.backends") or ())
    if values.named("run_name"):
        keys["train.exp_name"] = values["run_name"]
        if "wandb" in chosen:
            keys["logging.wandb_run_name"] = values["run_name"]
    for name, key in (("wandb_project", "wandb_project"), ("wandb_run_group", "wandb_group")):
        if values.named(name):
            if "wandb" in chosen:
                keys[f"logging.{key}"] = values[name]
            else:
                values.notes.append(f"  {name}: not read without report_to=wandb")
    return keys


def folder(values: Values) -> dict[str, Any]:
    """The folder of the run, and what it goes on from."""
    keys: dict[str, Any] = {}
    if values.named("output_dir"):
        keys["hydra.run.dir"] = str(values["output_dir"])
    start = values["resume_from_checkpoint"]
    if start not in (None, False, "false", "False"):
        keys["resume"] = "auto" if start in (True, "true", "True") else str(start)
    return keys
