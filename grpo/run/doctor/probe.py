"""Imports modules in a process of their own: a compiled one that does not fit ends its process,
which must not be the doctor's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_CHILD = Path(__file__).with_name("probe_child.py")


class Probe:
    """The imports of some modules, under way from now on.

    Args:
        modules: imported in this order, none if ``torch``, the first, fails; of ``vllm`` only the
            compiled code is loaded.
        seconds: after which the process is ended.

    Examples:
        >>> Probe("json", "no_such").facts()
        {'json': {'version': '2.0.9'}, 'no_such': {'error': "ModuleNotFoundError: No module \
named 'no_such'"}}
    """

    def __init__(self, *modules: str, seconds: float = 120.0) -> None:
        self.modules, self._seconds = modules, seconds
        self._facts: dict[str, dict[str, Any]] | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD), *modules], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def facts(self) -> dict[str, dict[str, Any]]:
        """Module -> what is known of it, ``error`` where its import failed; those that were not
        tried any more are left out."""
        if self._facts is None:
            try:
                out, err = self._process.communicate(timeout=self._seconds)
                end = _ending(self._process.returncode, err) if self._process.returncode else None
            except subprocess.TimeoutExpired:
                self._process.kill()
                out, _ = self._process.communicate()
                end = f"has not ended after {self._seconds:g} s"
            # Modules print, too, while they are imported.
            lines = [json.loads(line) for line in out.splitlines() if line.startswith('{"module"')]
            self._facts = {line.pop("module"): line for line in lines}
            missing = [name for name in self.modules if name not in self._facts]
            if end and missing:
                self._facts[missing[0]] = {"error": f"its import {end}"}
        return self._facts


def _ending(code: int, err: str) -> str:
    how = f"was ended by signal {-code}" if code < 0 else f"ended the process with {code}"
    last = "".join(err.strip().splitlines()[-1:])
    return f"{how}: {last}" if last else how
