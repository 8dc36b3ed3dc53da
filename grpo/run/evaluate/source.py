"""Which model ``model.name`` means: a hub id, a folder, or what a run has written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from grpo.config.env import EnvConfig
from grpo.config.keys import ATROPOS, ConfigError
from grpo.report.loggers import METRICS_FILE, read_jsonl


@dataclass(frozen=True)
class Source:
    """A model to be evaluated."""

    model: str  # hub id, folder, or ``embedded``
    adapter: Path | None = None  # folder of adapters upon it
    iteration: int = 0  # of the run that wrote it, as far as it is known


def find_source(name: str, *, key: str = "model.name") -> Source:
    """What a name means.

    A run's folder stands for ``final_model/`` or ``final_adapter/`` in it, a checkpoint's for its
    model or adapter. Adapters lie on the model that their ``adapter_config.json`` names. ``key`` is
    what the name was given as, for messages.

    Raises:
        ConfigError: for a folder of a run without a result, or adapters that name no model.
    """
    folder = Path(name).expanduser()
    if name == "embedded" or not folder.is_dir() or (folder / "config.json").exists():
        return Source(name, iteration=_iteration(folder))
    for part in ("final_model", "final_adapter", "model", "adapter"):
        if (folder / part).is_dir():
            return find_source(str(folder / part), key=key)
    if not (folder / "adapter_config.json").exists():
        if (folder / "checkpoints").is_dir():
            raise ConfigError(f"{key}={name} is a run that has no final_model/ yet; give one "
                              f"of its checkpoints, such as {folder}/checkpoints/step_000100")
        return Source(name)  # whose missing files are named where it is loaded
    settings = json.loads((folder / "adapter_config.json").read_text())
    if not (base := settings.get("base_model_name_or_path")):
        raise ConfigError(f"{key}={name}: its adapter_config.json does not say which model it "
                          "is for; set base_model_name_or_path in it")
    return Source(base, folder, _iteration(folder))


def saved_env(name: str) -> dict[str, Any] | None:
    """Section ``env`` of the run that a folder is or belongs to, from its newest checkpoint; None
    where there is none.

    Of ``atropos-grpo``, which does not read the section unless it measures that task, it says what
    the problems were: those of Atropos environments.
    """
    folder = Path(name).expanduser().resolve()
    for part in (folder, *folder.parents[:2]) if folder.is_dir() else ():
        for info in sorted(part.glob("checkpoints/step_*/info.json"), reverse=True):
            try:
                config = json.loads(info.read_text())["config"]
                env = config["env"]
                if "atropos" in config and not config["atropos"].get("evaluate"):
                    return {"dataset": ATROPOS}
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue
            return {key: value for key, value in env.items() if key in EnvConfig.model_fields}
    return None


def refuse_atropos(dataset: str, given: str) -> None:
    """Refuse environments that are asked for by ``given``, but bring no held-out problems."""
    if dataset == ATROPOS:
        raise ConfigError(f"{given}: environments of Atropos evaluate themselves, see "
                          "steps_per_eval; choose another env, such as env=gsm8k")


def with_saved_env(values: DictConfig, saved: Mapping[str, Any], keys: Sequence[str]) -> DictConfig:
    """A configuration with section ``env`` as it was saved, and what is typed of it upon that.

    Raises:
        ConfigError: for a key that is taken away (``~env.task.seed``).
    """
    env = OmegaConf.create({**OmegaConf.to_container(values.env), **saved})
    for one in OverridesParser.create().parse_overrides(
            [text for text in keys if text.lstrip("+~").startswith("env.")]):
        if one.is_delete():
            raise ConfigError(f"{one.input_line} takes a key from section env of the run; type all "
                              "of it, with env=TASK")
        OmegaConf.update(env, one.key_or_group.removeprefix("env."), one.value(), force_add=True)
    values = OmegaConf.create(OmegaConf.to_container(values))
    values.env = env
    return values


def _iteration(folder: Path) -> int:
    """The iteration after which a run wrote a folder; 0 where that is not known."""
    for part in (folder, folder.parent):
        number = part.name.removeprefix("step_")
        if part.name.startswith("step_") and number.isdigit():
            return int(number)
    rows = read_jsonl(folder.parent / METRICS_FILE) if folder.name.startswith("final_") else []
    return rows[-1]["step"] if rows else 0
