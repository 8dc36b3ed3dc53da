"""Data-parallel training with FSDP2: every rank holds a slice of each parameter, of its gradient
and of its optimizer state, and computes on a share of the rows.

A run at any number of ranks makes the updates of a run in one process, up to rounding: all ranks
are given the same rollout, each optimizer batch and its normalizer are those of one process, and
only then are rows dealt to ranks. Checkpoints have the format of one process, too, so a run may go
on at another number of ranks.

Every rank, in this order::

    ranks = Ranks.join("cuda")
    shard_model(loss.scorer, ranks)
    optimizer = ShardedAdamW(loss.actor_network, lr=1e-6)
    learner = ParallelLearner(loss, optimizer, ranks=ranks, rows_per_step=512,
                              max_tokens_per_micro_batch=16_384)
    learner.update(ranks.share(rollout), iteration=0)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from grpo import data
from grpo.objectives.grpo import GRPOLoss
from grpo.objectives.scorer import TokenScorer
from grpo.policies.scoring import ProximalScorer, score_rollout, scoring_parts
from grpo.training.learner import Learner
from grpo.training.optim import MasterAdamW
from grpo.training.ranks import Ranks, divide_rows

Gather = Literal["layer", "step"]
Reduce = Literal["step", "micro_batch"]

_HALVES = (torch.bfloat16, torch.float16)
_COMPARED = 1024  # numbers of each parameter


def shard_model(scorer: TokenScorer, ranks: Ranks) -> None:
    """Leave each rank a slice of every parameter of ``scorer.model``, in place.

    Trained parameters become float32: their slices are the masters that the optimizer steps. As
    they are gathered for a forward or backward pass they are rounded to the dtype they had before,
    and gradients are added up over ranks in float32. Names and order of the parameters stay, and a
    tied embedding stays one parameter.

    Each decoder layer is gathered by itself. Embeddings and output matrix stay gathered from the
    beginning of a forward pass to the end of the backward pass, because the loss multiplies with
    the output matrix outside of the model. After a pass without gradient all are slices again.

    Args:
        scorer: of the loss. Its model may be on the CPU: layers are moved to the rank's device one
            at a time. Call its :meth:`~grpo.objectives.scorer.TokenScorer.predict` (as the loss
            does) or the scorer itself; the model alone cannot be called any more.
        ranks: over which the model is sharded.

    Raises:
        ValueError: if the model is sharded already, is not the same on all ranks, or has trained
            parameters of several dtypes.
    """
    model = scorer.model
    if isinstance(scorer, FSDPModule):
        raise ValueError(f"{type(model).__name__} is sharded already; call shard_model once")
    # Models that were initialised differently differ everywhere.
    ranks.check_same(TensorDict({name: param.detach().flatten()[:_COMPARED]
                                 for name, param in model.named_parameters()}))
    dtypes = {param.dtype for param in model.parameters() if param.requires_grad}
    if len(dtypes) > 1:
        raise ValueError(f"trained parameters have dtypes {sorted(map(str, dtypes))}; load the "
                         "model in one of them")
    half = next((dtype for dtype in dtypes if dtype in _HALVES), None)
    # Inputs are not cast: layers are given what they are given in one process.
    policy = MixedPrecisionPolicy(
        param_dtype=half, reduce_dtype=half and torch.float32, cast_forward_inputs=False)
    for layer in [*decoder_layers(model), scorer]:
        for param in layer.parameters():
            if param.requires_grad and param.dtype == half:
                param.data = param.data.float()
        fully_shard(layer, mesh=ranks.mesh, mp_policy=policy)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            # The normalizer counts the tokens of all ranks, so gradients are added, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for method in ("predict", "_measure"):
        register_fsdp_forward_method(scorer, method)
    scorer.register_forward_hook(_reshard_without_gradient)
    model.trained_dtype = half  # what checkpoints and engines are given
    scorer.measure()
    scorer.reshard()


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Layers that are gathered one at a time, innermost first."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules()
            if isinstance(module, GradientCheckpointingLayer)][::-1]


def _reshard_without_gradient(scorer: FSDPModule, args: tuple, output: Any) -> None:
    # A backward pass would do so.
    if not torch.is_grad_enabled():
        scorer.reshard()


class ShardedAdamW(MasterAdamW):
    """:class:`~grpo.training.optim.MasterAdamW` on the slices of a sharded model.

    Slices are float32, so they are their own masters. The state that is saved and loaded has the
    format of one process: whole tensors, and masters where the model computes in half precision.

    Args:
        model: sharded by :func:`shard_model`.
        options: of :class:`~grpo.training.optim.MasterAdamW`.

    Raises:
        ValueError: for a model that is not sharded, and for another optimizer than AdamW.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        if (name := options.get("name", "adamw")) != "adamw":
            raise ValueError(f"optimizer.name={name} does not know the slices of a sharded model; "
                             "use optimizer.name=adamw, or train on one device")
        super().__init__(model.parameters(), **options)
        if not all(isinstance(param, DTensor) for param in self.params):
            raise ValueError(f"{type(model).__name__} is not sharded; call shard_model before "
                             "building its optimizer")
        self._saves_masters = model.trained_dtype is not None

    def _total_norm(self, grads: list[Tensor]) -> Tensor:
        norm = super()._total_norm([grad.to_local() for grad in grads])
        squared = norm.double().square()
        torch.distributed.all_reduce(squared)
        return squared.sqrt().to(norm.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Moments, masters and steps as whole tensors on rank 0's CPU; other ranks get ``{}``.

        Every rank must call it. Tensors are gathered one at a time.
        """
        state = super().state_dict()
        masters = [param.detach() for param in self.params] if self._saves_masters else []
        whole = {
            "adamw": {index: {name: _whole(value) for name, value in moments.items()}
                      for index, moments in state["adamw"].items()},
            "steps": state["steps"],
            "masters": [_whole(master) for master in masters]}
        return whole if torch.distributed.get_rank() == 0 else {}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep this rank's slices of a saved state; every rank is given all of it."""
        masters = state["masters"]
        if len(masters) != len(self.params) * self._saves_masters:
            raise ValueError(
                f"the checkpoint has {len(masters)} float32 masters, this run "
                f"{len(self.params) * self._saves_masters}: it was written with another "
                "train_model.torch_dtype; set the same one")
        moments = {index: {name: _slice_like(self.params[index], value)
                           for name, value in of_param.items()}
                   for index, of_param in state["adamw"].items()}
        super().load_state_dict({**state, "adamw": moments, "masters": []})
        for param, master in zip(self.params, masters, strict=False):
            param.copy_(_slice_like(param, master))


def _whole(value: Any) -> Any:
    """A tensor gathered on every rank and kept on rank 0's CPU."""
    if not isinstance(value, DTensor):
        return value
    value = value.full_tensor()
    return value.cpu() if torch.distributed.get_rank() == 0 else None


def _slice_like(param: DTensor, value: Tensor) -> Tensor:
    """This rank's part of a whole tensor, cut as ``param`` is; AdamW's step count stays."""
    if value.shape != param.shape:
        return value
    # Without a source rank nothing is sent: each cuts its own.
    return distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)


