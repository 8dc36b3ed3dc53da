"""Checkpoints: written whole or not at all, found again, restored to the same random numbers."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from grpo.envs.model_files import write_model
from grpo.system.versions import versions
from grpo.training.checkpoint_files import (
    NotSavedError,
    first_difference,
    flush,
    free_bytes,
    record,
)
from grpo.weights.adapters import Adapter, has_adapters, save_adapter, whole_adapters
from grpo.weights.gather import TrainerRanks

logger = logging.getLogger(__name__)

#: Whole tensors of a model or of its adapters, as :func:`gather_trained` returns them.
Gathered: TypeAlias = dict[str, Tensor] | dict[str, Adapter]

#: Makes a context in which all ranks of a sharded model gather it.
Gathering: TypeAlias = Callable[[], AbstractContextManager[None]]

_PREFIX = "step_"
_ASIDE = ".replaced"  # ends the name of what waits until a new one of its step has its place


@dataclass(frozen=True)
class Checkpoint:
    """A saved state on disk."""

    folder: Path  # RUN/checkpoints/step_000100
    step: int  # iterations finished when it was written

    @property
    def model_folder(self) -> Path:
        """Model and tokenizer, loadable by ``from_pretrained`` and by vLLM."""
        return self.folder / "model"

    @property
    def adapter_folder(self) -> Path:
        """In its place where adapters are trained: what peft and vLLM load onto the model."""
        return self.folder / "adapter"

    @property
    def run_dir(self) -> Path:
        return self.folder.parent.parent

    def damage(self) -> str | None:
        """What is wrong with its files; None if they are as they were written.

        A checkpoint of an earlier version has no record of its files; it must have a state.
        """
        try:
            info = self.info()
        except FileNotFoundError:
            return "info.json is missing"
        except ValueError as error:  # not JSON, or not text
            return f"info.json cannot be read: {error}"
        if not isinstance(info, dict) or not isinstance(info.get("config"), dict):
            return "info.json is not that of a checkpoint"
        files = info.get("files")
        if files is None:
            present = (self.folder / "state.pt").is_file()
            return None if present else "state.pt is missing"
        return first_difference(self.folder, files)

    def info(self) -> dict[str, Any]:
        """Versions, configuration and counters."""
        return json.loads((self.folder / "info.json").read_text())

    def state(self) -> dict[str, Any]:
        """Optimizer, schedule, random numbers and data position."""
        return torch.load(self.folder / "state.pt", map_location="cpu", weights_only=True)


def gather_trained(model: nn.Module) -> Gathered:
    """What :func:`save_trained` writes; every rank of a sharded model calls this."""
    return whole_adapters(model) if has_adapters(model) else TrainerRanks(model).whole_state(model)


def save_trained(model: nn.Module, tokenizer: Any, folder: Path, *, prefix: str = "",
                 gathered: Gathered | None = None) -> Path:
    """Write ``{prefix}model/``, or ``{prefix}adapter/`` where adapters are trained, and return it.

    Both come with the tokenizer; peft and vLLM load an adapter onto the model the run started from.
    Of a sharded model, every rank calls this and rank 0 writes; or rank 0 alone with what all have
    ``gathered`` before.
    """
    if gathered is None:
        gathered = gather_trained(model)
    if not has_adapters(model):
        path = folder / f"{prefix}model"
        save_model(model, tokenizer, path, gathered)
        return path
    path = save_adapter(model, folder / f"{prefix}adapter", gathered)
    if TrainerRanks(model).leads:
        tokenizer.save_pretrained(path)
    return path


def _gather_and_save(model: nn.Module, tokenizer: Any, folder: Path, gathering: Gathering, *,
                     prefix: str = "") -> Path:
    with gathering():
        gathered = gather_trained(model)
    return save_trained(model, tokenizer, folder, prefix=prefix, gathered=gathered)


def save_final(model: nn.Module, tokenizer: Any, run_dir: Path, *,
               gathering: Gathering = nullcontext) -> Path:
    """Write ``final_model/`` or ``final_adapter/`` of a run, whole or not at all.

    ``gathering`` is as for :func:`save_checkpoint`.

    Raises:
        NotSavedError: if the disk is full; an earlier result is left as it was.
    """
    if not TrainerRanks(model).leads:
        return save_trained(model, tokenizer, run_dir, prefix="final_")
    partial = run_dir / "final.partial"
    with whole_or_nothing(partial):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        written = _gather_and_save(model, tokenizer, partial, gathering, prefix="final_")
        target = run_dir / written.name
        if target.exists():
            _remove(target)
        os.replace(written, target)
    _delete(partial)
    return target


def save_model(model: nn.Module, tokenizer: Any, folder: Path,
               weights: dict[str, Tensor] | None = None) -> None:
    """Write model and tokenizer so that ``AutoModelForCausalLM`` and vLLM load them.

    Of a model that FSDP2 has sharded, every rank calls this and rank 0 writes; or rank 0 alone with
    its whole ``weights``.
    """
    ranks = TrainerRanks(model)
    if weights is None:
        weights = ranks.whole_state(model)
    if not ranks.leads:
        return
    write_model(model, folder, weights)
    if (dtype := getattr(model, "trained_dtype", None)) is not None:
        model.config.dtype = dtype  # that of the files, not of the float32 masters
        model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_checkpoint(
    run_dir: Path, step: int, *, model: nn.Module, tokenizer: Any, state: dict[str, Any],
    config: dict[str, Any], keep: int = 3, protect: Iterable[Path] = (),
    gathering: Gathering = nullcontext,
) -> Checkpoint:
    """Write ``run_dir/checkpoints/step_NNNNNN`` and drop all but the ``keep`` newest up to it.

    The folder is filled under another name and renamed at the end, so a process that is killed
    while saving leaves the previous checkpoint as the newest one, also one of the same step, which
    is put aside for that moment. Of a sharded model, every rank calls this and rank 0 writes, or
    rank 0 alone calls it and ``gathering`` tells the others. An old checkpoint that cannot be
    dropped is named in a warning.

    Args:
        run_dir: folder of the run.
        step: iterations finished.
        model, tokenizer, config: of the run.
        state: tensors and plain values; random number states are added here, unless it has an
            earlier one.
        keep: number of checkpoints that stay.
        protect: folders of others that stay beside them, wherever they are.
        gathering: a context in which the model is gathered, and nothing else happens: the other
            ranks know nothing of what fails in making folders and writing files.

    Raises:
        NotSavedError: if it cannot be written, as on a full disk; then nothing is left of it, and
            nothing else is lost.
    """
    root = run_dir / "checkpoints"
    target = root / f"{_PREFIX}{step:06d}"
    if not TrainerRanks(model).leads:
        gather_trained(model)
        return Checkpoint(target, step)
    partial = target.with_name(target.name + ".partial")
    with whole_or_nothing(partial):
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(f"{_PREFIX}*.partial"):
            _delete(leftover)
        partial.mkdir()
        _gather_and_save(model, tokenizer, partial, gathering)
        torch.save({"random": random_state(), **state}, partial / "state.pt")
        info = {"step": step, "versions": versions(), "config": config, "files": record(partial)}
        (partial / "info.json").write_text(json.dumps(info, indent=2))
        flush(partial)
        if target.exists():
            aside = target.with_name(target.name + _ASIDE)
            shutil.rmtree(aside, ignore_errors=True)  # of an earlier one of the same step
            os.replace(target, aside)
        os.replace(partial, target)
    earlier = [found.folder for found in list_checkpoints(run_dir) if found.step <= step]
    protected = {folder.resolve() for folder in protect}
    for old in [*filter(_is_replaced, root.iterdir()), *earlier[:-keep]]:
        if old.resolve() not in protected:
            try:
                _remove(old)
            except OSError as error:  # the new one is there all the same
                logger.warning("%s could not be removed: %s", old, error)
    return Checkpoint(target, step)


@contextmanager
def whole_or_nothing(partial: Path) -> Iterator[None]:
    """Remove a folder that could not be made or filled.

    Raises:
        NotSavedError: where that failed, with what was free on the disk then.
    """
    try:
        yield
    # Of a full disk, PyTorch's writer makes a RuntimeError and safetensors one of its own.
    except (OSError, RuntimeError, SafetensorError) as error:
        free = free_bytes(partial)
        shutil.rmtree(partial, ignore_errors=True)
        raise NotSavedError(f"{partial} could not be written ({error}); {free / 2**20:,.1f} MiB "
                            "were free on its disk. Nothing of it is left") from error


def list_checkpoints(run_dir: Path) -> list[Checkpoint]:
    """Complete checkpoints of a run, oldest first; whether their files are intact is not read."""
    return [found for found in _folders(run_dir) if (found.folder / "info.json").exists()]


def find_checkpoint(
    resume: str, *, root: Path | Sequence[Path], exp_name: str,
    same: Callable[[dict[str, Any], Path], bool] = lambda config, run_dir: True,
) -> Checkpoint | None:
    """What ``resume=...`` means.

    Args:
        resume: ``auto``, a run's folder, or a checkpoint's folder.
        root: folder or folders where ``auto`` looks for runs, at any depth.
        exp_name: ``auto`` only takes runs of this ``train.exp_name``.
        same: ``auto`` only takes runs of whose configuration and folder this is true.

    Returns:
        The newest checkpoint whose files are intact; None for ``auto`` where there is none yet.
        Newer ones that are damaged are named in a warning.

    Raises:
        FileNotFoundError: if a named path is no checkpoint and holds none that is intact.
    """
    if resume != "auto":
        path = Path(resume)
        if not path.exists() and (aside := path.with_name(path.name + _ASIDE)).exists():
            path = aside
        if (step := _step_of(path)) is not None and path.is_dir():
            named = Checkpoint(path, step)
            if damage := named.damage():
                before = _newest_intact(path.parent.parent, below=named.step)
                raise FileNotFoundError(
                    f"resume={resume} is damaged: {damage}; " + (
                        f"the one before is {before.folder}" if before else
                        "there is none before it"))
            return named
        found = _newest_intact(path)
        if found is None:
            raise FileNotFoundError(f"resume={resume}: no checkpoint there; give a run's folder, "
                                    "one of its checkpoints/step_* folders, or 'auto'")
        return found
    roots = [root] if isinstance(root, Path) else root
    runs = {path.parent.parent.resolve() for root in roots
            for path in root.glob(f"**/checkpoints/{_PREFIX}*")}
    matching = []
    for run in runs:
        settings = [info["config"] for folder in _folders(run) if (info := _readable(folder))]
        if settings and settings[-1].get("train", {}).get("exp_name") == exp_name and same(
                settings[-1], run):
            matching.append(run)
    found = [newest for run in matching if (newest := _newest_intact(run))]
    return max(found, key=lambda c: (c.folder / "info.json").stat().st_mtime, default=None)


def _folders(run_dir: Path) -> list[Checkpoint]:
    """All checkpoints of a run, whole or not, oldest first."""
    found = [Checkpoint(folder, step) for folder in (run_dir / "checkpoints").glob(f"{_PREFIX}*")
             if (step := _step_of(folder)) is not None and not _is_replaced(folder)]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def _step_of(folder: Path) -> int | None:
    """The step of a checkpoint by its name; None for what is none."""
    number = folder.name.removesuffix(_ASIDE).removeprefix(_PREFIX)
    return int(number) if folder.name.startswith(_PREFIX) and number.isdigit() else None


def _is_replaced(folder: Path) -> bool:
    """Whether a checkpoint that was put aside is no longer needed, as another has its place."""
    return folder.suffix == _ASIDE and folder.with_suffix("").exists()


def _readable(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Its information, if that at least can be read."""
    try:
        info = checkpoint.info()
    except (FileNotFoundError, ValueError):
        return None
    return info if isinstance(info, dict) and isinstance(info.get("config"), dict) else None


