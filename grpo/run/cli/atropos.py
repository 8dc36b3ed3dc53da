"""``atropos-grpo``: train on the groups of Atropos environments.

The API (a hub of this library or atroposlib's ``run-api``) and the environments run elsewhere, in
any order; ``atropos-grpo-run`` starts them too. An engine that answers at ``--vllm-port`` is used;
else one is started there, and ended with the run.

    atropos-grpo --model-name Qwen/Qwen2.5-1.5B-Instruct --training-steps 100
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from grpo.config.keys import ConfigError
from grpo.config.unread import ALONE, refuse_unread
from grpo.run.cli.flags import add_flags, choose_gpu, in_flags, to_config
from grpo.system.command_line import Parser, errors_in_a_line
from grpo.system.folders import why_not_writable

if TYPE_CHECKING:
    from grpo.config.atropos import AtroposConfig


def parser(prog: str = "atropos-grpo") -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(
        prog=prog, description=__doc__.split("\n\n")[0],
        epilog="What the flags stand for is configured by key, too: section.key=value. Guide: "
               "examples/atropos/README.md")
    add_flags(parser)
    return parser


def set_up(args: argparse.Namespace) -> AtroposConfig:
    """Logging of a command, and its configuration.

    Raises:
        ConfigError: naming key and fix.
    """
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    logging.getLogger("grpo").setLevel(logging.DEBUG if args.debug_loading else logging.INFO)
    config = to_config(args)
    for key in ("save_path", "log_dir"):
        path = Path(getattr(config.atropos, key))
        if problem := why_not_writable(path):
            raise ConfigError(f"atropos.{key}={path} cannot be written to ({problem}); give "
                              "another folder")
    choose_gpu(args, config)
    return config


@contextmanager
def errors_as_messages() -> Iterator[None]:
    """End the command by an error or a signal, which unwinds the stack, in a message with flags."""
    from grpo.training.stopping import signals_end_the_process  # takes seconds, which help has not

    with errors_in_a_line(ValueError, OSError, ImportError, ArithmeticError, RuntimeError,
                          switch="GRPO_TRACEBACK", said=in_flags), signals_end_the_process():
        yield


def main(argv: list[str] | None = None, *, prog: str = "atropos-grpo") -> None:
    """Run until all steps are done."""
    args = parser(prog).parse_intermixed_args(argv)
    with errors_as_messages(), ExitStack() as at_end:
        config = set_up(args)
        refuse_unread(config, ALONE)
        from grpo.run.assemble_atropos import assemble_atropos
        from grpo.run.resume import open_run

        run_dir, checkpoint = open_run(config, Path(config.atropos.save_path), at_end,
                                       key="atropos.save_path")
        trainer = assemble_atropos(config, run_dir, checkpoint, at_end)
        trainer.fit()  # groups -> advantages -> update -> publish -> prove -> report


if __name__ == "__main__":
    main()
