"""What a run from Python keeps of what it was given in its own folder: rows, and a model that is no
name.

The configuration names these folders, but their paths do not say whether two runs are the same: a
folder may be moved, a branch has one of its own, and other rows may be given for the same. So what
is in them is compared in their place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.config.schema import Config
from grpo.run.given import Rows, write_rows
from grpo.training.checkpoint import Checkpoint


@dataclass(frozen=True)
class Kept:
    """Something that was given, and the folder within the run's where all its processes find it.

    Attributes:
        key: that names the folder, of a section and a field.
        folder: its name.
        change: what is in such a folder otherwise than what is given now, as ``name: old -> new``;
            None if nothing is.
        write: what is given into such a folder.
    """

    key: str
    folder: str
    change: Callable[[Path], str | None]
    write: Callable[[Path], None]


def kept_rows(
    rows: Rows, held_out: Rows | None, *, what: str = "dataset", held_out_what: str = "eval_dataset"
) -> Kept:
    """Rows, called as where they were given."""
    given = {"train": (what, rows)} | ({} if held_out is None else {
        "test": (held_out_what, held_out)})

    def change(folder: Path) -> str | None:
        found = (_other_rows(folder / f"{name}.jsonl", *one) for name, one in given.items())
        return next((one for one in found if one), None)

    return Kept("env.path", "dataset", change, lambda folder: write_rows(rows, held_out, folder))


def _other_rows(path: Path, what: str, rows: Rows) -> str | None:
    """How rows differ from those of a file, in which the order of columns says nothing."""
    try:
        before = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        return f"{what}: {path} is not there to be compared ({error})"
    if len(before) != len(rows):
        return f"{what}: {len(before)} rows -> {len(rows)}"
    for number, (old, row) in enumerate(zip(before, rows, strict=True)):
        new = json.loads(json.dumps(row))
        for column in dict.fromkeys([*old, *new]):
            values = old.get(column), new.get(column)
            if (column in old) != (column in new) or _text(values[0]) != _text(values[1]):
                return (f"{what}: row {number}: {column}={values[0]!r:.80} -> {values[1]!r:.80}")
    return None


def _text(value: Any) -> str:
    """By which values are compared, so that NaN is what it was."""
    return json.dumps(value, sort_keys=True)


def other_weights(before: Path, now: Path) -> str | None:
    """The first tensor in which a saved model differs from another; None if none does.

    However many files either has, tensors are read one at a time.
    """
    import torch
    from safetensors import safe_open

    def places(folder: Path) -> dict[str, Path]:
        found = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                found |= dict.fromkeys(file.keys(), path)
        return found

    def tensor(path: Path, name: str) -> torch.Tensor:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)

    old, new = places(before), places(now)
    for name in sorted(old.keys() | new.keys()):
        if name not in old or name not in new:
            return name
        one, other = tensor(old[name], name), tensor(new[name], name)
        if one.dtype != other.dtype or not torch.equal(one, other):
            return name
    return None


# -- in a run's folder -----------------------------------------------------------------------------


def changes_in(kept: Iterable[Kept], run_dir: Path) -> list[str]:
    """What the folder of a run has otherwise than what is given now."""
    return [change for one in kept if (change := one.change(run_dir / one.folder))]


def with_present_paths(
    old: Mapping[str, Any], new: Mapping[str, Any], kept: Sequence[Kept]
) -> dict[str, Any]:
    """An earlier configuration, which names what its run kept by the paths of the present one.

    Examples:
        >>> rows = kept_rows([{"prompt": "1+1="}], None)
        >>> with_present_paths({"env": {"path": "/a/dataset"}}, {"env": {"path": "/b/dataset"}},
        ...                    [rows])
        {'env': {'path': '/b/dataset'}}
    """
    old = dict(old)
    for one in kept:
        section, name = one.key.split(".")
        if Path(str(old.get(section, {}).get(name))).name == one.folder:
            old[section] = old[section] | {name: new[section][name]}
    return old


def keep(
    config: Config, kept: Iterable[Kept], run_dir: Path, checkpoint: Checkpoint | None
) -> Config:
    """Write what a new run or a branch is given, which a run that goes on has in its folder.

    Returns:
        The configuration, with where it is now.
    """
    goes_on = checkpoint is not None and checkpoint.run_dir.resolve() == run_dir.resolve()
    for one in kept:
        path = (run_dir / one.folder).absolute()
        if not goes_on:
            one.write(path)
        section, name = one.key.split(".")
        config = config.model_copy(update={
            section: getattr(config, section).model_copy(update={name: str(path)})})
    return config