def _newest_intact(run_dir: Path, *, below: int | None = None) -> Checkpoint | None:
    """The newest checkpoint of a run, before the step ``below``, whose files are intact; after a
    warning for each that is not."""
    for checkpoint in reversed(_folders(run_dir)):
        if below is not None and checkpoint.step >= below:
            continue
        if (damage := checkpoint.damage()) is None:
            return checkpoint
        logger.warning("%s is damaged: %s; it is left as it is, and the one before is looked at",
                       checkpoint.folder, damage)
    return None


def random_state() -> dict[str, Any]:
    """State of every random number generator of this process."""
    name, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "torch": torch.get_rng_state(),
             "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *rest]}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
        state["cuda_device"] = torch.cuda.current_device()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Put back what :func:`random_state` returned.

    Where other GPUs are in use, the present one gets the state of the one that was, and the others
    those of the same number.
    """
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        states, now = state["cuda"], torch.cuda.current_device()
        before = state.get("cuda_device", now)  # which earlier versions did not save
        wanted = dict(enumerate(states[:torch.cuda.device_count()]))
        if before < len(states):
            wanted[now] = states[before]
        for device, saved in wanted.items():
            torch.cuda.set_rng_state(saved, device)


def _remove(folder: Path) -> None:
    """Delete a checkpoint or model that at no moment looks complete while it is not.

    Raises:
        OSError: if it is still there under its name.
    """
    leftover = folder.with_name(folder.name + ".deleted.partial")
    shutil.rmtree(leftover, ignore_errors=True)  # of an earlier one of the same name
    os.replace(folder, leftover)
    _delete(leftover)


def _delete(leftover: Path) -> None:
    """Delete what nobody takes for complete; a warning if something of it has to stay, as on NFS
    what somebody reads."""
    shutil.rmtree(leftover, ignore_errors=True)
    if leftover.exists():
        logger.warning("%s could not be removed as a whole; remove it by hand if it stays",
                       leftover)
