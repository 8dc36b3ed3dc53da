"""The trainer on Atropos environments: what it checks of a batch, and the files it leaves."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import orjson
from tensordict import TensorDictBase
from torch import nn

from grpo import data
from grpo.atropos.collector import AtroposCollector
from grpo.atropos.convert import TEMPERATURE
from grpo.atropos.schemas import IGNORED, PROMPT_LOG_PROB
from grpo.report.loggers import write_atomically
from grpo.training.checkpoint import Checkpoint
from grpo.training.checkpoint_files import NotSavedError
from grpo.training.trainer import Trainer
from grpo.weights.shared import WeightSync

# So many batches in a row without anything to learn are a fault of the set-up.
_USELESS_BATCHES = 8
logger = logging.getLogger(__name__)


class AtroposTrainer(Trainer):
    """A :class:`~grpo.training.trainer.Trainer` whose checkpoints others find by the names of
    Atropos' trainer: ``step_3/`` for model and tokenizer, ``adapter_step_3/`` for an adapter."""

    def save(self, *, stale: bool = False) -> Checkpoint:
        """Write a checkpoint of the whole run, and the model or adapter beside it.

        Raises:
            NotSavedError: if the disk has no room for them.
        """
        checkpoint = super().save(stale=stale)
        try:
            export_step(checkpoint, self.run_dir)
        except OSError as error:  # without hard links, copies may have filled the disk
            raise NotSavedError(f"step_{checkpoint.step} beside {checkpoint.folder} could not be "
                                f"written: {error}") from error
        if self._before_batch is None:  # else a batch is in use that the checkpoint does not have
            self.collector.assembler.saved()
        return checkpoint


def export_step(checkpoint: Checkpoint, folder: Path) -> Path:
    """Make ``step_k/`` or ``adapter_step_k/`` of a checkpoint.

    Its files are hard links, which take no further space and stay when the checkpoint is dropped;
    they are copies where the file system has no hard links.
    """
    adapter = checkpoint.adapter_folder.is_dir()
    source = checkpoint.adapter_folder if adapter else checkpoint.model_folder
    target = folder / f"{'adapter_' * adapter}step_{checkpoint.step}"
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, copy_function=_link)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return target


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@dataclass(eq=False)
class CheckedCollector(AtroposCollector):
    """A collector that passes over batches of which nothing can be trained on.

    Args:
        dump_to: each batch is written here, over the one before, in the format of the API; the
            further options are those of :class:`~grpo.atropos.collector.AtroposCollector`.

    Raises:
        ValueError: from :meth:`collect`, after some such batches in a row.
    """

    dump_to: Path | None = field(default=None, kw_only=True)

    def collect(self) -> TensorDictBase:
        for _ in range(_USELESS_BATCHES):
            batch = super().collect()
            if self.dump_to is not None:
                write_atomically(self.dump_to, dumped(batch).decode())
            if (batch[data.ROW_MASK] & batch[data.ASSISTANT_MASK]).any():
                return batch
            self.assembler.counts["batches_left_out"] += 1
            logger.warning("a batch of %d rows is left out: %s", len(batch), self._why(batch))
        raise ValueError(f"{_USELESS_BATCHES} batches in a row could not be trained on; of the "
                         f"last one {self._why(batch)}")

    def _why(self, batch: TensorDictBase) -> str:
        if batch[data.ROW_MASK].any():
            return ("no token was left to train on: the prompts fill atropos.seq_len, or all is "
                    "older than atropos.max_staleness")
        found = sorted({f"{value:g}" for value in batch[TEMPERATURE].flatten().tolist()})
        return (f"all rows were sampled at temperature {', '.join(found)} (nan: with other "
                "options, such as top_p), but the trainer scores at "
                f"{self.assembler.converter.temperature:g}; set inference_model.temperature to "
                "the environments' own, and let them sample with a temperature alone")


def dumped(batch: TensorDictBase) -> bytes:
    """A batch as JSON in the format of the API, with a group for each ``group_id``."""
    groups: dict[int, dict[str, list]] = {}
    for i, number in enumerate(batch[data.GROUP_ID].tolist()):
        size = int(batch[data.ATTENTION_MASK][i].sum())
        tokens = batch[data.TOKENS][i, :size].tolist()
        trained = batch[data.ASSISTANT_MASK][i, :size].tolist()
        log_probs = batch[data.LOG_PROBS][i, :size].tolist()
        row = {
            "tokens": tokens,
            "masks": [t if yes else IGNORED for t, yes in zip(tokens, trained, strict=True)],
            "inference_logprobs": [value if yes else PROMPT_LOG_PROB
                                   for value, yes in zip(log_probs, trained, strict=True)],
            "scores": batch[data.REWARD][i].item()}
        group = groups.setdefault(number, {key: [] for key in row})
        for key, value in row.items():
            group[key].append(value)
    return orjson.dumps({"batch": list(groups.values())})


@dataclass(frozen=True)
class GivenReference:
    """Score a batch with the reference, unless its groups bring the reference's log-probs.

    Args:
        score: writes ``("next", "ref_log_probs", "full")``.
    """

    score: Callable[[TensorDictBase], TensorDictBase]

    def __call__(self, rollout: TensorDictBase) -> TensorDictBase:
        if data.REF_LOG_PROBS in rollout.keys(True):
            return rollout
        return self.score(rollout)


class GroupTeacher:
    """In the place of a teacher where groups bring its tokens; leaves batches as they are.

    Raises:
        ValueError: when called, if no group of the first batches brings the teacher's tokens.
    """

    def __init__(self) -> None:
        self._found, self._without = False, 0

    def __call__(self, rollout: TensorDictBase) -> TensorDictBase:
        self._found |= bool(rollout[data.DISTILL_LOG_PROBS].isfinite().any())
        self._without += not self._found
        if self._without == _USELESS_BATCHES:
            raise ValueError(f"distillation is on, but no group of the first {self._without} "
                             "batches brings distill_token_ids and distill_logprobs; let the "
                             "environment ask a teacher, or switch distillation off")
        return rollout


def loading_table(model: nn.Module, weights: WeightSync) -> str:
    """Name, shape, dtype, place and owner of every parameter, for ``debug_loading``."""
    places = getattr(weights, "places", {})
    unshared = set(weights.unshared())
    lines = []
    for name, param in model.named_parameters():
        where = "the engine's memory" if name in places and name not in unshared else "its own"
        trained = "trained" if param.requires_grad else "frozen"
        lines.append(f"{name}  {list(param.shape)}  {str(param.dtype)[6:]}  {param.device}  "
                     f"{where}  {trained}")
    total = sum(param.numel() * param.element_size() for param in model.parameters())
    return "\n".join([*lines, f"{len(lines)} parameters, {total / 2**20:,.1f} MiB"])
