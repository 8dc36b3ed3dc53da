"""What a sweep ends with: a table on the screen and a plot in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf


class SweepResults(Callback):
    """Hydra calls it when all runs of ``--multirun`` are through."""

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        from rich.console import Console

        from grpo.report.sweep import PLOT, plot, results_table

        folder = Path(config.hydra.runtime.cwd, config.hydra.sweep.dir)
        runs = read_runs(folder)
        if len(runs) < 2:
            return
        console = Console()
        console.print(results_table(runs))
        try:
            plot(runs, folder / PLOT)
            console.print(f"  plot     {folder / PLOT}", soft_wrap=True, highlight=False)
        except OSError as error:  # the runs have their own
            console.print(f"  plot     not written: {error}", soft_wrap=True)


def read_runs(folder: Path) -> list[Any]:
    """The runs of a sweep's folder as :class:`grpo.report.sweep.Run`, by their numbers."""
    from grpo.report.history import History
    from grpo.report.sweep import Run

    found = []
    for path in sorted(folder.glob("*/.hydra/overrides.yaml"), key=_number):
        typed = OmegaConf.load(path) or []
        changes = dict(text.lstrip("+~").split("=", 1) for text in typed if "=" in text)
        run = path.parents[1]
        found.append(Run(run.name, changes, History.read(run)))
    return found


def _number(path: Path) -> tuple[int, str]:
    name = path.parents[1].name
    return (int(name) if name.isdigit() else 1 << 30, name)
