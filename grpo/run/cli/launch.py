"""``atropos-grpo-run``: API server, engine, environments and trainer from one command.

    atropos-grpo-run --model-name embedded --env examples/atropos/arithmetic_env.py

Everything that is started here listens on the loopback interface, logs to ``--log-dir``, and ends
with the run, however that ends. Environments run in their own virtual environment.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from grpo.atropos.launcher import EnvironmentProcess, environment_python
from grpo.config.keys import ConfigError
from grpo.run.beside import all_finished, environment, refuse_address, start_hub, troubles_of
from grpo.run.cli.atropos import errors_as_messages, set_up
from grpo.run.cli.flags import add_flags
from grpo.system.command_line import Parser


def parser(prog: str = "atropos-grpo-run") -> argparse.ArgumentParser:
    """The command line: that of ``atropos-grpo``, and what is started beside it."""
    parser = Parser(
        prog=prog, description=__doc__.split("\n\n")[0],
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


def main(argv: list[str] | None = None, *, prog: str = "atropos-grpo-run") -> None:
    """Run until all steps are done, then end everything that was started."""
    args = parser(prog).parse_intermixed_args(argv)
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
        start_hub(config, at_end, checks, named=f"--atropos-url {config.atropos.url}",
                  journal=args.hub_journal)

        def start_environments() -> None:
            for script in args.env or ():
                process = environment(script, python, config, (run_dir / TOKENIZER).absolute(),
                                      flags)
                processes.append(at_end.enter_context(process))
                checks.append(process.check)

        trainer = assemble_atropos(config, run_dir, checkpoint, at_end, checks=checks,
                                   on_serving=start_environments,
                                   explain=lambda: troubles_of(processes),
                                   ended=lambda: all_finished(processes))
        trainer.fit()


def environment_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of ``--env-flag``; options that no environment would read are refused, and an
    environment that is not there."""
    flags = {}
    for text in args.env_flag:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"--env-flag {text} is not NAME=VALUE, such as env.group_size=8")
        flags[name.removeprefix("--")] = value
    refuse_address(flags, given="--env-flag", key="--atropos-url")
    for name in ("env_flag", "env_python"):
        if getattr(args, name) and not args.env:
            raise ConfigError(f"--{name.replace('_', '-')} is not read without --env; add that, or "
                              "remove it")
    for script in args.env or ():
        if not script.is_file():
            raise ConfigError(f"--env {script}: there is no such file; name an environment's "
                              "Python file")
    return flags


if __name__ == "__main__":
    main()
