"""What command lines need of the configuration before PyTorch is imported, which takes seconds."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Literal

from grpo.config.aliases import replaced_key

#: ``env.dataset`` of runs whose groups come from Atropos environments.
ATROPOS = "atropos"
#: Keys whose value may be a table; ``env.task`` is none, because its options are merged.
TABLES = {"env.name", "env.dataset_mixture", "env.reward", "env.reward_options", "eval.benchmarks",
          "train.mismatch", "train.objective_options"}
OptimizerName = Literal["adamw", "adamw_8bit", "adafactor", "adamw_cpu"]


#: Keys of ``train`` that :class:`~grpo.config.asynchronous.AsyncConfig` adds.
ASYNC_KEYS = ("staleness", "update_at", "group_deadline", "oversample")


class ConfigError(ValueError):
    """A configuration that cannot run; the message names the key, its value and the fix."""


def unknown_key(
    path: str, value: object, known: Iterable[str], elsewhere: Iterable[str] = ()
) -> str:
    """Name an unknown key, its value, and what was probably meant: one of the ``known`` keys of its
    section, or a path of the same name ``elsewhere``; of keys of earlier systems what to write.

    Examples:
        >>> unknown_key("env.repeat", 8, ["num_envs", "repeats"])
        "env.repeat: unknown key (given 8); did you mean 'repeats'?"
        >>> unknown_key("train.lr", 1, ["seed"], elsewhere=["optimizer.lr"])
        "train.lr: unknown key (given 1); did you mean 'optimizer.lr'?"
        >>> unknown_key("train.speed_of_light", 3, ["seed", "epochs"])
        'train.speed_of_light: unknown key (given 3); known keys of train: seed, epochs'
    """
    if instead := replaced_key(path, value):
        return instead
    known = list(known)
    section, _, name = path.rpartition(".")
    if path == "ray" or (section == "train" and name in ASYNC_KEYS):
        return (f"{path}: unknown key (given {value!r}); start grpo-async.py, which has it (from "
                "Python: recipe='grpo_async')")
    same_name = [other for other in elsewhere if other.rpartition(".")[2] == name]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7) or same_name
    hint = f"did you mean {close[0]!r}?" if close else (
        f"known keys of {section or 'the configuration'}: {', '.join(known)}")
    return f"{path}: unknown key (given {value!r}); {hint}"


def errors_text(lines: list[str]) -> str:
    """Errors of a configuration under a line that counts them."""
    count = f"{len(lines)} error" + "s" * (len(lines) > 1)
    return f"the configuration has {count}:\n  " + "\n  ".join(lines)