class ParallelLearner(Learner):
    """A :class:`~grpo.training.learner.Learner` whose rows are divided over ranks.

    Rows (whole groups where the objective compares them) are dealt by length, and each rank cuts
    its own into micro-batches: ``num_micro_batches`` and ``max_tokens_per_micro_batch`` are those
    of a rank. A rank with fewer micro-batches than another repeats a row without loss tokens, so
    that all take part in every exchange. Metrics are those of all rows, the same on every rank.

    Args:
        loss: whose model has been sharded by :func:`shard_model`.
        optimizer: of the sharded model.
        ranks: over which the model is sharded.
        gather: ``"layer"`` gathers the parameters of a layer for each of its passes; ``"step"``
            keeps what was gathered until the last micro-batch of an optimizer step, which saves
            communication where the whole model fits.
        reduce: ``"step"`` adds gradients up over the ranks once an optimizer step, until when each
            keeps them whole in float32; ``"micro_batch"`` does so after each one and keeps slices.
        proximal: scores each rollout before its first step; its rows are divided, too.
        options: the others of :class:`~grpo.training.learner.Learner`.

    Raises:
        ValueError: for an unknown option or a model that is not sharded, and from :meth:`update`
            for rollouts that differ between ranks.
    """

    def __init__(
        self, loss: GRPOLoss, optimizer: ShardedAdamW, *, ranks: Ranks, gather: Gather = "layer",
        reduce: Reduce = "step", proximal: ProximalScorer | None = None, **options: Any,
    ) -> None:
        for name, value, kind in (("gather", gather, Gather), ("reduce", reduce, Reduce)):
            if value not in get_args(kind):
                raise ValueError(f"{name}={value!r} is unknown; use one of {get_args(kind)}")
        if not isinstance(loss.scorer, FSDPModule):
            raise ValueError("the loss's model is not sharded; call shard_model(loss.scorer, "
                             "ranks) first")
        if proximal is not None:
            proximal = DividedProximalScorer(proximal, ranks)
        super().__init__(loss, optimizer, proximal=proximal, **options)
        self.ranks, self.gather, self.reduce = ranks, gather, reduce
        for layer in decoder_layers(loss.actor_network):
            layer.set_reshard_after_forward(gather == "layer")

    def update(self, rollout: TensorDictBase, *, iteration: int) -> dict[str, float]:
        """See :meth:`Learner.update`; every rank is given the same rollout."""
        self.ranks.check_same(rollout)
        return super().update(rollout, iteration=iteration)

    def _micro_batches(self, batch: TensorDictBase) -> Iterator[TensorDictBase]:
        rows = divide_rows(batch, self.ranks.count, whole_groups=self.whole_groups)[self.ranks.rank]
        parts = data.split_rows(batch[rows], **self.split) if len(rows) else []
        passes = self.ranks.greatest(len(parts))
        parts += [without_loss(batch)] * (passes - len(parts))
        scorer = self.loss.scorer
        for number, part in enumerate(parts, 1):
            last = number == passes
            scorer.set_requires_gradient_sync(last or self.reduce == "micro_batch")
            scorer.set_reshard_after_backward(last or self.gather == "layer")
            yield part

    def _of_all_rows(self, outputs: list[TensorDictBase]) -> list[TensorDictBase]:
        losses = torch.stack([sum(out[key] for out in outputs) for key in self.loss.out_keys])
        named = dict(zip(self.loss.out_keys, self.ranks.sum(losses), strict=True))
        stats = torch.cat([out["token_stats"] for out in outputs])
        return [TensorDict({**named, "token_stats": self.ranks.concatenate(stats)})]


