"""Imports modules and tells what each says of itself, a line of JSON for each; of vLLM only the
compiled code is loaded.

Run by its path, so that modules are found as any other program finds them; needs nothing but
Python.
"""

import ctypes
import importlib
import importlib.util
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def look_at(module: Any) -> dict[str, Any]:
    """What an imported module says of itself."""
    return {"version": getattr(module, "__version__", "")} | (
        _of_torch(module) if module.__name__ == "torch" else {})


def main(modules: Sequence[str]) -> None:
    """Import and tell; end with the doctor, who may be interrupted."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for name in modules:
        try:
            facts = load_engine() if name == "vllm" else look_at(importlib.import_module(name))
        except Exception as error:  # noqa: BLE001  a broken package may raise anything
            facts = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        print(json.dumps({"module": name, **facts}), flush=True)
        if name == "torch" and "error" in facts:  # the others need it
            return


def _of_torch(torch: Any) -> dict[str, Any]:
    there = torch.cuda.is_available()
    return {"cuda": torch.version.cuda, "devices": torch.cuda.device_count() if there else 0,
            "nccl": ".".join(map(str, torch.cuda.nccl.version()))
            if there and torch.distributed.is_nccl_available() else None}


def load_engine() -> dict[str, Any]:
    """Load vLLM's compiled code as it loads it, without the seconds that all of it takes."""
    import torch

    folder = Path(importlib.util.find_spec("vllm").origin).parent
    code = sorted(folder.glob("_C*.so"))
    if any("AVX" in file.name for file in code):  # one for each kind of CPU
        kind = ("_C" if torch.cpu._is_avx512_bf16_supported() else
                "_C_AVX512" if torch.cpu._is_avx512_supported() else "_C_AVX2")
        code = [file for file in code if file.name.partition(".")[0] == kind]
    for file in code:
        torch.ops.load_library(str(file))
    return {"loaded": [file.name for file in code]}


if __name__ == "__main__":
    main(sys.argv[1:])
