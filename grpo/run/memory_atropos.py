"""What a run on Atropos environments needs of its devices, checked before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from grpo.config.atropos import AtroposConfig
from grpo.run.device_memory import (
    available,
    capacity,
    check_roles_fit,
    role_ledgers,
    run_ledger,
    server_ledger,
)
from grpo.run.engine_attach import engine_gpu, trainer_gpu
from grpo.run.ledger import Ledger, Saving, check_fits
from grpo.run.memory_advice import (
    ADAPTERS,
    ONE_COPY,
    Change,
    leaner_training,
    less_held,
    savings,
    smaller_cache,
)
from grpo.run.placement import Places
from grpo.run.start import Start

LedgerOf = Callable[[AtroposConfig], Ledger]


def check_memory(start: Start, places: Places | tuple[int, ...] = ()) -> None:
    """Show the ledgers of the run's devices, and refuse a run that does not fit.

    Raises:
        DoesNotFitError: see :func:`grpo.run.ledger.check_fits`.
        ConfigError: for a GPU of the engine that cannot be used.
    """
    config = start.setup.config
    if isinstance(places, Places):
        _check_roles(start, places)
        return
    found = [(who, ledger_of, ledger_of(config), available(config, device))
             for who, device, ledger_of in devices(start)]
    for who, _, ledger, room in found:
        title = [f"memory of {who}"] if len(found) > 1 else []
        start.console.info("\n".join([*title, *ledger.table(room)]))
    for who, ledger_of, ledger, room in found:
        check_fits(ledger, room, who=who, advised=partial(advised, start, who, ledger_of, room))


def _check_roles(start: Start, places: Places) -> None:
    """The same where engines are workers on Ray, in ``places`` of their own."""
    room, ledgers = capacity(start.setup.device), _of_roles(start, places, start.setup.config)
    start.console.info("\n".join(places.plan.table()))
    for role, ledger in ledgers.items():
        start.console.info("\n".join([f"{role}:", *ledger.table(room)]))
    check_roles_fit(ledgers, places.plan, room)


def _of_roles(start: Start, places: Places, config: AtroposConfig) -> dict[str, Ledger]:
    setup = start.setup
    return role_ledgers(config, places.plan, setup.path, setup.device, setup.dtype, start.backend,
                        max_model_len=setup.max_model_len)


def devices(start: Start) -> Iterator[tuple[str, torch.device, LedgerOf]]:
    """For each device who needs it, and how much under a configuration."""
    setup = start.setup
    gpu = _own_gpu(setup.config, setup.device)
    yield "this run" if gpu is None else "the trainer", setup.device, trainer_ledger(start)
    if gpu is not None:
        own = torch.device("cuda", gpu)
        yield f"the engine on GPU {gpu}", own, lambda config: server_ledger(
            config, setup.path, own, setup.dtype, max_model_len=setup.max_model_len)


def trainer_ledger(start: Start, places: Places | tuple[int, ...] = ()) -> LedgerOf:
    """What the trainer's device needs under a configuration; for ``places`` see
    :func:`grpo.run.build_atropos.build_actor`."""
    setup = start.setup
    if isinstance(places, Places):
        return lambda config: _of_roles(start, places, config)["train"]
    return lambda config: run_ledger(
        config, setup.path, setup.device, setup.dtype, start.backend,
        max_model_len=setup.max_model_len, trained_tokens=config.atropos.seq_len,
        engine_apart=_own_gpu(config, setup.device) is not None)


def _own_gpu(config: AtroposConfig, device: torch.device) -> int | None:
    """The GPU of an engine that the run starts, if that is not the trainer's."""
    if config.inference_model.url is not None:
        return None
    gpu = engine_gpu(config, device)
    return None if gpu is None or gpu == trainer_gpu(device) else gpu


def advised(start: Start, who: str, ledger_of: LedgerOf, room: int) -> list[Saving]:
    """What would make a device of :func:`devices` fit."""
    setup, config = start.setup, start.setup.config
    changes: list[Change] = []
    if not who.startswith("the engine"):
        changes += leaner_training(config, ledger_of, setup.device, start.backend)
        changes += _other_mode(start, apart=who == "the trainer")
    if who != "the trainer":
        changes += smaller_cache(setup, ledger_of(config), room=room, backend=start.backend)
    return savings(config, ledger_of, changes)


def _other_mode(start: Start, *, apart: bool) -> Iterator[Change]:
    """Other ways of the weights; an engine ``apart`` can only be one that is restarted."""
    config = start.setup.config
    lora, sync = config.train_model.lora.enabled, config.weight_sync
    # A run that is resumed trains what it has trained before.
    to_lora = {} if lora or start.checkpoint else {"train_model": {"lora": {"enabled": True}}}
    if config.atropos.bridge:
        yield from (change for change in less_held(config)
                    if to_lora or "train_model" not in change[1])
        return
    if config.inference_model.url is not None:
        return  # which was started for the mode that it is in
    if apart:
        steps = config.atropos.restart_interval or 1
        if to_lora:
            yield (f"--weight-bridge-mode lora_restart --vllm-restart-interval {steps} "
                   f"({ADAPTERS})", {**to_lora, "inference_model": {"weight_sync": "restart"}})
        return
    shared = ONE_COPY
    if sync in ("restart", "reload"):
        shared += ", no --vllm-restart-interval"
    own = {"atropos": {"restart_interval": None}}
    if lora or to_lora:
        words = f"({shared})" if lora else f"({ADAPTERS}; {shared})"
        yield (f"--weight-bridge-mode lora_only {words}",
               {**own, **to_lora, "inference_model": {"weight_sync": "lora"}})
    if not lora:
        yield (f"--weight-bridge-mode shared_vllm ({shared})",
               {**own, "inference_model": {"weight_sync": "single_copy"}})
