"""What every benchmark writes beside its numbers."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))


def describe_machine(*, also: tuple[str, ...] = ()) -> dict:
    """Machine, versions (of the packages ``also`` named, too) and commit of a result."""
    import torch

    from grpo.training.checkpoint import versions

    commit = subprocess.run(["git", "rev-parse", "--verify", "HEAD"], cwd=REPO,
                            capture_output=True, text=True)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    more = {name: found.version for name in also
            for found in importlib.metadata.distributions(name=name)}
    return {"machine": gpu or f"{platform.machine()} CPU, {os.cpu_count()} cores",
            "versions": versions() | more | {"python": platform.python_version()},
            "commit": os.environ.get("GRPO_COMMIT") or commit.stdout.strip() or "unknown"}


def write_result(result: dict, out: Path | None) -> None:
    """Print a result, and write it where asked to."""
    text = json.dumps(result, indent=2)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
    print(text)
