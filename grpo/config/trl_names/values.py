"""What a translation of several names together reads, and says."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Values:
    """Names that are given, and TRL's defaults.

    Attributes:
        given: values by name.
        own: keys of today that are given as well, with one value.
        swept: those that have several, each of a run.
        defaults: TRL's, of every name.
        whole: the defaults count as given.
        notes: lines that the translation says beside its keys.
    """

    given: Mapping[str, Any]
    own: Mapping[str, Any]
    defaults: Mapping[str, Any]
    whole: bool
    swept: Collection[str] = ()
    notes: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name, self.defaults[name])

    def today(self, key: str, name: str, implied: Any) -> Any:
        """Of a key that a name says: where that name is not given, what the key of today says."""
        return implied if self.named(name) else self.own.get(key, implied)

    def any(self, *names: str) -> bool:
        """Whether one of them is given, or the defaults count."""
        return self.whole or self.named(*names)

    def named(self, *names: str) -> bool:
        """Whether one of them is given."""
        return any(name in self.given for name in names)
