"""Let faults strike real runs at named moments; write down what is kept and how the runs go on.

    python tools/fault_matrix.py                     # all of it: about an hour on two cores
    python tools/fault_matrix.py --modes sync --faults SIGTERM SIGKILL --phases update
    python tools/fault_matrix.py --table             # what stands in docs/faults.md

Each cell is two runs of the library's own commands, as processes that get real signals: one that
the fault strikes, and one with ``resume=auto``. Cells of one mode are forked from one process that
has imported everything. A full disk is a small tmpfs, so those cells need the right to mount. What
was measured before stays in the file; a cell that is run again is replaced.
"""

from __future__ import annotations

import argparse
import atexit
import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
for _folder in (REPO / "benchmarks", REPO / "tools", REPO):
    sys.path.insert(0, str(_folder))

from faults.cells import FAULTS, MODES, PHASES, Cell, cells, problems, table, words  # noqa: E402

RESULT = REPO / "benchmarks" / "results" / "faults_cpu.json"


def prepare(mode: str) -> None:
    """Import what the runs of a mode need, so that they are forks that need not."""
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
                   "PYTHONPATH": os.pathsep.join([str(REPO), str(REPO / "tools")])}
    from grpo.system.cores import share_cores

    share_cores()
    import grpo.report.charts
    import grpo.run.assemble_atropos
    import grpo.run.build_async
    import grpo.run.build_team
    import grpo.run.cli.script  # noqa: F401

    if mode == "process":
        from grpo.policies.first_import import import_vllm

        import_vllm()


def make_model(folder: Path) -> Path:
    """The small model that all runs start from, made in a process that ends."""
    from faults.forks import Fork

    def make() -> None:
        from grpo.envs.embedded import EmbeddedSpec, embedded_model
        from grpo.envs.tasks import make_task

        made = embedded_model(make_task("arithmetic"), EmbeddedSpec(steps=20), cache_dir=folder)
        made.rename(folder / "model")

    fork = Fork(make, log=folder / "model.log", cwd=folder, env={}, argv=["model"])
    if fork.wait(timeout=300) != 0:
        raise RuntimeError(f"no model was made: {fork.log.read_text()[-2000:]}")
    return folder / "model"


@contextmanager
def engine_server(model: Path, folder: Path) -> Iterator[str]:
    """A vLLM server that outlives the trainers that use it."""
    from grpo.server.engine_process import EngineProcess, server_command

    options = server_command(str(model), dtype="float32", max_model_len=64, max_num_seqs=64,
                             shared_weights=True, log_dir=str(folder / "server"))
    with EngineProcess(options, log_path=folder / "server.log") as server:
        atexit.unregister(server.stop)  # runs are forks of this process, which must not end it
        yield server.url


def run_mode(mode: str, chosen: list[Cell], out: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Run cells of one mode; each is in the file before the next one begins."""
    from faults.runs import Runs

    prepare(mode)
    with ExitStack() as stack:
        model = make_model(folder)
        server = stack.enter_context(engine_server(model, folder)) if mode == "server" else None
        runs = Runs(mode, folder, model=model, server=server)
        for cell in chosen:
            found = runs.observe(cell)
            found["problems"] = problems(cell, found)
            yield keep(cell, found, out)


def keep(cell: Cell, found: dict[str, Any], out: Path) -> dict[str, Any]:
    """Put a cell into the file, which others may write to as well; returns its entry."""
    from machine import commit, describe_machine, save

    row = {**vars(cell), **found, "commit": commit()}
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_name(f".{out.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = json.loads(out.read_text())["cells"] if out.exists() else []
        place = vars(cell).items()
        kept = [old for old in kept if not place <= old.items()]
        order = {found: number for number, found in enumerate(cells())}
        kept = sorted([*kept, row], key=lambda row: order[
            Cell(row["mode"], row["fault"], row["phase"])])
        save({"benchmark": "faults", "complete": len(kept) == len(cells()),
              "command": "python tools/fault_matrix.py", **describe_machine(also=("ray",)),
              "full_disk": "a tmpfs of its own for the run's folder", "cells": kept}, out)
    return row


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--missing", action="store_true",
                        help="run the cells that are not in the file yet")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--work", type=Path, help="keep the runs' folders here")
    parser.add_argument("--table", action="store_true", help="print the table of the result")
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.table:
        print(table(json.loads(args.out.read_text())))
        return 0
    wrong = 0
    # Not a TemporaryDirectory: the forks would remove it when they end as interpreters do.
    temporary = tempfile.mkdtemp(prefix="faults-")
    try:
        for mode in args.modes:
            folder = Path(args.work or temporary, mode).absolute()
            folder.mkdir(parents=True)
            chosen = cells([mode], args.faults, args.phases)
            if args.missing and args.out.exists():
                done = json.loads(args.out.read_text())["cells"]
                chosen = [cell for cell in chosen
                          if not any(vars(cell).items() <= row.items() for row in done)]
            if not chosen:
                continue
            for row in run_mode(mode, chosen, args.out, folder):
                cell = Cell(row["mode"], row["fault"], row["phase"])
                wrong += bool(row["problems"])
                print(f"{mode}, {cell.fault} in {cell.phase}: {words(cell, row)} "
                      f"({row['seconds']} s)", flush=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
