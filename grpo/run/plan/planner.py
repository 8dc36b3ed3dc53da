"""From configuration and options to a planner: whose memory, whose times."""

from __future__ import annotations

from pathlib import Path

import torch

from grpo.config.asynchronous import AsyncConfig
from grpo.config.schema import ConfigError
from grpo.policies.model_shape import ModelShape
from grpo.run.device_memory import capacity
from grpo.run.ledger import GIB
from grpo.run.plan.costs import H200
from grpo.run.plan.layouts import Planner
from grpo.run.plan.options import PlanOptions
from grpo.run.plan.shapes import shape_folder

_H200_MEMORY = 139.8  # GiB


def make_planner(
    config: AsyncConfig, given: frozenset[str], options: PlanOptions, folder: Path
) -> Planner:
    """A planner for the GPUs that there are to be, or for processes of this machine.

    Args:
        config: of the run.
        given: its keys that the user has given.
        options: of the plan.
        folder: for the configuration of a model that is not here.

    Raises:
        ConfigError: for a model whose sizes are not known, or that has experts, and for lengths
            that completions of the run cannot have.
    """
    _check_lengths(config, options)
    path = shape_folder(config.model.name, folder)
    if ModelShape.of(path).experts:
        raise ConfigError(f"model.name={config.model.name} has experts, and the times of such a "
                          "model are not known; give one without")
    kind = "cpu" if config.device == "cpu" else "cuda"
    planner = Planner(config, given, options, path, H200, kind, _memory(options, kind))
    if not options.calibrate:
        return planner
    if config.env.is_atropos:
        raise ConfigError("calibrate=true measures a run that generates by itself, but with "
                          "env=atropos environments ask for what is generated; remove it")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("calibrate=true measures a GPU, and PyTorch sees none; remove it, or "
                          "plan processes of this machine by device=cpu")
    from grpo.run.plan.calibrate import calibrated

    return calibrated(planner)


def _check_lengths(config: AsyncConfig, options: PlanOptions) -> None:
    """Refuse lengths that are given where all completions are as long as they may be."""
    if not config.inference_model.ignore_eos:
        return
    for key, value in (("response_tokens", config.max_tokens), ("sigma", 0.0)):
        given = getattr(options, key)
        if key in options.model_fields_set and given not in (None, value):
            raise ConfigError(f"{key}={given:g}: with inference_model.ignore_eos=true all "
                              f"completions have inference_model.max_tokens={config.max_tokens} "
                              "tokens; remove one of these")


def _memory(options: PlanOptions, kind: str) -> int:
    if options.gpu_memory_gib is not None:
        return int(options.gpu_memory_gib * GIB)
    if kind == "cpu" or torch.cuda.is_available():
        return capacity(torch.device(kind))
    return int(_H200_MEMORY * GIB)
