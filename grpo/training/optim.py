"""An optimizer over float32 masters, whatever the precision of the weights that are trained.

A bfloat16 weight near 1 cannot move by less than 0.004, so updates at the learning rates of RL
would be rounded away. Masters keep them; the weights both sides read are rounded copies.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from grpo.training.optimizers import OptimizerName, make_optimizer, relative_lr, set_lr

Schedule = Literal["constant", "linear", "cosine"]


class MasterAdamW:
    """AdamW, or another, with float32 masters, global gradient-norm clipping and a schedule.

    Gradients of half-precision parameters are added up in float32 as soon as a backward pass has
    made them, so accumulation loses nothing. Float32 parameters are their own masters. Parameters
    are always written in place: their memory may be shared with an engine.

    Args:
        params: parameters to train.
        name: of the optimizer, see :mod:`grpo.training.optimizers`. ``adamw_cpu`` keeps masters
            and moments in the host's memory and steps there.
        lr: peak learning rate; Adafactor with ``relative_step`` chooses its own.
        betas, eps, weight_decay: of AdamW; the decay is decoupled.
        clip_grad_norm: greatest norm of all gradients together; None never clips.
        schedule: of the learning rate after the warm-up.
        warmup_steps: optimizer steps of linear warm-up.
        total_steps: optimizer steps of the run; needed by schedules that decay.
        final_lr_fraction: share of ``lr`` that a decaying schedule ends at.
        scale_parameter, relative_step: of Adafactor.

    Examples:
        >>> weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> optimizer = MasterAdamW([weight], lr=1e-5)
        >>> for _ in range(3):
        ...     weight.sum().backward()
        ...     norm = optimizer.step()
        >>> weight.tolist(), round(optimizer.masters[0][0].item(), 6)
        ([1.0, 1.0], 0.99997)
    """

    def __init__(
        self, params: Iterable[nn.Parameter], *, name: OptimizerName = "adamw", lr: float,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
        clip_grad_norm: float | None = 1.0, schedule: Schedule = "constant", warmup_steps: int = 0,
        total_steps: int | None = None, final_lr_fraction: float = 0.0,
        scale_parameter: bool = False, relative_step: bool = False,
    ) -> None:
        self.name, self.relative_step = name, relative_step
        self.params = [param for param in params if param.requires_grad]
        if not self.params:
            raise ValueError("there is no parameter to train: none has requires_grad=True")
        if schedule not in get_args(Schedule):
            raise ValueError(f"schedule={schedule!r} is unknown; use one of {get_args(Schedule)}")
        if schedule != "constant" and total_steps is None:
            raise ValueError(f"schedule={schedule!r} needs total_steps")
        place = torch.device("cpu") if name == "adamw_cpu" else None
        self.masters = [self._master_of(param, place) for param in self.params]
        self.clip_grad_norm = clip_grad_norm
        self.adamw = make_optimizer(
            name, self.masters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
            scale_parameter=scale_parameter, relative_step=relative_step)
        self.peak_lr, self.steps = lr, 0
        self._factor = functools.partial(
            lr_factor, schedule=schedule, warmup_steps=warmup_steps, total_steps=total_steps,
            final_fraction=final_lr_fraction)

    @staticmethod
    def _master_of(param: nn.Parameter, place: torch.device | None) -> Tensor:
        place = param.device if place is None else place
        dtype = torch.promote_types(param.dtype, torch.float32)
        if (param.dtype, param.device) == (dtype, place):
            return param
        master = param.detach().to(place, dtype, copy=True).requires_grad_()

        def collect(param: nn.Parameter) -> None:
            grad = param.grad.to(place, dtype)
            if master.grad is None:
                master.grad = grad
            else:
                master.grad.add_(grad)
            param.grad = None

        param.register_post_accumulate_grad_hook(collect)
        return master

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        if self.relative_step:
            return relative_lr(self.steps)
        return self.peak_lr * self._factor(self.steps)

    def step(self) -> float:
        """Clip, update the masters, write the parameters, clear the gradients.

        Returns:
            Norm of all gradients before clipping.

        Raises:
            FloatingPointError: if the norm is not finite; nothing has been updated then.
        """
        grads = [master.grad for master in self.masters if master.grad is not None]
        norm = self._total_norm(grads)
        if not math.isfinite(value := norm.item()):
            self.forget()  # or they would be added to the next ones
            raise FloatingPointError(
                f"the gradient norm is {value}; the weights are unchanged. Look at the ratio "
                "quantiles and rewards of this step, and lower optimizer.lr")
        if self.clip_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(self.masters, self.clip_grad_norm, norm)
        if not self.relative_step:
            set_lr(self.adamw, self.lr)
        self.adamw.step()
        self.steps += 1
        self.adamw.zero_grad(set_to_none=True)
        if copies := self._copies():
            params, masters = zip(*copies, strict=True)
            torch._foreach_copy_([param.data for param in params],
                                 [master.detach() for master in masters])
        return value

    def skip(self) -> float:
        """Forget the gradients and count the step, without moving anything; returns 0.0."""
        self.steps += 1
        self.forget()
        return 0.0

    def forget(self) -> None:
        """Drop the gradients."""
        self.adamw.zero_grad(set_to_none=True)

    def _total_norm(self, grads: list[Tensor]) -> Tensor:
        return nn.utils.get_total_norm(grads)

    def _copies(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Parameters that are copies of their masters, and these."""
        return [(param, master) for param, master in zip(self.params, self.masters, strict=True)
                if param is not master]

    def state_dict(self) -> dict[str, Any]:
        """Moments, masters and the number of steps; the options are the constructor's."""
        return {"name": self.name, "adamw": self.adamw.state_dict()["state"], "steps": self.steps,
                "masters": [master.detach() for _, master in self._copies()]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, with the options this optimizer was built with."""
        if (name := state.get("name", "adamw")) != self.name:
            raise ValueError(f"the checkpoint has the state of optimizer.name={name}, this run has "
                             f"optimizer.name={self.name}; set the same one")
        options = self.adamw.state_dict()["param_groups"]
        self.adamw.load_state_dict({"state": state["adamw"], "param_groups": options})
        self.steps = state["steps"]
        own = self._copies()
        if len(own) != len(state["masters"]):
            raise ValueError(
                f"the checkpoint has {len(state['masters'])} float32 masters, this run {len(own)}: "
                "it was written with another train_model.torch_dtype; set the same one")
        for (_, master), saved in zip(own, state["masters"], strict=True):
            master.copy_(saved)


def lr_factor(step: int, *, schedule: Schedule, warmup_steps: int, total_steps: int | None,
              final_fraction: float = 0.0) -> float:
    """Share of the peak learning rate at optimizer step ``step`` (from 0).

    Examples:
        >>> [lr_factor(i, schedule="linear", warmup_steps=2, total_steps=6) for i in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    decay = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return final_fraction + (1.0 - final_fraction) * decay
