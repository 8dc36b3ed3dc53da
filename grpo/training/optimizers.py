"""The arithmetic inside :class:`~grpo.training.optim.MasterAdamW`: which optimizer, made of what.

=============  ====================================================================================
name           moments
=============  ====================================================================================
``adamw``      two of float32 (float64 for such weights)
``adamw_8bit`` two of 8 bit, quantised in blocks (Dettmers et al. 2021, arXiv:2110.02861), of
               torchao, or of bitsandbytes where that is installed; small tensors stay float32
``adafactor``  rows and columns of the second moment alone, no first (Shazeer and Stern 2018,
               arXiv:1804.04235), of transformers
``adamw_cpu``  two of float32, with the masters in the host's memory
=============  ====================================================================================

Masters are float32 with all of them.
"""

from __future__ import annotations

import importlib.util
from typing import Any, get_args

import torch
from torch import Tensor

from grpo.config.keys import OptimizerName


def make_optimizer(
    name: OptimizerName, masters: list[Tensor], *, lr: float, betas: tuple[float, float],
    eps: float, weight_decay: float, scale_parameter: bool, relative_step: bool,
) -> torch.optim.Optimizer:
    """The optimizer of some float32 tensors; for the names see the table above.

    Adafactor alone can multiply the learning rate by the size of the weights (``scale_parameter``)
    or choose it by the number of steps (``relative_step``).

    Raises:
        ValueError: for an unknown name, or options that the optimizer does not read.
        ModuleNotFoundError: naming what to install.
    """
    if name not in get_args(OptimizerName):
        raise ValueError(f"name={name!r} is unknown; use one of {get_args(OptimizerName)}")
    if name != "adafactor" and (scale_parameter or relative_step):
        raise ValueError(f"scale_parameter={scale_parameter} and relative_step={relative_step} are "
                         f"options of adafactor, not of {name}; remove them")
    if name == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(masters, lr=None if relative_step else lr, weight_decay=weight_decay,
                         scale_parameter=scale_parameter, relative_step=relative_step)
    options: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    if name == "adamw_8bit":
        return _eight_bit(masters, options)
    return torch.optim.AdamW(masters, **options, fused=masters[0].is_cuda)


def _eight_bit(masters: list[Tensor], options: dict[str, Any]) -> torch.optim.Optimizer:
    if importlib.util.find_spec("torchao") is not None:
        from torchao.optim import AdamW8bit
    elif importlib.util.find_spec("bitsandbytes") is not None:
        from bitsandbytes.optim import AdamW8bit
    else:
        raise ModuleNotFoundError("adamw_8bit needs torchao or bitsandbytes: pip install torchao")
    return AdamW8bit(masters, **options)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use a learning rate from the next step on."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao compiles its step around this tensor
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def relative_lr(steps: int) -> float:
    """Adafactor's own learning rate after so many steps (arXiv:1804.04235, sec. 8).

    Examples:
        >>> relative_lr(0), relative_lr(39_999)
        (0.01, 0.005)
    """
    return min(1e-2, (steps + 1) ** -0.5)
