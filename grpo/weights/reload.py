"""New weights through a checkpoint on disk: the engine reads it in place, or starts anew from it.

Slower than memory, and right wherever trainer and engine share nothing but a file system.
"""

from __future__ import annotations

import os
import re
import shutil
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from grpo.envs.model_files import write_model
from grpo.policies.handle import PauseMode
from grpo.system.threads import in_background
from grpo.weights.channel import Deadline, TransferError
from grpo.weights.fingerprint import ALL, Part
from grpo.weights.gather import TrainerRanks
from grpo.weights.shared import WeightSync
from grpo.weights.transfer import (
    agreed_plan,
    begin_comparison,
    check_option,
    describe_workers,
    go_on,
    make_plan,
)

if TYPE_CHECKING:
    from grpo.policies.handle import EngineHandle

_NAME = re.compile(r"version_\d{6,}")
_UNFINISHED = ".unfinished"


class CheckpointSync(WeightSync):
    """What both ways share: checkpoints in a folder, and a comparison with the engine.

    A trainer sharded by FSDP2 calls every method on all ranks; rank 0 writes.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, folder: str | Path, *,
                 engine: EngineHandle | None, timeout: float, version: int) -> None:
        if timeout <= 0:
            raise ValueError(f"timeout={timeout} must be positive")
        self.model, self.tokenizer, self.folder = model, tokenizer, Path(folder).absolute()
        self.engine, self.timeout, self.version = engine, timeout, version
        self.trainer = TrainerRanks(model)

    def publish(self, *, now: bool = False) -> int:
        """Write a checkpoint, bring the engine to it, remove the older ones; returns the version.

        Raises:
            TransferError: at the deadline, naming what was waited for, or with the engine's error.
                The checkpoint stays; so does the one before it.
        """
        version = self.version + 1
        deadline = Deadline(self.timeout, f"publishing weights {version}",
                            fix=f"the checkpoint is in {self.folder}; look at the engine's log")
        with self.trainer.agreed():
            path = write_checkpoint(self.model, self.tokenizer, self.folder, version)
            if self.trainer.leads:
                self._serve(path, version, deadline)
                remove_checkpoints(self.folder, keep=path)
        self.version = version
        return version

    def differing(self, part: Part = ALL) -> list[str]:
        """See :meth:`WeightSync.differing`; by fingerprint, on rank 0."""
        params = dict(self.model.named_parameters())
        wholes = (whole for _, whole in self.trainer.whole(part.choose(params.items())))
        if not self.trainer.leads:
            for _ in wholes:
                pass
            return []
        workers = describe_workers(self.engine, timeout=self.timeout)
        plan = part.choose(make_plan(params, workers))
        rounded = (whole.to(getattr(torch, item["dtype"]))
                   for item, whole in zip(plan, wholes, strict=True))
        return begin_comparison(rounded, self.engine, plan, workers, timeout=self.timeout)()

    @abstractmethod
    def _serve(self, path: Path, version: int, deadline: Deadline) -> None:
        """Bring the engine to the checkpoint in ``path``."""


class CheckpointReload(CheckpointSync):
    """The engine reads each checkpoint into the memory its weights already have.

    CUDA graphs stay valid, because addresses stay. vLLM drops LoRA adapters when it reloads, so an
    engine that holds any is refused rather than left without them.

    Args:
        model: the trainer's.
        tokenizer: saved beside the model.
        engine: whose workers read; they must see ``folder`` under the same path.
        folder: for the checkpoints ``version_000001`` and so on; only the newest stays.
        pause_mode: what happens to running requests: ``keep`` lets them go on with the new weights,
            ``wait`` finishes them first, ``abort`` ends them.
        timeout: seconds for one update.
        version: updates published before.

    Raises:
        LayoutError: if engine and trainer hold different models.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, engine: EngineHandle | None,
                 folder: str | Path, *, pause_mode: PauseMode = "keep", timeout: float = 600.0,
                 version: int = 0) -> None:
        super().__init__(model, tokenizer, folder, engine=engine, timeout=timeout, version=version)
        check_option("pause_mode", pause_mode, PauseMode)
        self.pause_mode = pause_mode
        agreed_plan(model, self.trainer, engine, timeout=timeout)

    def _serve(self, path: Path, version: int, deadline: Deadline) -> None:
        self._refuse_adapters(deadline)
        self.engine.pause(self.pause_mode, timeout=deadline.left("the engine to pause"))
        waiting_for = f"the engine's workers to read {path}"
        deadline.result(in_background(self.engine.collective_rpc, "load_checkpoint", str(path),
                                      timeout=deadline.left(waiting_for)), waiting_for)
        go_on(self.engine, version, deadline)

    def _refuse_adapters(self, deadline: Deadline) -> None:
        workers = describe_workers(self.engine, timeout=deadline.left("the engine's adapters"))
        held = sorted({adapter for worker in workers for adapter in worker["adapters"]})
        if held:
            raise TransferError(
                f"{deadline.doing}: the engine holds LoRA adapters {held}, which reloading would "
                "drop; remove them, publish adapters with LoRASync, or use EngineRestart")


