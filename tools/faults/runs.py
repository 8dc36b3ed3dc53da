"""Runs of the matrix: one that a fault strikes, one that goes on, and what was seen of both."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from faults.atropos import start_hub_and_environment
from faults.cells import EVERY, ITERATIONS, Cell, same
from faults.forks import Fork, command, kill, members
from faults.plant import FAULT, SITE, plant

REPO = Path(__file__).resolve().parents[2]
SCRIPTS = REPO / "sota-implementations" / "grpo"
ROWS = 16  # completions of an iteration
_DISK_MIB = 192  # of a disk that is to be full
_TIMEOUT = 900.0  # seconds of a run; a machine may be busy
_PACKAGES = {"grpo", "transformers", "tokenizers", "safetensors", "torch", "torchrl", "tensordict",
             "hydra", "omegaconf", "antlr4", "pydantic", "rich", "numpy", "orjson", "peft"}
_SMALL = ("env.num_envs=4", "env.repeats=4", "env.task.num_test=32", "train.eval_frequency=0",
          f"train.checkpoint_frequency={EVERY}", "optimizer.schedule=constant",
          "optimizer.lr=1e-3", f"train.total_dialog_turns={ROWS * ITERATIONS}",
          "env.reward=faults.plant:reward", "hydra.run.dir=disk/run")
_ATROPOS = ("--training-steps", str(ITERATIONS), "--batch-size", "8",
            "--gradient-accumulation-steps", str(ROWS // 8), "--max-model-len", "64",
            "--checkpoint-interval", str(EVERY), "--group-timeout", "120", "--save-path",
            "disk/run", "--log-dir", "logs", "--weight-bridge-mode", "bridge",
            "inference_model.backend=transformers", "--learning-rate", "1e-3")


class Runs:
    """Runs of one kind.

    Args:
        mode: one of :data:`faults.cells.MODES`.
        folder: in which each cell has one of its own.
        model: folder of the model that all start from.
        server: address of the engine server, where the runs have one.
    """

    def __init__(self, mode: str, folder: Path, *, model: Path, server: str | None) -> None:
        self.mode, self.folder, self.model, self.server = mode, folder, model, server
        self.undisturbed: list[dict[str, Any]] | None = None

    def observe(self, cell: Cell) -> dict[str, Any]:
        """Run a cell.

        Returns:
            Whether the fault ``struck``, ``exit`` code, iterations ``done``, step of the checkpoint
            that was ``saved`` last, ``report``, ``traceback``, ``says_resume`` and ``warned`` of
            the run that the fault strikes; ``resumed_at`` of the one that goes on; at the end the
            ``steps`` of the metrics, whether they are ``equal`` to those of an undisturbed run, all
            ``checkpoints``, commands of processes ``left`` behind, and of Atropos the ``groups``.
        """
        if cell.equal and self.undisturbed is None:
            self.undisturbed = self._baseline()
        place, started = self.folder / cell.name, time.monotonic()
        place.mkdir(parents=True)
        with ExitStack() as stack:
            stack.enter_context(_disk(place / "disk", full=cell.fault == "disk full"))
            groups, more = None, ()
            if self.mode == "Atropos":
                groups, more = start_hub_and_environment(place, self._env(place, cell), stack)
            found = self._struck(cell, place, more)
            if found["exit"] != 0:
                if cell.fault == "damaged checkpoint":
                    _damage(place / "disk" / "run" / "checkpoints" / f"step_{found['saved']:06d}")
                    found["saved"] -= EVERY
                found |= self._resumed(cell, place, more)
            rows = _rows(place)
            found["steps"] = [row["step"] for row in rows if row["step"] > 0]
            found["equal"] = same(cell, _comparable(rows), self.undisturbed) if (
                cell.equal) else None
            found["checkpoints"] = _checkpoints(place)
            if groups is not None:
                found["groups"] = groups.count()
        return found | {"seconds": round(time.monotonic() - started, 1)}

    def _baseline(self) -> list[dict[str, Any]]:
        place = self.folder / f"{self.mode}_undisturbed"
        (place / "disk").mkdir(parents=True)
        code, text, left = self._run(place, self._env(place), ())
        if code != 0 or left:
            raise RuntimeError(f"the undisturbed run ended with {code}, left {left}\n"
                               f"{text[-4000:]}")
        return _comparable(_rows(place))

    def _struck(self, cell: Cell, place: Path, more: tuple[str, ...]) -> dict[str, Any]:
        code, text, left = self._run(place, self._env(place, cell), more)
        done = _rows(place)
        saved = _checkpoints(place)
        said = " ".join(text.split())
        return {"exit": code, "done": done[-1]["step"] if done else 0,
                "saved": saved[-1] if saved else 0, "left": left,
                "struck": (place / "struck").exists(),
                "report": (place / "disk" / "run" / "report.html").exists(),
                "traceback": "Traceback" in text, "says_resume": "resume=auto" in said,
                "warned": "no checkpoint of step" in said}

    def _resumed(self, cell: Cell, place: Path, more: tuple[str, ...]) -> dict[str, Any]:
        resume = ("--resume", "auto") if self.mode == "Atropos" else ("resume=auto",)
        code, text, left = self._run(place, self._env(place), (*more, *resume), log="resumed.log")
        said = " ".join(text.split())
        word = next((word for word in ("resumed at iteration ", "resumed at step ")
                     if word in said), None)
        at = int(said.split(word)[1].split()[0]) if word else None
        found: dict[str, Any] = {"resumed_at": at, "left": left}
        if code != 0:
            found["resumed_at"] = f"exit {code} of the run that goes on: {said[-600:]}"
        if cell.fault == "damaged checkpoint":
            found["warned"] = "is damaged" in said
        return found

    def _env(self, place: Path, cell: Cell | None = None) -> dict[str, str]:
        fault = "" if cell is None else f"{cell.fault}/{cell.phase}"
        return {FAULT: fault, SITE: str(place), "COLUMNS": "300"}

    def _run(self, place: Path, env: dict[str, str], more: tuple[str, ...], *,
             log: str = "run.log") -> tuple[int | None, str, list[str]]:
        """Exit code, all output, and commands of what was left behind."""
        what, argv = self._command(more)

        def run() -> None:
            plant(self.mode)
            try:
                command(what)()
            finally:
                (place / "modules").write_text("\n".join(sys.modules))

        path = place / log
        fork = Fork(run, log=path, cwd=place, env=env, argv=[str(what), *argv])
        code = fork.wait(timeout=_TIMEOUT)
        left = _left(fork, f"{SITE}={place}") if code is not None else ["the run itself"]
        fork.end()
        import_too(place / "modules")
        return code, path.read_text(errors="replace"), left

    def _command(self, more: tuple[str, ...]) -> tuple[Path | str, list[str]]:
        if self.mode == "Atropos":
            return "grpo.run.cli.atropos", ["--model-name", str(self.model), *_ATROPOS, *more]
        kinds = {"sync": ["inference_model.backend=transformers"],
                 "async": ["inference_model.backend=transformers", "train.staleness=1",
                           "inference_model.num_devices=1"],
                 "process": ["inference_model.backend=vllm", "inference_model.engine=process"],
                 "server": ["inference_model.backend=vllm", "inference_model.engine=server",
                            f"inference_model.url={self.server}"]}
        script = SCRIPTS / ("grpo-async.py" if self.mode == "async" else "grpo.py")
        return script, [f"model.name={self.model}", *_SMALL, *kinds[self.mode], *more]


def import_too(modules: Path) -> None:
    """Import here what a run has imported, so that the next ones need not.

    Not Ray and PyTorch's compiler, whose threads and processes do not survive a fork.
    """
    names = modules.read_text().split() if modules.exists() else []
    for name in names:
        if (name.partition(".")[0] in _PACKAGES and name not in sys.modules
                and not name.startswith("torch._inductor")):
            with suppress(ImportError):  # made by a run, and of no module
                importlib.import_module(name)


@contextmanager
def _disk(folder: Path, *, full: bool) -> Iterator[None]:
    """A folder for a run; one that is to be full is a small file system of its own."""
    folder.mkdir()
    if not full:
        yield
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "tmpfs", str(folder)],
                   check=True)
    kept = folder.with_name("kept")
    try:
        yield
        shutil.copytree(folder / "run", kept, ignore=shutil.ignore_patterns("checkpoints"))
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _damage(checkpoint: Path) -> None:
    """Cut a checkpoint short, as a host that loses its power does."""
    state = checkpoint / "state.pt"
    os.truncate(state, state.stat().st_size // 2)


def _left(fork: Fork, mark: str) -> list[str]:
    """Commands of processes that a run has not ended; they get some seconds."""
    deadline = time.monotonic() + 30
    while found := members(fork.pid, mark):
        if time.monotonic() > deadline:
            kill(found)
            return sorted(found.values())
        time.sleep(0.1)
    return []


def _checkpoints(place: Path) -> list[int]:
    """Steps of the whole ones."""
    found = (place / "disk" / "run" / "checkpoints").glob("step_*/info.json")
    return sorted(int(path.parent.name.removeprefix("step_")) for path in found
                  if path.parent.name.removeprefix("step_").isdigit())


def _rows(place: Path) -> list[dict[str, Any]]:
    path = place / "disk" / "run" / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def _comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics that do not depend on the clock."""
    return [{key: value for key, value in row.items()
             if not key.startswith("time") and key != "tokens/per_second"} for row in rows]


