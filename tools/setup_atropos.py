"""Build `.venv-atropos`, where atroposlib's environments run; called by `make atropos-env`.

They need an environment of their own because atroposlib 0.4.0 needs transformers 4: under
transformers 5 its masks are wrong, without an error. Installed is what `serve`, `process` and
`run-api` import: no torch. What an environment imports beyond that goes in by
`.venv-atropos/bin/pip install NAME`, or with `--all` everything that atroposlib names.
Package indexes are those that pip is configured with. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINIMUM_PYTHON = (3, 10)  # of atroposlib

ATROPOSLIB = "atroposlib==0.4.0"
TRANSFORMERS = "transformers>=4.50,<5"
# The others of atroposlib's requirements serve single environments: datasets, gymnasium, nltk ...
IMPORTED = (TRANSFORMERS, "aiohttp", "fastapi", "jinja2", "jsonlines", "markdown", "numpy",
            "openai", "pydantic-cli", "pyyaml", "rich", "tenacity", "tqdm", "uvicorn", "wandb")

UNFINISHED = "unfinished\n"  # in the file `kind`, until the virtual environment is whole

VERIFY = """
import importlib.metadata as metadata
import atroposlib.api.server, atroposlib.envs.base, atroposlib.utils.tokenize_for_trainer
print(", ".join(f"{name} {metadata.version(name)}" for name in ("atroposlib", "transformers")))
"""


class SetupError(Exception):
    """A step failed; the message shows the end of its output and what to do."""


def run(*command: str | Path, what: str) -> str:
    """Run a step and return its output.

    Raises:
        SetupError: the command failed.
    """
    started = time.monotonic()
    result = subprocess.run(
        [str(part) for part in command],
        env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode:
        tail = "\n".join("    " + line for line in result.stdout.splitlines()[-20:])
        raise SetupError(f"{what} failed (exit {result.returncode}):\n{tail}\n\nCheck the network "
                         "and the free disk space (0.4 GB), then run the same command again.")
    print(f"  {what} ({time.monotonic() - started:.1f} s)", flush=True)
    return result.stdout


def prepare_venv(venv: Path) -> None:
    """Create the environment, or keep the one there is if it has the same interpreter.

    Raises:
        SetupError: the folder is there and was not made here.
    """
    kind = f"Python {platform.python_version()} at {sys.executable}\n"
    record = venv / "kind"
    if record.exists() and record.read_text() == kind:
        return
    if venv.exists():
        if not _made_here(venv):
            raise SetupError(f"{venv} is there and was not made by this set-up, so it is not "
                             "replaced; name another folder with --venv, or remove it yourself if "
                             "nothing in it is needed")
        shutil.rmtree(venv)
    venv.mkdir(parents=True)
    record.write_text(UNFINISHED)  # first of all, so that one that is cut short is known as ours
    run(sys.executable, "-m", "venv", venv, what="virtual environment")
    record.write_text(kind)


def _made_here(venv: Path) -> bool:
    """Whether a folder may be replaced: one that an earlier set-up made, or an empty one."""
    if not venv.is_dir():
        return False
    record = venv / "kind"
    if record.is_file():
        return (venv / "pyvenv.cfg").exists() or record.read_text() == UNFINISHED
    return not any(venv.iterdir())


def install(venv: Path, *, everything: bool) -> None:
    """Install atroposlib with the packages that it imports, or with all it names."""
    pip = (venv / "bin" / "python", "-m", "pip", "install")
    if everything:
        run(*pip, ATROPOSLIB, TRANSFORMERS, what="atroposlib and all that it names")
    else:
        run(*pip, "--no-deps", ATROPOSLIB, what="atroposlib")
        run(*pip, *IMPORTED, what="what it imports")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-atropos", help="where it goes")
    parser.add_argument("--all", action="store_true", help="every requirement of atroposlib")
    return parser


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    started = time.monotonic()
    if sys.version_info < MINIMUM_PYTHON:
        raise SetupError(f"Python is {platform.python_version()}; atroposlib needs 3.10 or newer, "
                         "for example `make atropos-env PYTHON=python3.12`.")
    venv = args.venv.absolute()
    print(f"Setting up {venv.name} for atroposlib's environments.", flush=True)
    prepare_venv(venv)
    install(venv, everything=args.all)
    versions = run(venv / "bin" / "python", "-c", VERIFY, what="imports").splitlines()[-1]
    print(f"Ready in {time.monotonic() - started:.0f} s: {versions}")


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"\nSet-up stopped: {error}")
