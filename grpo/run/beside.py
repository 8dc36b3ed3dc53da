"""What may run beside a run on Atropos environments, started and ended with it: the hub, and the
environments themselves."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.atropos.client import AtroposClient
from grpo.atropos.launcher import EnvironmentProcess, serve_flags
from grpo.config.keys import ConfigError
from grpo.server.engine_process import EngineProcess
from grpo.system.child_process import package_environment
from grpo.system.http_call import is_loopback, split_url
from grpo.system.lifeline import TOKEN_VARIABLE

if TYPE_CHECKING:
    from grpo.config.atropos import AtroposConfig

_HUB_START = 60.0  # seconds


def start_hub(
    config: AtroposConfig, started: ExitStack, checks: list[Callable[[], None]], *, named: str,
    journal: Path | None = None,
) -> None:
    """A hub at the run's address of the API, unless one answers there.

    Args:
        config: of the run.
        started: gets what ends the hub.
        checks: gets what raises if it is gone.
        named: the address, as the user gives it.
        journal: file in which groups that wait survive the end of the run.

    Raises:
        ConfigError: for another run's hub, and an address of another machine where nothing answers.
        EngineStartError: with the end of its log, if the hub does not come up.
    """
    url, token = config.atropos.url, os.environ.get(TOKEN_VARIABLE) or None
    host, port = split_url(url)
    client = AtroposClient(url, token=token, timeout=5.0)
    if client.alive():
        if client.status().get("hub", {}).get("private"):
            raise ConfigError(f"the hub at {named} belongs to another run and ends "
                              "with that; give a url with another port, where this run starts its "
                              "own")
        print(f"an API answers at {url}; it is used, and left running at the end")
        if journal is not None:
            raise ConfigError(f"--hub-journal {journal} is not read because an API runs "
                              f"at {url} already; remove it, or give another address")
        return
    if not is_loopback(host):
        raise ConfigError(f"no API answers at {named}, and one can be started on this "
                          "machine only; start it there, or use http://127.0.0.1:8000")
    command = [sys.executable, "-m", "grpo.atropos.hub_server", "--private"]
    if journal is not None:
        command += ["--journal", str(journal)]
    hub = EngineProcess(
        command, host=host, port=port, token=token,
        log_path=Path(config.atropos.log_dir) / "hub.log",
        start_timeout=_HUB_START, env=package_environment())
    try:
        started.enter_context(hub)
    except OSError as error:
        raise ConfigError(f"{named}: no Atropos API answers there, and no hub can be "
                          f"started: {error.strerror}") from error
    checks.append(hub.check)


def refuse_address(flags: Mapping[str, Any], *, given: str, key: str) -> None:
    """Raises ConfigError for flags, ``given`` by that name, which have an address of the API: a run
    takes groups from the one of its ``key``."""
    if (address := flags.get("env.rollout_server_url")) is not None:
        raise ConfigError(f"{given} has env.rollout_server_url={address}, but the run takes groups "
                          f"from {key}; set that, and leave the flag out")


def environment(
    script: Path, python: Path, config: AtroposConfig, tokenizer: Path, flags: dict[str, Any],
) -> EnvironmentProcess:
    """An environment that asks this run's engine and sends to its API."""
    for_engine = serve_flags(engine_url=config.engine_url, model=config.model.name,
                             tokenizer=tokenizer, token=os.environ.get(TOKEN_VARIABLE))
    return EnvironmentProcess(
        script, python=python, api_url=config.atropos.url,
        flags={**for_engine, **flags}, log_path=Path(config.atropos.log_dir) / f"{script.stem}.log",
        api_token=os.environ.get(TOKEN_VARIABLE) or None)


def troubles_of(processes: Sequence[EnvironmentProcess]) -> str:
    """What the environments' logs say is wrong; when groups do not come, the reason is mostly
    there."""
    return "\n".join(text for process in processes if (text := process.troubles()))


def all_finished(processes: Sequence[EnvironmentProcess]) -> bool:
    """Whether there were environments and none of them sends anything any more."""
    return bool(processes) and all(process.state == "finished" for process in processes)
