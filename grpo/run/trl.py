"""The ten lines of TRL's users: ``GRPOTrainer`` and ``GRPOConfig`` over :func:`grpo.train`.

``docs/trl.md`` says what differs.
"""

from __future__ import annotations

import dataclasses
import difflib
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from grpo.config.keys import ConfigError
from grpo.config.trl_names import FIELDS, translate, typed
from grpo.config.trl_names.translate import Translated, unknown_name
from grpo.policies.model_source import first_line
from grpo.run.api import Named, Result, run
from grpo.run.given import Reward, as_rewards, as_rows
from grpo.run.kept import Kept, other_weights

#: Arguments of TRL's trainer that have nothing here -> what to do instead.
_INSTEAD = {
    "callbacks": "the run evaluates, saves and reports by itself; read metrics.jsonl",
    "optimizers": "write optim, learning_rate and lr_scheduler_type in GRPOConfig",
    "reward_processing_classes": "reward models are not loaded; ask a server that has one",
    "quantization_config": "write load_in_4bit or load_in_8bit in GRPOConfig",
    "tools": "use env=verifiers with grpo.train", "rollout_func": "write env.step with grpo.train",
    "environment_factory": "write env.step with grpo.train, or use env=verifiers",
}
#: What else TRL's trainer has, and earlier ones took -> what to do instead.
_ELSEWHERE = {
    "tokenizer": "write processing_class", "evaluate": "read result.history, or `grpo evaluate`",
    "predict": "use `grpo evaluate`", "push_to_hub": "`hf upload NAME RUN/final_model` does it",
    "add_callback": _INSTEAD["callbacks"], "state": "read result.history",
    "log_metrics": "metrics.jsonl has all", "save_metrics": "metrics.jsonl has all",
    "save_state": "checkpoints/ in output_dir has all", "accelerator": "accelerate is not used",
}
#: What of a LoraConfig changes nothing here.
_IDLE = {"task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path",
         "revision", "inference_mode", "runtime_config", "fan_in_fan_out"}
_NAMED = Named("output_dir", "train_dataset", "eval_dataset", "reward_funcs", "model",
               "train(resume_from_checkpoint=True)")
#: Folder within a run's of the model that it started from, if that was no name.
_START = "start_model"
#: Of peft's LoraConfig -> names of GRPOConfig.
_LORA = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout",
         "target_modules": "lora_target_modules"}


class GRPOConfig:
    """TRL's names and defaults; ``docs/trl.md`` has what each becomes.

    Args:
        output_dir: folder of the run, which must not hold one unless it is resumed.
        overrides: values by keys of this library, which win over TRL's names.
        names: of TRL's ``GRPOConfig``, and of its scripts' ``ModelConfig``.

    Raises:
        ConfigError: for a name that is unknown or has nothing here, with what to write.

    Examples:
        >>> GRPOConfig("out", learning_rate=2e-6, num_generations=4).num_generations
        4
        >>> GRPOConfig("out").max_completion_length
        512
    """

    def __init__(
        self, output_dir: str | Path | None = None, *,
        overrides: Mapping[str, Any] | None = None, **names: Any,
    ) -> None:
        if not isinstance(overrides or {}, Mapping):
            raise ConfigError(f"overrides={overrides!r:.80}: give a dictionary by keys of this "
                              "library, such as {'train.seed': 1}")
        if not isinstance(output_dir, str | Path | None):
            raise ConfigError(f"output_dir={output_dir!r:.80}: give the path of a folder")
        vars(self).update(output_dir=output_dir, overrides=dict(overrides or {}), names=names)
        translate(names, self.overrides, whole=True)

    def __getattr__(self, name: str) -> Any:
        if name in FIELDS:
            return self.names.get(name, FIELDS[name].default)
        raise AttributeError(f"GRPOConfig has no {name!r}; docs/trl.md lists its names")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        elif name in FIELDS:
            translate({**self.names, name: value}, self.overrides, whole=True)
            self.names[name] = value
        else:
            raise ConfigError(unknown_name(name, value))


