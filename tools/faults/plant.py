"""Faults that strike a real run at a named moment, and the reward functions of such runs.

The trainer is changed in its own process, before its command begins: what is named here happens in
the middle of a call of the library. Rewards are computed elsewhere in some runs, so a file says
that the moment has come and to whom, and is taken away by who strikes first.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.cells import ARMED_AT

#: Name of the cell's fault and phase, ``SIGTERM/reward``; none in a run that nothing happens to.
FAULT, SITE = "GRPO_FAULT", "GRPO_FAULT_SITE"
_BALLAST = "ballast"  # beside the run, on its disk


def planted() -> tuple[str, str]:
    """Fault and phase of this run, or two empty texts."""
    fault, _, phase = os.environ.get(FAULT, "").partition("/")
    return fault, phase


def site() -> Path:
    """Folder of the cell."""
    return Path(os.environ[SITE])


def disk() -> Path:
    """Folder whose file system the run writes to."""
    return site() / "disk"


def arm() -> None:
    """From now on the fault may strike this process, once."""
    if not (site() / "struck").exists():
        temporary = site() / "armed.tmp"
        temporary.write_text(str(os.getpid()))
        temporary.replace(site() / "armed")


def strike() -> bool:
    """Let the fault happen, if the moment has come and nobody else was faster."""
    try:
        (site() / "armed").rename(site() / "struck")
    except FileNotFoundError:
        return False
    pid, (fault, _) = int((site() / "struck").read_text()), planted()
    if fault == "SIGINT":  # as a terminal sends it, to all of the foreground group
        os.killpg(os.getpgid(pid), signal.SIGINT)
    elif fault in ("SIGTERM", "SIGKILL"):
        os.kill(pid, signal.Signals[fault])
    elif fault == "damaged checkpoint":
        os.kill(pid, signal.SIGKILL)
    elif fault == "disk full":
        fill(disk())
    return True


def fill(folder: Path) -> None:
    """Leave no byte on a disk."""
    with (folder / _BALLAST).open("wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2


def score(text: str) -> float:
    """Something that differs between completions."""
    return sum(map(ord, text)) % 7 / 7


def reward(completion: str, problem: Any) -> float:
    """Of the runs of the matrix; in the phase ``reward`` the fault strikes in here."""
    fault, phase = planted()
    if (fault, phase) == ("NaN", "generation"):  # a worker generates where it scores
        _spoil_log_probs()
    if phase == "reward" and strike() and fault == "NaN":
        return float("nan")
    return score(completion)


def _before(owner: type, name: str, act: Callable[[Any], object]) -> None:
    """Let something happen at the beginning of a method."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        act(self)
        return method(self, *args, **kwargs)

    setattr(owner, name, wrapped)


def _after(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Let something happen to the result of a function."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return change(function(*args, **kwargs))

    setattr(owner, name, wrapped)


def _struck(result: Any) -> Any:
    strike()
    return result


def plant(mode: str) -> None:
    """Change the library in this process, for the run that is about to begin in it."""
    _without_charts()
    if mode == "process":
        _fork_workers()
    fault, phase = planted()
    if not fault:
        return
    from grpo.training.trainer import Trainer

    def begin(trainer: Trainer) -> None:
        if trainer.step == ARMED_AT:
            arm()
        elif trainer.step == ARMED_AT + 1 and fault == "damaged checkpoint":
            strike()  # what was saved last is then cut short
        elif trainer.step == ARMED_AT + 2:  # somebody has made room
            (disk() / _BALLAST).unlink(missing_ok=True)

    _before(Trainer, "iterate", begin)
    if phase == "generation":
        _spoil_log_probs() if fault == "NaN" else _in_generation(mode)
    elif phase == "update":
        _in_update(fault)
    elif phase == "checkpoint" and fault != "damaged checkpoint":
        from grpo.training import checkpoint

        # Between the model's files and the rest.
        _after(checkpoint, "save_trained", _struck)


def _without_charts() -> None:
    """Drawing them takes longer than these runs do; the report is written all the same."""
    from grpo.report import page as report

    report.svg = lambda *args, **kwargs: ""
    report.write_png_curves = lambda *args, **kwargs: []


def _fork_workers() -> None:
    """Let vLLM fork its worker, as it does by itself except on a CPU: it need import nothing."""
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")


def _in_generation(mode: str) -> None:
    if mode == "process":
        from vllm.v1.engine.llm_engine import LLMEngine

        _before(LLMEngine, "step", lambda engine: strike())
    elif mode == "server":
        from grpo.policies.server import ServerPolicy

        # While the server's answer is waited for.
        _before(ServerPolicy, "_generate", lambda policy: threading.Timer(0.03, strike).start())
    elif mode == "async":
        from grpo.collectors.ray import RayCollector

        _before(RayCollector, "_taken", lambda collector: strike())
    else:
        from grpo.policies.transformers import TransformersPolicy

        _before(TransformersPolicy, "_draw", lambda policy: strike())


@functools.cache
def _spoil_log_probs() -> None:
    """Log-probs of a row are no numbers once, as of an engine whose weights are broken."""
    from grpo.policies.base import Policy

    write = Policy.write

    @functools.wraps(write)
    def wrapped(self: Policy, tensordict: Any, completions: Any) -> Any:
        if strike():
            completions.log_probs[0] = [float("nan")] * len(completions.log_probs[0])
        return write(self, tensordict, completions)

    Policy.write = wrapped


def _in_update(fault: str) -> None:
    from grpo.training.optim import MasterAdamW

    if fault == "NaN":
        def spoil(optimizer: MasterAdamW) -> None:
            if strike():
                optimizer.masters[0].grad.fill_(float("nan"))

        _before(MasterAdamW, "step", spoil)
    else:  # the weights are written, and nobody has been told
        _after(MasterAdamW, "step", _struck)