def without_loss(batch: TensorDictBase) -> TensorDict:
    """The shortest row of a batch with no token in the loss: its gradient is zero."""
    shortest = int(data.lengths(batch).argmin())
    row = data.trim(batch[shortest : shortest + 1])
    row[data.ASSISTANT_MASK] = torch.zeros_like(row[data.ASSISTANT_MASK])
    return row


class DividedProximalScorer(ProximalScorer):
    """A :class:`~grpo.policies.scoring.ProximalScorer` where each rank scores a share of the rows.
    """

    def __init__(self, scorer: ProximalScorer, ranks: Ranks) -> None:
        super().__init__(scorer.scorer, max_tokens=scorer.max_tokens,
                         entropy_fraction=scorer.entropy_fraction)
        self.ranks = ranks

    def _score(self, rollout: TensorDictBase) -> tuple[Tensor, Tensor]:
        return score_divided(self.scorer, rollout, self.ranks, max_tokens=self.max_tokens)


def score_divided(
    scorer: TokenScorer, rollout: TensorDictBase, ranks: Ranks, *, max_tokens: int
) -> tuple[Tensor, Tensor]:
    """:func:`~grpo.policies.scoring.score_rollout` with the rows of a rollout, which is the same on
    every rank, divided over the ranks; each has ``(log_probs_BT, entropy_BT)`` of all rows then."""
    rows = divide_rows(rollout, ranks.count, whole_groups=False)[ranks.rank]
    rows = rows.to(rollout[data.TOKENS].device)
    scores_2BT = torch.zeros(2, *rollout[data.LOG_PROBS].shape, dtype=rollout[data.LOG_PROBS].dtype,
                             device=rows.device)
    own = rollout[rows]
    passes = sum(1 for _ in scoring_parts(scorer, own, max_tokens)) if len(rows) else 0
    missing = ranks.greatest(passes) - passes  # before the first pass, in which ranks meet
    if passes:
        scores_2BT[:, rows] = torch.stack(score_rollout(scorer, own, max_tokens=max_tokens))
    for _ in range(missing):
        score_rollout(scorer, without_loss(rollout), max_tokens=max_tokens)
    log_probs_BT, entropy_BT = ranks.sum(scores_2BT).to(rows.device)
    return log_probs_BT, entropy_BT


class ShardedReference:
    """The :class:`~grpo.policies.scoring.ReferenceScorer` of ranks that have a part each of the
    reference.

    All are given the same rollouts, in the same order; each forwards a share of the rows, and has
    the log-probs of all then.

    Args:
        model: the whole reference, of which this leaves each rank its part; it may be on the CPU.
        ranks: that share it.
        temperature, max_tokens, fp32_head: see :class:`~grpo.policies.scoring.ReferenceScorer`.
    """

    def __init__(
        self, model: nn.Module, ranks: Ranks, *, temperature: float, max_tokens: int,
        fp32_head: bool = False,
    ) -> None:
        self.scorer = TokenScorer(model.eval().requires_grad_(False), temperature=temperature,
                                  fp32_head=fp32_head)
        shard_model(self.scorer, ranks)
        self.ranks, self.max_tokens = ranks, max_tokens

    def __call__(self, rollout: TensorDictBase) -> TensorDictBase:
        rollout[data.REF_LOG_PROBS], _ = score_divided(self.scorer, rollout, self.ranks,
                                                       max_tokens=self.max_tokens)
        return rollout
