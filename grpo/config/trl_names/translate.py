"""TRL's names to keys of today, by the table of :mod:`grpo.config.trl_names.fields`.

A name alone is translated alone, what it leaves open stays as it is. Where a whole configuration is
TRL's, a recipe file or a ``GRPOConfig``, TRL's defaults stand for what it leaves open, as far as
they change results.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo.config.aliases import ALIASES
from grpo.config.keys import ConfigError
from grpo.config.trl_names.fields import GRPO_CONFIG, SCRIPTS, Field, same
from grpo.config.trl_names.groups import GROUPS, OF_THE_OBJECTIVE
from grpo.config.trl_names.kinds import kind_of
from grpo.config.trl_names.training import TRAINING
from grpo.config.trl_names.values import Values

_EARLIER = {name: same(".".join(key)) for name, key in ALIASES.items()}
#: Every name, TRL's before those of other trainers.
FIELDS: dict[str, Field] = {**_EARLIER, **SCRIPTS, **TRAINING, **GRPO_CONFIG}


@dataclass
class Translated:
    """Keys of today, and what is said of how they came about.

    Attributes:
        keys: values by their dotted keys; ``env`` is the group of that name.
        said: a line a name.
        defaults: keys that no name has set, but TRL's defaults.
        implied: keys that only go with what a name says, which is no name of them itself; they give
            way to keys of today.
        by: the names behind each key.
    """

    keys: dict[str, Any] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    defaults: set[str] = field(default_factory=set)
    implied: set[str] = field(default_factory=set)
    by: dict[str, str] = field(default_factory=dict)


def translate(
    given: Mapping[str, Any], own: Mapping[str, Any] | None = None, *, whole: bool = False,
    swept: Collection[str] = (),
) -> Translated:
    """Keys of today for names of TRL.

    Args:
        given: values by name. A null is no value.
        own: keys of today that are given as well, which the meaning of some names depends on, such
            as ``train_model.num_devices``.
        whole: TRL's defaults stand for what is left open. With a ``preset`` those of the objective
            do not.
        swept: keys of today that have a value for each run of a sweep.

    Raises:
        ConfigError: for names that are unknown, have nothing here, or contradict each other.

    Examples:
        >>> done = translate({"learning_rate": 1e-6, "num_generations": 8, "log_level": "info"})
        >>> done.keys
        {'optimizer.lr': 1e-06, 'env.repeats': 8}
        >>> print(*done.said, sep="\\n")
        learning_rate is now called optimizer.lr; using 1e-06
        log_level=info has no effect: hydra.job_logging has the levels
        num_generations=8: env.repeats=8
        >>> translate({"top_p": 0.9})
        Traceback (most recent call last):
        ...
        grpo.config.keys.ConfigError: top_p=0.9: tokens are sampled from the distribution that is \
trained; leave it out
    """
    own = own or {}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name not in FIELDS:
            raise ConfigError(unknown_name(name, value))
        kind = kind_of(name, FIELDS[name])
        if kind is not None and not kind.allows(value):
            raise ConfigError(f"{name}={typed(value)}: expected {kind.text}")
    out = Translated()
    for name, value in given.items():
        _alone(out, name, value, FIELDS[name])
    preset = own.get("preset", "none") != "none" or "preset" in swept
    for group, function in GROUPS.items():
        names = [name for name, one in FIELDS.items() if one.group == group]
        mine = {name: given[name] for name in names if name in given}
        defaults = whole and not (preset and group in OF_THE_OBJECTIVE)
        if not (mine or defaults):
            continue
        values = Values(given, own, defaults={name: FIELDS[name].default for name in FIELDS},
                        whole=defaults, swept=swept)
        keys = function(values)
        _add(out, keys, " ".join(mine) or "TRL's defaults")
        if not mine:
            out.defaults |= keys.keys()
        else:
            said = " ".join(f"{key}={typed(value)}" for key, value in keys.items())
            out.said.append(f"{', '.join(f'{n}={typed(v)}' for n, v in mine.items())}: "
                            f"{said or 'nothing is to be set'}")
        out.said += values.notes
    if whole:
        taken = {one.to[0]: one.default for name, one in FIELDS.items()
                 if one.taken and one.to[0] not in out.keys}
        out.keys |= taken
        out.defaults |= taken.keys()
    out.implied = out.keys.keys() - {key for name in given for key in FIELDS[name].to}
    return out


def _alone(out: Translated, name: str, value: Any, one: Field) -> None:
    if one.rule == "same":
        _add(out, {one.to[0]: value}, name)
        out.said.append(f"{name} is now called {one.to[0]}; using {typed(value)}"
                        + (f" ({one.text})" if one.text and name not in _EARLIER else ""))
        if one.to[0].startswith("kl_controller.") and "kl_controller.kind" not in out.keys:
            out.keys["kl_controller.kind"] = "horizon"
            out.said.append(f"{name} belongs to kl_controller.kind=horizon; using that")
    elif one.rule == "refused" and value != one.default and value not in one.accepts:
        raise ConfigError(f"{name}={typed(value)}: {one.text}")
    elif one.rule == "no effect" and value not in (one.default, False):
        out.said.append(f"{name}={typed(value)} has no effect: {one.text}")


def _add(out: Translated, keys: Mapping[str, Any], by: str) -> None:
    for key, value in keys.items():
        if key in out.keys and out.keys[key] != value:
            raise ConfigError(f"{out.by.get(key, 'a name')} and {by} both say {key}, "
                              f"{typed(out.keys[key])} and {typed(value)}; give one")
        out.keys[key], out.by[key] = value, by


def unknown_name(name: str, value: Any) -> str:
    """What to say of a name that is nobody's.

    Examples:
        >>> unknown_name("learning_rat", 1)
        "learning_rat: unknown name (given 1); did you mean 'learning_rate'?"
    """
    close = difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.7)
    hint = f"did you mean {close[0]!r}?" if close else "docs/trl.md lists those of TRL and open-r1"
    return f"{name}: unknown name (given {value!r}); {hint}"


def typed(value: Any) -> str:
    """A value as Hydra reads it on a command line.

    Examples:
        >>> print(typed(["a b", 1e-6, None, {"x": True}]))
        ["a b",1e-06,null,{x:true}]
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_key(key)}:{typed(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(typed, value)) + "]"
    return _text(value) if isinstance(value, str) else str(value)


def _key(name: Any) -> str:
    """Of a table; Hydra takes no quotes there."""
    return re.sub(r"[\s\\()\[\]{}:=,]", r"\\\g<0>", str(name))


_WORDS = ("null", "true", "false", "nan", "inf")


def _text(value: str) -> str:
    plain = value and re.fullmatch(r"[\w./:-]+", value, re.ASCII)
    if plain and not value[0].isdigit() and value[0] not in ".-:" and value.lower() not in _WORDS:
        return value
    # A quote is written as \\", and only the backslashes before one, or at the end, are doubled.
    parts = value.split('"')
    doubled = [part + "\\" * (len(part) - len(part.rstrip("\\"))) for part in parts]
    return '"' + '\\"'.join(doubled) + '"'