class GRPOTrainer:
    """Train with a data set and reward functions, as TRL's trainer of that name does.

    Args:
        model: folder or hub id, or a model of Transformers, which is saved and loaded again.
        reward_funcs: functions as TRL calls them, or as this library does, or names of rewards.
        args: settings; None: TRL's defaults.
        train_dataset: rows with a ``prompt``, and columns for the reward functions; a
            ``datasets.Dataset`` or a list.
        eval_dataset: held-out rows; None: a tenth of ``train_dataset``, 100 at most.
        processing_class: tokenizer of a ``model`` of Transformers, None: that of the folder or hub
            id that it came from; beside a name only its chat template is taken.
        reward_processing_classes, callbacks, optimizers, quantization_config: have nothing here.
        peft_config: a ``LoraConfig``.
        others: TRL's further arguments, which have nothing here either.

    Raises:
        ConfigError: for what is wrong, or has nothing here, with what to do instead.
        TypeError: for an argument that TRL does not have.

    Attributes:
        result: of the run, once it is through.
    """

    def __init__(
        self, model: Any, reward_funcs: Reward | Sequence[Reward] | None = None,
        args: GRPOConfig | None = None,
        train_dataset: Iterable[Mapping[str, Any]] | None = None,
        eval_dataset: Iterable[Mapping[str, Any]] | None = None, processing_class: Any = None,
        reward_processing_classes: Any = None, callbacks: Any = None, optimizers: Any = None,
        quantization_config: Any = None, peft_config: Any = None, **others: Any,
    ) -> None:
        _refuse({"reward_processing_classes": reward_processing_classes, "callbacks": callbacks,
                 "optimizers": optimizers, "quantization_config": quantization_config, **others})
        if args is not None and not isinstance(args, GRPOConfig):
            kind = type(args)
            raise ConfigError(f"args is a {kind.__module__}.{kind.__qualname__}: give a "
                              "grpo.run.trl.GRPOConfig, which takes the same names")
        _check_model(model, processing_class)
        self.names = _adapters(peft_config)
        if train_dataset is None:
            raise ConfigError("train_dataset: there is none; give rows with a prompt")
        named = str(getattr(model, "name_or_path", model)).rpartition("/")[2]
        self.args = args or GRPOConfig(f"{named}-GRPO")
        keys = self._translated().keys | self.args.overrides
        column = keys.get("env.prompt_column", "prompt")
        self._rows = as_rows(train_dataset, "train_dataset", column)
        self._held_out = None if eval_dataset is None else as_rows(
            eval_dataset, "eval_dataset", column)
        self._rewards = as_rewards(reward_funcs, "reward_funcs", self._rows,
                                   keys.get("env.reward_options"))
        if not self._rewards and "env.reward" not in keys:
            raise ConfigError("reward_funcs=None: give a function, or the name of a reward")
        weights = self.args.reward_weights
        if self._rewards and isinstance(weights, list | tuple) and (
                len(weights) != len(self._rewards)):
            raise ConfigError(f"reward_weights={list(weights)} has {len(weights)}, reward_funcs "
                              f"{len(self._rewards)}; give one weight for each")
        self.folder = Path(self.args.output_dir or "trainer_output")
        self.model, self.processing_class = model, processing_class
        self.reward_funcs, self.peft_config = reward_funcs, peft_config
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.result: Result | None = None

    def __getattr__(self, name: str) -> NoReturn:
        instead = _ELSEWHERE.get(name, "docs/trl.md says what differs")
        raise AttributeError(f"GRPOTrainer has no {name!r}; {instead}")

    def train(self, resume_from_checkpoint: str | bool | None = None) -> Result:
        """Run to the end.

        Args:
            resume_from_checkpoint: True: go on from the newest checkpoint in ``output_dir``, and
                begin where there is none; or a folder.

        Raises:
            ConfigError: for what cannot work, before anything is loaded.
            FileExistsError: if ``output_dir`` holds a run that is not resumed.
        """
        if not isinstance(resume_from_checkpoint, str | Path | bool | None):
            raise ConfigError(f"resume_from_checkpoint={resume_from_checkpoint!r:.80}: give True, "
                              "or a folder of a run or of one of its checkpoints")
        done = self._translated(resume_from_checkpoint)
        resume = done.keys.get("resume")
        if resume not in (None, "auto") and not Path(resume).is_dir():
            raise ConfigError(f"resume_from_checkpoint={resume}: there is no such folder; give "
                              "True, or a folder of a run or of one of its checkpoints")
        done.keys.pop("hydra.run.dir", None)
        for line in done.said:
            print(line)
        own = self.args.overrides
        left = [f"{key}={typed(done.keys[key])}" for key in sorted(done.defaults - own.keys())]
        print(f"TRL's defaults for what is left open: {' '.join(left)}")
        keys = done.keys | self._start() | own
        named = isinstance(self.model, str | Path) or "model.name" in own
        self.result = run(keys, self._rewards, self._rows, self._held_out, self.folder,
                          named=_NAMED, model=None if named else Kept(
                              "model.name", _START, self._other_start, self._save_start))
        return self.result

    def _translated(self, resume: Any = None) -> Translated:
        resumes = {} if resume is None else {"resume_from_checkpoint": resume if isinstance(
            resume, bool) else str(resume)}
        return translate(self.args.names | self.names | resumes, self.args.overrides, whole=True)

    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """Copy the trained model, with its tokenizer, into a folder; None: that of the run.

        Raises:
            RuntimeError: before :meth:`train`.
        """
        if self.result is None:
            raise RuntimeError("there is no trained model yet; call train() first")
        target = Path(output_dir or self.folder)
        shutil.copytree(self.result.final_model, target, dirs_exist_ok=True)
        return target

    def _start(self) -> dict[str, Any]:
        """The model to start from, as a name."""
        if not isinstance(self.model, str | Path):
            return {"model.name": str((self.folder / _START).absolute())}
        template = getattr(self.processing_class, "chat_template", None)
        return {"model.name": str(self.model)} | (
            {"env.chat_template": template} if template else {})

    def _save_start(self, folder: Path) -> None:
        """A model that is no name, where it is loaded from."""
        tokenizer = self.processing_class or _tokenizer_of(
            getattr(self.model, "name_or_path", ""))
        self.model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def _other_start(self, folder: Path) -> str | None:
        """How a model that is no name differs from the one that a run started from.

        It is saved for that once more: the names of its tensors in files are not its own.
        """
        if not folder.is_dir():
            return f"model: {folder} is not there to be compared"
        if self.processing_class is not None:
            before = _tokenizer_of(folder).chat_template
            now = getattr(self.processing_class, "chat_template", None)
            if before != now:
                return f"processing_class.chat_template: {before!r:.80} -> {now!r:.80}"
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="compared_") as now:
            self.model.save_pretrained(now)
            name = other_weights(folder, Path(now))
        return name and f"model: {name} differs from that of {folder}"


