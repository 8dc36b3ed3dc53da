"""``grpo``: every command of the library by one name, ``grpo --help``.

A command is a line of :data:`COMMANDS`, and imported when it is asked for.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, NoReturn


class Command(NamedTuple):
    """A function that takes the arguments after the command's name, and ``prog``, by which its
    messages call it; and one line of help."""

    function: str  # module:name
    help: str
    arguments: tuple[str, ...] = ()  # that go before those given


#: Name -> command.
COMMANDS = {
    "train": Command("grpo.run.cli.train:main", "train: generate, score, update, repeat"),
    "train-async": Command("grpo.run.cli.train:main_async",
                           "train while workers on Ray generate"),
    "offline": Command("grpo.run.cli.offline:main",
                       "train with the offline trainer's keys, by a server of vLLM or SGLang"),
    "atropos": Command("grpo.run.cli.atropos:main",
                       "train on groups of Atropos environments that run elsewhere"),
    "atropos-run": Command("grpo.run.cli.launch:main",
                           "the same, with API, engine and environments started beside it"),
    "serve": Command("grpo.server.serve:main", "the engine as a server: vLLM behind HTTP"),
    "hub": Command("grpo.atropos.hub_server:main", "an API for Atropos environments"),
    "evaluate": Command("grpo.run.evaluate.__main__:main",
                        "how good a model is on held-out problems"),
    "compare": Command("grpo.run.evaluate.__main__:main", "two models, or two results",
                       ("compare",)),
    "plan": Command("grpo.run.plan.__main__:main", "memory and time of a run, before it starts"),
    "doctor": Command("grpo.run.doctor.__main__:main", "what of this machine would hold a run up"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that is named first."""
    name, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(usage())
        return
    if name == "--version":
        from grpo import __version__

        print(f"torchrl-grpo {__version__}")
        return
    if name not in COMMANDS:
        _unknown(name)
    command = COMMANDS[name]
    module, _, function = command.function.partition(":")
    getattr(import_module(module), function)([*command.arguments, *rest], prog=f"grpo {name}")


def usage() -> str:
    """What ``grpo --help`` says."""
    width = max(map(len, COMMANDS)) + 2
    return "\n".join([
        "usage: grpo COMMAND ...\n\nGRPO for language models on TorchRL.\n",
        *(f"  {name:{width}}{command.help}" for name, command in COMMANDS.items()),
        "\ngrpo COMMAND --help says what a command takes; grpo --version which library this is."])


def _unknown(name: str) -> NoReturn:
    if "=" in name or name.startswith("-"):
        fix = f"; a command comes first, such as grpo train {name}"
    else:
        fix = "".join(f"; did you mean {near}?" for near in difflib.get_close_matches(
            name, COMMANDS, n=1))
    print(f"error: {name}: unknown command{fix} (grpo --help lists all)", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
