"""What a run on Atropos environments needs of its devices, checked before anything is started."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from grpo.config_atropos import AtroposConfig
from grpo.devices import available, run_ledger, server_ledger
from grpo.engine_attach import engine_gpu, trainer_gpu
from grpo.ledger import Ledger, check_fits
from grpo.start_atropos import Start
from grpo.training.console import Console


def check_memory(start: Start, console: Console) -> None:
    """Show the ledgers of the run's devices, and refuse a run that does not fit.

    Args:
        start: what the run starts from.
        console: shows the tables.

    Raises:
        DoesNotFitError: naming the greatest rows and what would help by how much.
        ConfigError: for a GPU of the engine that cannot be used.
    """
    found = list(_ledgers(start))
    for who, ledger, room in found:
        title = [f"memory of {who}"] if len(found) > 1 else []
        console.info("\n".join([*title, *ledger.table(room)]))
    for who, ledger, room in found:
        check_fits(ledger, room, who=who)


def _ledgers(start: Start) -> Iterator[tuple[str, Ledger, int]]:
    """For each device who needs it, how much, and how much there is."""
    gpu = _own_gpu(start.config, start.device)
    ledger = _trainer_ledger(start, start.config)
    yield ("this run" if gpu is None else "the trainer"), ledger, available(
        start.config, start.device)
    if gpu is not None:
        device = torch.device("cuda", gpu)
        ledger = server_ledger(start.config, start.model, device, start.dtype,
                               max_model_len=start.max_model_len)
        yield f"the engine on GPU {gpu}", ledger, available(start.config, device)


def _trainer_ledger(start: Start, config: AtroposConfig) -> Ledger:
    return run_ledger(
        config, start.model, start.device, start.dtype, start.backend,
        max_model_len=start.max_model_len, trained_tokens=config.atropos.seq_len,
        engine_apart=_own_gpu(config, start.device) is not None)


def _own_gpu(config: AtroposConfig, device: torch.device) -> int | None:
    """The GPU of an engine that the run starts, if that is not the trainer's."""
    if config.inference_model.url is not None:
        return None
    gpu = engine_gpu(config, device)
    return None if gpu is None or gpu == trainer_gpu(device) else gpu
