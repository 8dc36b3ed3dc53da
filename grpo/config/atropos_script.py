"""A run of ``grpo.py`` or ``grpo-async.py`` on Atropos environments, as what puts runs on those
together reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, model_validator

from grpo.config.asynchronous import AsyncConfig, AsyncTrainConfig
from grpo.config.atropos import AtroposConfig
from grpo.config.model import EngineKind
from grpo.config.objective import DistillConfig
from grpo.config.schema import Config, load_config
from grpo.config.unread import Unread

#: Longest row where ``inference_model.max_model_len`` is null.
_ROW = 4096
#: The scripts' keys that stand for those of section ``atropos``.
_KEYS = {"atropos.url": "env.url", "atropos.vllm_port": "env.port",
         "atropos.forward_ports": "env.forward_ports", "--forward-ports ": "env.forward_ports=",
         "atropos.seq_len": "inference_model.max_model_len",
         "atropos.max_staleness": "train.staleness", "atropos.timeout": "train.rollout_timeout",
         " (--vllm-port, or inference_model.url)": " (inference_model.url)"}


class AtroposScriptConfig(AtroposConfig, AsyncConfig):
    """A whole run; made by :func:`as_atropos` of a configuration that has been checked."""

    unread: ClassVar[tuple[Unread, ...]] = ()

    train: AsyncTrainConfig = Field(default_factory=AsyncTrainConfig)
    distill: DistillConfig = Field(default_factory=DistillConfig)
    workers: bool = False
    """Whether engines are workers on Ray."""

    # In the place of AtroposConfig's: groups of other sizes do no harm to an objective that
    # compares the rows of each.
    @model_validator(mode="after")
    def _keys_that_belong_together(self) -> AtroposScriptConfig:
        if self.turns_per_batch % self.rows_per_optimizer_step:
            raise ValueError(f"train.optim_batch_size={self.rows_per_optimizer_step} must divide "
                             f"the {self.turns_per_batch} rows of a batch")
        return self

    @property
    def has_workers(self) -> bool:
        return self.workers

    @property
    def engine(self) -> EngineKind:
        return Config.engine.fget(self)

    @property
    def turns_per_batch(self) -> int:
        return self.atropos.batch_size


def as_atropos(
    config: Config, run_dir: Path, *, port: int, url: str
) -> AtroposScriptConfig:
    """A script's configuration with a section ``atropos``.

    Args:
        config: with ``env.dataset=atropos``.
        run_dir: folder of the run.
        port: where environments ask the policy.
        url: of the API.

    Raises:
        ConfigError: naming key and fix.
    """
    values = config.model_dump()
    asynchronous = isinstance(config, AsyncConfig)
    train: dict[str, Any] = values["train"]
    own: dict[str, Any] = {
        "url": url, "vllm_port": port, "forward_ports": config.env.forward_ports,
        "steps": config.iterations, "batch_size": config.turns_per_batch,
        "seq_len": config.inference_model.max_model_len or _ROW,
        "timeout": train["rollout_timeout"],
        "save_path": str(run_dir), "log_dir": str(run_dir / "logs"),
        # Groups do not say what version sampled them; who answers in this process knows it.
        "bridge": config.engine != "server"}
    if asynchronous:
        own["max_staleness"] = train["staleness"]
    else:
        train["staleness"] = 0
    values |= {"atropos": own, "workers": config.has_workers}
    return load_config(values, AtroposScriptConfig)


def in_script_keys(message: str) -> str:
    """A message about keys of section ``atropos``, with those of the scripts.

    Examples:
        >>> in_script_keys("atropos.vllm_port=9001, where environments would ask: taken")
        'env.port=9001, where environments would ask: taken'
    """
    for theirs, ours in _KEYS.items():
        message = message.replace(theirs, ours)
    return message