class EngineRestart(CheckpointSync):
    """The engine is stopped, and another one is started from each checkpoint.

    Needs nothing of the engine but that it loads a folder, and frees its memory in between.
    Arguments that are not listed are those of :class:`CheckpointReload`.

    Args:
        stop: ends the engine and returns when it has ended; also called when none runs.
        start: starts an engine from a folder and returns its handle when it answers.
        engine: the one that runs now, if any.
        timeout: seconds for one update, start-up included.
    """

    starts_engines = True

    def __init__(self, model: nn.Module, tokenizer: Any, folder: str | Path, *,
                 stop: Callable[[], None], start: Callable[[Path], EngineHandle],
                 engine: EngineHandle | None = None, timeout: float = 900.0,
                 version: int = 0) -> None:
        super().__init__(model, tokenizer, folder, engine=engine, timeout=timeout, version=version)
        self.stop, self.start = stop, start

    def _serve(self, path: Path, version: int, deadline: Deadline) -> None:
        deadline.result(in_background(self.stop), "the old engine to stop")
        self.engine = None
        waiting_for = f"an engine to start from {path}"
        self.engine = deadline.result(in_background(self.start, path), waiting_for)
        if not self.engine.alive():
            raise TransferError(f"{deadline.doing}: the engine started from {path} is not alive; "
                                "look at its log")
        self.engine.set_version(version)

    def differing(self, part: Part = ALL) -> list[str]:
        if self.trainer.leads and self.engine is None:
            raise TransferError("no engine runs, so there is nothing to compare with; publish "
                                "first, or pass the engine that runs")
        return super().differing(part)


def write_checkpoint(model: nn.Module, tokenizer: Any, folder: Path, version: int) -> Path:
    """Write ``folder/version_NNNNNN``, loadable by Transformers and vLLM.

    The folder, which is returned, appears under its name when all of it is on the disk; a process
    killed before leaves the older checkpoints as they were. Called on every rank; rank 0 writes.
    """
    trainer = TrainerRanks(model)
    weights = trainer.whole_state(model)
    path = folder / f"version_{version:06d}"
    if not trainer.leads:
        return path
    unfinished = folder / (path.name + _UNFINISHED)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write_model(model, unfinished, weights)
    tokenizer.save_pretrained(unfinished)
    for file in [*unfinished.iterdir(), unfinished]:
        _sync(file)
    shutil.rmtree(path, ignore_errors=True)
    unfinished.rename(path)
    _sync(folder)
    return path


def remove_checkpoints(folder: Path, *, keep: Path) -> None:
    """Remove all versions in ``folder`` but ``keep``, and what was left unfinished.

    Examples:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in ("version_000001", "version_000002", "notes"):
        ...     (folder / name).mkdir()
        >>> remove_checkpoints(folder, keep=folder / "version_000002")
        >>> sorted(path.name for path in folder.iterdir())
        ['notes', 'version_000002']
    """
    for path in folder.iterdir():
        if path != keep and _NAME.fullmatch(path.name.removesuffix(_UNFINISHED)):
            shutil.rmtree(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
