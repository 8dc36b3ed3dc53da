"""``atropos-grpo-run``: API server, engine, environments and trainer from one command.

    atropos-grpo-run --model-name embedded --env examples/atropos/arithmetic_env.py

Everything that is started here listens on the loopback interface, logs to ``--log-dir``, and ends
with the run, however that ends. Environments run in their own virtual environment.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.atropos.client import AtroposClient
from grpo.atropos.launcher import EnvironmentProcess, environment_python, serve_flags
from grpo.config.keys import ConfigError
from grpo.run.cli.atropos import errors_as_messages, set_up
from grpo.run.cli.flags import add_flags
from grpo.run.cli.parser import Parser
from grpo.server.engine_process import EngineProcess
from grpo.system.child_process import package_environment
from grpo.system.http_call import is_loopback, split_url
from grpo.system.lifeline import TOKEN_VARIABLE

if TYPE_CHECKING:
    from grpo.config.atropos import AtroposConfig

_HUB_START = 60.0  # seconds


def parser() -> argparse.ArgumentParser:
    """The command line: that of ``atropos-grpo``, and what is started beside it."""
    parser = Parser(
        prog="atropos-grpo-run", description=__doc__.split("\n\n")[0],
        epilog="Guide: examples/atropos/README.md")
    add = parser.add_argument_group("what is started").add_argument
    add("--env", action="append", type=Path, metavar="SCRIPT",
        help="an environment's Python file; may be given several times")
    add("--env-python", type=Path,
        help="the environments' interpreter (default: GRPO_ATROPOS_PYTHON, then "
             ".venv-atropos/bin/python)")
    add("--env-flag", action="append", default=[], metavar="NAME=VALUE",
        help="flag of the environments, such as env.group_size=8; may be given several times")
    add("--hub-journal", type=Path, metavar="FILE",
        help="file in which groups that wait survive the end of the run")
    add_flags(parser)
    return parser


def main(argv: list[str] | None = None) -> None:
    """Run until all steps are done, then end everything that was started."""
    args = parser().parse_intermixed_args(argv)
    with errors_as_messages(), ExitStack() as at_end:
        config = set_up(args)
        from grpo.run.assemble_atropos import TOKENIZER, assemble_atropos
        from grpo.run.resume import open_run

        flags = environment_flags(args)
        python = environment_python(args.env_python) if args.env else None
        run_dir, checkpoint = open_run(config, Path(config.atropos.save_path), at_end,
                                       key="atropos.save_path")
        checks: list[Callable[[], None]] = []
        processes: list[EnvironmentProcess] = []
        start_hub(args, config, at_end, checks)

        def start_environments() -> None:
            for script in args.env or ():
                process = environment(script, python, config, (run_dir / TOKENIZER).absolute(),
                                      flags)
                processes.append(at_end.enter_context(process))
                checks.append(process.check)

        trainer = assemble_atropos(config, run_dir, checkpoint, at_end, checks=checks,
                                   on_serving=start_environments)
        with troubles_quoted(processes):
            trainer.fit()


@contextmanager
def troubles_quoted(processes: Sequence[EnvironmentProcess]) -> Iterator[None]:
    """When groups do not come, the reason is mostly in the environments' logs."""
    try:
        yield
    except TimeoutError as error:
        said = [text for process in processes if (text := process.troubles())]
        if not said:
            raise
        raise TimeoutError("\n".join([str(error), *said])) from error


def start_hub(
    args: argparse.Namespace, config: AtroposConfig, started: ExitStack,
    checks: list[Callable[[], None]],
) -> None:
    """A hub at ``--atropos-url``, unless an API answers there.

    Raises:
        ConfigError: for another run's hub, and an address of another machine where nothing answers.
        EngineStartError: with the end of its log, if the hub does not come up.
    """
    url, token = config.atropos.url, os.environ.get(TOKEN_VARIABLE) or None
    host, port = split_url(url)
    client = AtroposClient(url, token=token, timeout=5.0)
    if client.alive():
        if client.status().get("hub", {}).get("private"):
            raise ConfigError(f"the hub at --atropos-url {url} belongs to another run and ends "
                              "with that; give a url with another port, where this run starts its "
                              "own")
        print(f"an API answers at {url}; it is used, and left running at the end")
        if args.hub_journal is not None:
            raise ConfigError(f"--hub-journal {args.hub_journal} is not read because an API runs "
                              f"at {url} already; remove it, or give another --atropos-url")
        return
    if not is_loopback(host):
        raise ConfigError(f"no API answers at --atropos-url {url}, and one can be started on this "
                          "machine only; start it there, or use http://127.0.0.1:8000")
    command = [sys.executable, "-m", "grpo.atropos.hub_server", "--private"]
    if args.hub_journal is not None:
        command += ["--journal", str(args.hub_journal)]
    hub = EngineProcess(
        command, host=host, port=port, token=token,
        log_path=Path(config.atropos.log_dir) / "hub.log",
        start_timeout=_HUB_START, env=package_environment())
    try:
        started.enter_context(hub)
    except OSError as error:
        raise ConfigError(f"--atropos-url {url}: no Atropos API answers there, and no hub can be "
                          f"started: {error.strerror}") from error
    checks.append(hub.check)


def environment_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of ``--env-flag``; options that no environment would read are refused, and an
    environment that is not there."""
    flags = {}
    for text in args.env_flag:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"--env-flag {text} is not NAME=VALUE, such as env.group_size=8")
        flags[name.removeprefix("--")] = value
    for name in ("env_flag", "env_python"):
        if getattr(args, name) and not args.env:
            raise ConfigError(f"--{name.replace('_', '-')} is not read without --env; add that, or "
                              "remove it")
    for script in args.env or ():
        if not script.is_file():
            raise ConfigError(f"--env {script}: there is no such file; name an environment's "
                              "Python file")
    return flags


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


if __name__ == "__main__":
    main()
