"""Which folder a run writes to, and what it goes on from.

A run goes on in its own folder only as what it was: from its newest checkpoint, under its name,
with the settings that its results depend on. Anything else is a branch with a folder of its own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from grpo.config.schema import Config, ConfigError
from grpo.report.loggers import METRICS_FILE, SAMPLES_FILE, read_jsonl, write_atomically
from grpo.run.identity import changed_keys, identity_changes, result_changes, with_defaults
from grpo.run.kept import Kept, changes_in, with_present_paths
from grpo.training.checkpoint import Checkpoint, find_checkpoint, list_checkpoints
from grpo.training.run_lock import locked

#: In the folder of a branch: which checkpoint it started from, and what it does otherwise.
PARENT_FILE = "parent.json"
#: Says where the folder of a script's run is, which Hydra makes anew for each.
_HYDRA = "hydra.run.dir"


def open_run(
    config: Config, run_dir: Path, at_end: ExitStack, *, key: str = _HYDRA,
    kept: Sequence[Kept] = (),
) -> tuple[Path, Checkpoint | None]:
    """Folder of the run, which is this process's own from now on, and the checkpoint to go on from.

    Args:
        config: whose ``resume`` says what to go on from.
        run_dir: of a new run, and of a branch.
        at_end: gets what lets others have the folder.
        key: that says where ``run_dir`` is. A folder that a user has named by another key than
            Hydra's is the only one in which ``auto`` looks, and the run goes on there, if its
            checkpoint lies elsewhere as a branch.
        kept: what is given to the run, which must be what the earlier one has in its folder.

    Raises:
        ConfigError: if the checkpoint belongs to a run with another model, task or seed, if the
            folder of a branch holds a run already, if that in which alone ``auto`` looks holds one
            with other settings, or if another process uses the folder.
        FileNotFoundError: if ``resume`` names a path without a checkpoint.
    """
    checkpoint = _checkpoint_of(config, run_dir, key, kept)
    if checkpoint is not None:
        run_dir = _join(checkpoint, config, run_dir, key, kept, at_end)
    else:
        at_end.enter_context(locked(run_dir))
    return run_dir, checkpoint


def _checkpoint_of(
    config: Config, run_dir: Path, key: str, kept: Sequence[Kept]
) -> Checkpoint | None:
    """What ``config.resume`` means; None for a new run."""
    if config.resume is None:
        return None
    passed_over: dict[Path, list[str]] = {}
    settings = config.model_dump(mode="json")

    def same(old: dict[str, Any], folder: Path) -> bool:
        changes = result_changes(_earlier(old, config, kept), settings) or changes_in(kept, folder)
        if changes:
            passed_over[folder] = changes
        return not changes

    roots = [Path("outputs"), Path("multirun"), run_dir] if key == _HYDRA else [run_dir]
    checkpoint = find_checkpoint(config.resume, root=roots, exp_name=config.train.exp_name,
                                 same=same)
    if checkpoint is None:
        if key != _HYDRA and (changes := passed_over.get(run_dir.resolve())):
            raise ConfigError(f"resume=auto: {run_dir} holds a run with other settings "
                              f"({'; '.join(changes)}); set these back, or give another {key}; "
                              f"with the same model, task and seed resume={run_dir} makes that a "
                              "branch")
        print(f"resume=auto: no checkpoint of {config.train.exp_name!r} with these settings yet, "
              "starting a new run")
        if passed_over:
            nearest = min(passed_over.values(), key=len)
            print(f"  the nearest of the same name has others ({'; '.join(nearest)}); "
                  "resume=PATH starts a branch from its checkpoint")
        return None
    other = identity_changes(_earlier(checkpoint.info()["config"], config, kept), settings)
    if not other and config.resume != "auto":  # which has looked
        other = changes_in(kept, checkpoint.run_dir)
    if other:
        raise ConfigError(f"resume={config.resume}: {checkpoint.folder} belongs to another run "
                          f"({'; '.join(other)}); set these back, or start a new run")
    return checkpoint


def _join(
    checkpoint: Checkpoint, config: Config, run_dir: Path, key: str, kept: Sequence[Kept],
    at_end: ExitStack,
) -> Path:
    """The locked folder in which a run goes on from a checkpoint: its own, or that of a branch."""
    info, settings = checkpoint.info(), config.model_dump(mode="json")
    old = _earlier(info["config"], config, kept)
    for change in changed_keys(old, settings):
        if not change.startswith("resume:"):
            logging.getLogger("grpo").warning("changed since the checkpoint: %s", change)
    reasons = result_changes(old, settings)
    if old["train"]["exp_name"] != config.train.exp_name:
        reasons.append(f"train.exp_name: {old['train']['exp_name']} -> {config.train.exp_name}")
    later = [found.step for found in list_checkpoints(checkpoint.run_dir)
             if found.step > checkpoint.step and found.damage() is None]
    if later:
        reasons.append(f"from step {checkpoint.step}, while the run has got to step {later[-1]}")
    if key != _HYDRA and run_dir.resolve() != checkpoint.run_dir.resolve():
        reasons.append(f"{key}: {checkpoint.run_dir} -> {run_dir}")
    if not reasons:
        at_end.enter_context(locked(checkpoint.run_dir))
        return checkpoint.run_dir
    at_end.enter_context(locked(run_dir))
    if _holds_another_run(run_dir, checkpoint):
        raise ConfigError(f"resume={config.resume} starts a branch ({'; '.join(reasons)}), which "
                          f"needs a folder of its own, but {run_dir} holds a run already; give "
                          f"another {key}")
    _start_branch(checkpoint, run_dir, reasons)
    print(f"resume={config.resume}: a branch in {run_dir} ({'; '.join(reasons)}); "
          f"{checkpoint.run_dir} stays as it is")
    return run_dir


def _holds_another_run(run_dir: Path, checkpoint: Checkpoint) -> bool:
    """Whether anything would be lost; not in a branch that was stopped before its first step."""
    if list_checkpoints(run_dir):
        return True
    rows, parent = read_jsonl(run_dir / METRICS_FILE), run_dir / PARENT_FILE
    begun = parent.exists() and json.loads(parent.read_text())["checkpoint"] == str(
        checkpoint.folder.absolute())
    return bool(rows) and not (begun and rows[-1]["step"] <= checkpoint.step)


def _start_branch(checkpoint: Checkpoint, run_dir: Path, reasons: list[str]) -> None:
    """Give a branch what its parent had recorded up to the checkpoint, and its parent's name."""
    run_dir.mkdir(parents=True, exist_ok=True)
    parent = {"checkpoint": str(checkpoint.folder.absolute()), "step": checkpoint.step,
              "changes": reasons}
    write_atomically(run_dir / PARENT_FILE, json.dumps(parent, indent=2) + "\n")
    for name in (METRICS_FILE, SAMPLES_FILE):
        rows = [row for row in read_jsonl(checkpoint.run_dir / name)
                if row["step"] <= checkpoint.step]
        if rows:
            write_atomically(run_dir / name, "".join(json.dumps(row) + "\n" for row in rows))


def _earlier(old: dict[str, Any], config: Config, kept: Sequence[Kept]) -> dict[str, Any]:
    """A saved configuration in terms of the present schema, and of the present folder."""
    defaults = type(config).model_construct().model_dump(mode="json")
    return with_present_paths(with_defaults(old, defaults), config.model_dump(mode="json"), kept)