# -- what is wrong with arguments ------------------------------------------------------------------


def _refuse(given: Mapping[str, Any]) -> None:
    """Arguments that have nothing here, where they say anything, and those that TRL has not."""
    for name, value in given.items():
        if name not in _INSTEAD:
            near = difflib.get_close_matches(name, GRPOTrainer.__init__.__annotations__, n=1)
            hint = _ELSEWHERE.get(name) or (f"did you mean {near[0]!r}?" if near else
                                            "settings are of GRPOConfig")
            raise TypeError(f"GRPOTrainer has no argument {name!r} (given {value!r:.80}); {hint}")
        empty = value is None or isinstance(value, list | tuple | dict) and all(
            one is None for one in value)
        if not empty:
            raise ConfigError(f"{name}={value!r:.80}: it has nothing here; {_INSTEAD[name]}")


def _check_model(model: Any, tokenizer: Any) -> None:
    if hasattr(model, "merge_and_unload"):
        raise ConfigError(f"model is a {type(model).__name__}: give the model below the adapters, "
                          "and peft_config")
    named = isinstance(model, str | Path) and bool(str(model))
    if not (named or hasattr(model, "save_pretrained")):
        raise ConfigError(f"model={model!r:.80}: give a folder, a hub id, or a model of "
                          "Transformers")
    needed = "chat_template" if named else "save_pretrained"
    if tokenizer is not None and not hasattr(tokenizer, needed):
        raise ConfigError(f"processing_class={tokenizer!r:.80}: give a tokenizer, such as "
                          "AutoTokenizer.from_pretrained(...)")


def _tokenizer_of(name: str | Path) -> Any:
    """That of the folder or hub id that a model came from."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"processing_class=None: the tokenizer of {name or 'the model'} cannot "
                          f"be loaded ({first_line(error)}); give one") from error


def _adapters(config: Any) -> dict[str, Any]:
    """A LoraConfig by names of GRPOConfig."""
    if config is None:
        return {}
    if not all(hasattr(config, field) for field in _LORA):
        raise ConfigError(f"peft_config={config!r:.80}: give a peft.LoraConfig")
    given = {name: getattr(config, field) for field, name in _LORA.items()}
    modules = given["lora_target_modules"]
    given["lora_target_modules"] = sorted(modules) if isinstance(modules, set) else modules
    fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    usual = type(config)() if fields else None
    for name in (one.name for one in fields if one.name not in _IDLE | _LORA.keys()):
        if (value := getattr(config, name)) != getattr(usual, name):
            raise ConfigError(f"peft_config.{name}={value!r:.80}: adapters are plain LoRA here; "
                              "leave it out")
    return {"use_peft": True} | given
