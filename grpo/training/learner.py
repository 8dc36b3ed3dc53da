"""One policy update: micro-batches, backward passes, one optimizer step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from grpo import data
from grpo.objectives.grpo import GRPOLoss, total_loss
from grpo.policies.scoring import ProximalScorer
from grpo.training.optim import MasterAdamW
from grpo.weights.proof import Perturbation

DEFAULT_TOKENS_PER_MICRO_BATCH = 8_192
#: Micro-batches on a GPU are as wide as a multiple of this: attention kernels want masks aligned,
#: and compiled layers meet fewer shapes. Wider steps cost more padding than they save.
GPU_WIDTH_MULTIPLE = 16


@dataclass
class BeforeStep:
    """What has to be over before an optimizer step writes weights that an engine may read.

    Attributes:
        finish_proof: compares what a canary was answered with, while the weights are those that
            it was asked about.
        pause_engine: stops an engine that samples for others from memory it shares.
    """

    finish_proof: Callable[[], object] | None = None
    pause_engine: Callable[[], object] | None = None

    def __call__(self) -> None:
        for finish in (self.finish_proof, self.pause_engine):
            if finish is not None:
                finish()


class Learner:
    """Turn rollouts into optimizer steps.

    Args:
        loss: what is differentiated.
        optimizer: steps the parameters in place.
        rows_per_step: completions an optimizer step; must divide the rows of a rollout. Where the
            loss weighs or compares prompts, the rows of a prompt stay in one step: steps then end
            at the border of a group that is nearest to this size, which for groups of equal size
            should be a multiple of it.
        epochs: passes over each rollout.
        num_micro_batches: pieces an optimizer batch is cut into, or
        max_tokens_per_micro_batch: the token budget of a piece; exactly one of the two.
        seed: of the row order, where a rollout is cut into several optimizer batches.
        width_multiple: pad micro-batches to a multiple of this many tokens, see
            :data:`GPU_WIDTH_MULTIPLE`.
        proximal: scores each rollout before the first optimizer step on it, where the loss asks
            for it.

    Raises:
        ValueError: from :meth:`update`, if the loss takes the current policy for the proximal one
            but a rollout is used for several optimizer steps, or if a rollout has fewer groups
            than optimizer steps but the loss needs them whole.

    Attributes:
        seconds: what the last update spent in ``"train"`` (forward and backward) and in
            ``"optimizer"``.
        before_step: called before each optimizer step.
        halfway: whether the last update ended by an error after it had begun to change the
            weights, which then are those of no iteration.
    """

    def __init__(
        self, loss: GRPOLoss, optimizer: MasterAdamW, *, rows_per_step: int, epochs: int = 1,
        num_micro_batches: int | None = None, max_tokens_per_micro_batch: int | None = None,
        seed: int = 0, width_multiple: int = 1, proximal: ProximalScorer | None = None,
    ) -> None:
        loss.scorer.measure()  # before anything is generated that it could not train on
        self.loss, self.optimizer = loss, optimizer
        self.rows_per_step, self.epochs, self.seed = rows_per_step, epochs, seed
        self.proximal = proximal
        self.whole_groups = loss.terms.scope == "group"
        self.split = {"num_micro_batches": num_micro_batches,
                      "max_tokens": max_tokens_per_micro_batch, "multiple_of": width_multiple,
                      "whole_groups": self.whole_groups, "packed": loss.scorer.shares_prompts}
        self.device = next(loss.actor_network.parameters()).device
        self.seconds = {"train": 0.0, "optimizer": 0.0}
        self.before_step = BeforeStep()
        self.halfway = False
        self._perturbation: Perturbation | None = None
        self._probe: CheckpointingProbe | None = None
        if getattr(loss.actor_network, "is_gradient_checkpointing", False):
            self._probe = CheckpointingProbe(loss.actor_network)

    def update(self, rollout: TensorDictBase, *, iteration: int) -> dict[str, float]:
        """Train on a rollout.

        Args:
            rollout: dense batch with advantages, ``batch_size [N]``.
            iteration: number of the rollout; with the seed it fixes the order of the rows.

        Returns:
            Loss terms, diagnostics and gradient norm under the names of ``metrics.jsonl``: means
            over the optimizer steps, and of extremes the extremes.
        """
        start = time.perf_counter()
        self.loss.train()  # gradient checkpointing is only active in training mode
        rollout = rollout.to(self.device)
        self._check_proximal(rollout)
        self.seconds = {"train": time.perf_counter() - start, "optimizer": 0.0}
        if self.proximal is not None:
            start = time.perf_counter()
            self.proximal(rollout)
            self.seconds["proximal"] = time.perf_counter() - start
        steps = [self._optimizer_step(batch) for batch in self._optimizer_batches(rollout,
                                                                                   iteration)]
        self.halfway = False
        # A step without a single valid token reports its loss, but no ratio, entropy or ESS.
        return {key: _over_steps(key, [step[key] for step in steps if key in step])
                for key in dict.fromkeys(key for step in steps for key in step)}

    def warm_up(self, tokens_BT: Tensor, mask_BT: Tensor) -> None:
        """Have the model's layers compiled, forward and backward, on rows that teach nothing.

        It takes as long as the first batch would take longer, for which others may have to wait.

        Args:
            tokens_BT: int64, rows like those of a group.
            mask_BT: bool, which of them stand for sampled ones.
        """
        self.loss.train()
        tokens_BT, mask_BT = tokens_BT.to(self.device), mask_BT.to(self.device)
        states = self.loss.scorer.predict(tokens_BT, torch.ones_like(mask_BT), mask_BT).states
        states.backward(torch.zeros_like(states))
        self.optimizer.forget()

    def gathering(self) -> AbstractContextManager[None]:
        """Around the gathering of a model that is saved, for what other processes do then."""
        return nullcontext()

    def perturb(self) -> None:
        """Change some values of each trained parameter."""
        self._perturbation = Perturbation(self.optimizer.params)

    def restore(self) -> None:
        """Undo :meth:`perturb`, to the bit; without effect before it."""
        if self._perturbation is not None:
            self._perturbation.undo()
            self._perturbation = None

    def _optimizer_batches(
        self, rollout: TensorDictBase, iteration: int
    ) -> Iterator[TensorDictBase]:
        rows = rollout.batch_size[0]
        if rows == self.rows_per_step:
            yield from [rollout] * self.epochs
            return
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + iteration)
        # A mean over prompts weighs each of them alike only in steps that have all of its rows.
        # Micro-batches may cut it: their normalizer is that of the step.
        units = data.row_units(rollout, whole_groups=self.loss.aggregation == "prompt")
        for _ in range(self.epochs):
            order = torch.randperm(len(units), generator=generator).tolist()
            for rows in _divide([units[i] for i in order], self.rows_per_step):
                yield rollout[rows.to(self.device)]

    def _check_proximal(self, rollout: TensorDictBase) -> None:
        steps = self.epochs * rollout.batch_size[0] // self.rows_per_step
        if self.loss.terms.proximal == "current" and steps > 1:
            raise ValueError(f"proximal='current' is for one optimizer step a rollout, not {steps}:"
                             " from the second on the current policy is no longer the one before "
                             "the update; use proximal='scored' with a ProximalScorer")

    def _optimizer_step(self, batch: TensorDictBase) -> dict[str, float]:
        start = time.perf_counter()
        if self._probe is not None:
            self._probe.start()
        normalizer = self.loss.normalizer(batch)
        outputs = []
        for micro_batch in self._micro_batches(batch):
            out = self.loss(micro_batch, normalizer=normalizer)
            total_loss(out).backward()
            outputs.append(out.detach())
        if self._probe is not None:
            self._probe.check(len(outputs))
            self._probe = None  # proven once
        diagnostics = self.loss.diagnostics(self._of_all_rows(outputs))
        values = {key: value.item() for key, value in diagnostics.items()}
        trained = time.perf_counter()
        lr = self.optimizer.lr
        self.before_step()
        stepping = time.perf_counter()
        grad_norm = self._change(trains=normalizer.count > 0)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds["train"] += trained - start
        self.seconds["optimizer"] += time.perf_counter() - stepping
        named = {_metric_name(key): value for key, value in values.items()}
        total = sum(value for name, value in named.items() if name.startswith("loss/"))
        return named | {"loss/total": total, "train/grad_norm": grad_norm, "train/lr": lr}

    def _change(self, *, trains: bool) -> float:
        """Change the weights; without a single valid token there is no gradient, and momentum must
        not move them."""
        before, self.halfway = self.halfway, True
        try:
            return self.optimizer.step() if trains else self.optimizer.skip()
        except FloatingPointError:  # found before anything is changed
            self.halfway = before
            raise

    # What differs where rows are divided over ranks, see grpo.training.parallel.

    def _micro_batches(self, batch: TensorDictBase) -> Iterable[TensorDictBase]:
        """The pieces of an optimizer batch that this process computes."""
        return data.split_rows(batch, **self.split)

    def _of_all_rows(self, outputs: list[TensorDictBase]) -> list[TensorDictBase]:
        """The outputs of the loss for the whole optimizer batch."""
        return outputs


class CheckpointingProbe:
    """Count how often a decoder layer runs, to prove that its activations are recomputed.

    Hugging Face models skip gradient checkpointing without a word when they are not in training
    mode; a run that was sized for it then dies much later, out of memory.
    """

    def __init__(self, model: nn.Module) -> None:
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        if not layers:
            raise ValueError(f"train_model.gradient_checkpointing=true, but "
                             f"{type(model).__name__} has no layer that supports it; set it to "
                             "false")
        self._layer, self._hook, self.calls = layers[0], None, 0

    def start(self) -> None:
        """Count from now on: generation and canary ran this layer before."""
        self.calls = 0
        self._hook = self._layer.register_forward_pre_hook(self._count)

    def _count(self, module: nn.Module, args: tuple) -> None:
        self.calls += 1

    def check(self, forward_passes: int) -> None:
        """Raise unless each forward pass was computed a second time for its backward pass."""
        self._hook.remove()
        if self.calls < 2 * forward_passes:
            raise RuntimeError(
                f"gradient checkpointing is on but its first layer ran {self.calls} times in "
                f"{forward_passes} forward and backward passes, not {2 * forward_passes}: "
                "activations are kept, not recomputed")


def _divide(units: list[Tensor], rows_per_step: int) -> Iterator[Tensor]:
    """Rows of each optimizer step, at least one unit each: steps end at the nearest border."""
    ends_U = torch.tensor([len(unit) for unit in units]).cumsum(0)
    rows = int(ends_U[-1])
    steps = -(-rows // rows_per_step)
    if steps > len(units):
        raise ValueError(f"a rollout of {rows} rows is to make {steps} optimizer steps of "
                         f"{rows_per_step} rows, but has {len(units)} groups, whose rows must stay "
                         "together; raise train.optim_batch_size (rows_per_step) to the size of a "
                         "group or more")
    start = 0
    for step in range(1, steps + 1):
        possible_U = ends_U[start : len(units) - (steps - step)]  # the others are left one each
        stop = start + 1 + int((possible_U - step * rows_per_step).abs().argmin())
        yield torch.cat(units[start:stop])
        start = stop


def _over_steps(key: str, values: list[float]) -> float:
    """One number for several optimizer steps: extremes stay extremes, the rest is averaged."""
    if key.endswith(("ratio_max", "abs_max")):
        return max(values)
    return min(values) if key.endswith("ratio_min") else sum(values) / len(values)


def _metric_name(key: str) -> str:
    return key.replace("loss_", "loss/", 1) if key.startswith("loss_") else f"policy/{key}"
