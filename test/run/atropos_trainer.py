"""A trainer on Atropos environments, put together as the commands do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from grpo.atropos.trainer import AtroposTrainer
from grpo.config.atropos import AtroposConfig
from grpo.run.assemble_atropos import assemble_atropos
from grpo.run.resume import open_run


@contextmanager
def atropos_trainer(config: AtroposConfig, **options: Any) -> Iterator[AtroposTrainer]:
    """A trainer that is ready to ``fit``; at the end of the context all that it started is ended.
    """
    with ExitStack() as at_end:
        run_dir, checkpoint = open_run(config, Path(config.atropos.save_path), at_end,
                                       key="atropos.save_path")
        yield assemble_atropos(config, run_dir, checkpoint, at_end, **options)
