"""The ten lines of TRL's users: ``GRPOTrainer`` and ``GRPOConfig`` over :func:`grpo.train`.

``docs/trl.md`` says what differs.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo.config.keys import ConfigError
from grpo.config.trl_names import FIELDS, translate, typed
from grpo.run.api import Result, Reward, train

#: Arguments of TRL's trainer that have nothing here -> what to do instead.
_INSTEAD = {
    "callbacks": "the run evaluates, saves and reports by itself; read metrics.jsonl",
    "optimizers": "write optim, learning_rate and lr_scheduler_type in GRPOConfig",
    "reward_processing_classes": "reward models are not loaded; ask a server that has one",
    "quantization_config": "write load_in_4bit or load_in_8bit in GRPOConfig",
    "tools": "use env=verifiers with grpo.train", "rollout_func": "write env.step with grpo.train",
    "environment_factory": "write env.step with grpo.train, or use env=verifiers",
}
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
        self.output_dir, self.overrides, self.names = output_dir, dict(overrides or {}), names
        translate(names, self.overrides, whole=True)

    def __getattr__(self, name: str) -> Any:
        if name in FIELDS:
            return self.names.get(name, FIELDS[name].default)
        raise AttributeError(f"GRPOConfig has no {name!r}; docs/trl.md lists its names")


class GRPOTrainer:
    """Train with a data set and reward functions, as TRL's trainer of that name does.

    Args:
        model: folder or hub id, or a model of Transformers, which is saved and loaded again.
        reward_funcs: functions as TRL calls them, or as this library does, or names of rewards.
        args: settings; None: TRL's defaults.
        train_dataset: rows with a ``prompt``, and columns for the reward functions; a
            ``datasets.Dataset`` or a list.
        eval_dataset: held-out rows; None: a tenth of ``train_dataset``, 100 at most.
        processing_class: tokenizer, which a ``model`` of Transformers needs; beside a name only its
            chat template is taken.
        peft_config: a ``LoraConfig``.

    Raises:
        ConfigError: for what has nothing here, with what to do instead.

    Attributes:
        result: of the run, once it is through.
    """

    def __init__(
        self, model: Any, reward_funcs: Reward | Sequence[Reward], args: GRPOConfig | None = None,
        train_dataset: Iterable[Mapping[str, Any]] | None = None,
        eval_dataset: Iterable[Mapping[str, Any]] | None = None, processing_class: Any = None,
        peft_config: Any = None, **others: Any,
    ) -> None:
        for name, value in others.items():
            if name not in _INSTEAD:
                raise TypeError(f"GRPOTrainer has no argument {name!r}")
            if value not in (None, (None, None)):
                raise ConfigError(f"{name}: it has nothing here; {_INSTEAD[name]}")
        if args is not None and not isinstance(args, GRPOConfig):
            raise ConfigError(f"args={type(args).__name__}: use grpo.run.trl.GRPOConfig, which "
                              "takes the same names")
        if train_dataset is None:
            raise ConfigError("train_dataset: there is none; give rows with a prompt")
        named = str(getattr(model, "name_or_path", model)).rpartition("/")[2]
        self.args = args or GRPOConfig(f"{named}-GRPO")
        self.folder = Path(self.args.output_dir or "trainer_output")
        self.model, self.processing_class = model, processing_class
        self.reward_funcs, self.peft_config = reward_funcs, peft_config
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.result: Result | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None) -> Result:
        """Run to the end."""
        own = dict(self.args.overrides)
        names = self.args.names | _adapters(self.peft_config)
        if resume_from_checkpoint is not None:
            names["resume_from_checkpoint"] = resume_from_checkpoint
        done = translate(names, own, whole=True)
        done.keys.pop("hydra.run.dir", None)
        for line in done.said:
            print(line)
        left = [f"{key}={typed(done.keys[key])}" for key in sorted(done.defaults - own.keys())]
        print(f"TRL's defaults for what is left open: {' '.join(left)}")
        keys = done.keys | self._start() | own
        self.result = train(keys, reward=self.reward_funcs, dataset=self.train_dataset,
                            eval_dataset=self.eval_dataset, run_dir=self.folder)
        return self.result

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
        template = getattr(self.processing_class, "chat_template", None)
        if isinstance(self.model, str | Path):
            return {"model.name": str(self.model)} | (
                {"env.chat_template": template} if template else {})
        start = self.folder / "start_model"
        if self.processing_class is None:
            raise ConfigError("processing_class: a model that is no name needs its tokenizer")
        self.model.save_pretrained(start)
        self.processing_class.save_pretrained(start)
        return {"model.name": str(start.absolute())}


def _adapters(config: Any) -> dict[str, Any]:
    """A LoraConfig by names of GRPOConfig."""
    if config is None:
        return {}
    given = {name: getattr(config, field) for field, name in _LORA.items()}
    modules = given["lora_target_modules"]
    given["lora_target_modules"] = sorted(modules) if isinstance(modules, set) else modules
    for field in ("use_dora", "use_rslora", "modules_to_save", "layers_to_transform"):
        if getattr(config, field, None):
            raise ConfigError(f"peft_config.{field}={getattr(config, field)!r}: adapters are plain "
                              "LoRA here; leave it out")
    return {"use_peft": True} | given
