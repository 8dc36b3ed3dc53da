"""What a run does with its configuration: which keys it reads, and what it does by them.

A key counts as read where code that assembles or runs the parts asks for it. Validators, what is
printed, what is written down for a resumption, and estimates of memory ask for every key, so those
do not count. What a run *does* is an :class:`Observation`: its metrics, its files, what it hands to
engines, workers, loggers and the API, and the plain values that its parts look up in themselves
while they run. A key that is only passed on, and that no part looks up, changes nothing of that.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from pydantic import BaseModel

from grpo.config.objective import Section
from grpo.config.schema import Config

# Functions that look at keys to check or print them, and files that estimate or compare runs.
_CHECKS = {"load_config", "changed", "model_validate", "model_dump", "refuse_unread", "check",
           "choose_gpu", "_name_errors"}
_WORDS = {"describe", "_describe", "describe_loss", "describe_engine", "describe_device",
          "describe_length", "describe_weights"}
_ESTIMATES = {"device_memory.py", "memory_atropos.py", "memory_advice.py", "fast_defaults.py",
              "resume.py", "identity.py"}
# Modules whose objects only show what happened.
_SHOWN = ("grpo.config", "grpo.report.console", "grpo.report.charts", "grpo.report.curves",
          "grpo.report.history", "grpo.run.ledger", "grpo.run.memory")
# Attributes that hold all of a configuration, to be saved.
_WHOLE = {"config", "settings", "asked"}
_HERE = Path(__file__)
_PLAIN = (int, float, str, bool, type(None), torch.dtype)


@dataclass
class Observation:
    """What one run did."""

    keys: set[str] = field(default_factory=set)  # that were read, as section.key
    did: dict[str, Any] = field(default_factory=lambda: defaultdict(set))  # by where it was seen

    def note(self, where: str, what: Any) -> None:
        """Something that the run handed to somebody."""
        self.did[where].add(repr(plain(what)))

    def differs(self, other: Observation, but: set[str]) -> set[str]:
        """Where two runs did different things, leaving out what differs anyway."""
        return {where for where in self.did.keys() | other.did.keys()
                if where not in but and self.did.get(where) != other.did.get(where)}


def keys_of(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """All keys of a schema, as ``section.key``."""
    for name, one in section.model_fields.items():
        if isinstance(one.annotation, type) and issubclass(one.annotation, BaseModel):
            yield from keys_of(one.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def plain(value: Any) -> Any:
    """What of a value can be compared; nothing of tensors, models and folders."""
    if isinstance(value, functools.partial):
        value = value.keywords
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, dict) and len(value) <= 40:
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)) and len(value) <= 20:
        return [plain(one) for one in value]
    return type(value).__name__


@contextmanager
def watched(monkeypatch, schema: type[Config]) -> Iterator[Watch]:
    """Observe what is built and run meanwhile."""
    with monkeypatch.context() as patch:
        watch = Watch(schema)
        patch.setattr(Section, "__getattribute__", watch.of_sections(), raising=False)
        for part, lookup in [(part, part.__getattribute__) for part in parts()]:
            patch.setattr(part, "__getattribute__", watch.of_parts(lookup), raising=False)
        yield watch


def parts() -> Iterator[type]:
    """The classes of this package that a run is made of."""
    for name, module in sorted(sys.modules.items()):
        if not name.startswith("grpo.") or name.startswith(_SHOWN):
            continue
        for one in vars(module).values():
            if (isinstance(one, type) and one.__module__ == name and "__slots__" not in vars(one)
                    and not issubclass(one, (Exception, BaseModel, tuple, dict, str))
                    and not getattr(one, "_is_protocol", False)):
                yield one


class Watch:
    """Fills an :class:`Observation`."""

    def __init__(self, schema: type[Config]) -> None:
        self.observed = Observation()
        self.running = False  # once the run has been put together, parts are looked at
        self._prefixes = dict(_prefixes(schema))

    def of_sections(self):
        """Records which keys are read, in place of ``__getattribute__``."""
        def getattribute(section: Section, name: str) -> Any:
            value = object.__getattribute__(section, name)
            cls = object.__getattribute__(section, "__class__")
            prefix = self._prefixes.get(cls)
            if prefix is not None and name[0] != "_":
                fields = cls.__pydantic_fields__
                if name in fields:
                    names = [name]
                else:  # all of a section at once
                    names = fields if prefix and name in ("given", "model_dump") else ()
                if names and _reader(sys._getframe(1)):
                    self.observed.keys.update(prefix + one for one in names)
            return value
        return getattribute

    def of_parts(self, lookup: Callable[[Any, str], Any]):
        """Records the plain values that parts look up, in place of ``__getattribute__``."""
        def getattribute(part: Any, name: str) -> Any:
            value = lookup(part, name)
            if self.running and name not in _WHOLE and name[:2] != "__" and (
                    isinstance(value, (*_PLAIN, tuple, list, dict, functools.partial))):
                if sys._getframe(1).f_code.co_name not in ("__init__", "__repr__", "state_dict"):
                    where = f"{object.__getattribute__(part, '__class__').__name__}.{name}"
                    self.observed.note(where, value)
            return value
        return getattribute


def _prefixes(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[type, str]]:
    yield schema, prefix
    for name, one in schema.model_fields.items():
        if isinstance(one.annotation, type) and issubclass(one.annotation, BaseModel):
            yield from _prefixes(one.annotation, f"{prefix}{name}.")


def _reader(frame: FrameType | None) -> bool:
    """Whether a key was asked for by code that does something with it."""
    while frame is not None:
        file, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if name in _CHECKS:
            return False
        through = file.parent.name == "config" or "pydantic" in file.parts or file == _HERE
        if not through:
            return name not in _WORDS and file.name not in _ESTIMATES
        frame = frame.f_back
    return False
