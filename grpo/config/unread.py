"""Keys that some runs do not read, and the refusal of those that are set all the same.

When a key is read stands at the key, as metadata of its type, or at its section, as ``only``; what
a script reads none of, at the script's configuration, as ``unread``; what is known only once a run
starts, here. A default is never refused: it was not asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce
from typing import Any

from pydantic import BaseModel

from grpo.config.keys import ConfigError


@dataclass(frozen=True)
class Unread:
    """The runs that do not read a key."""

    where: Callable[[Any], bool]  # whether a configuration is that of such a run
    #: Goes on after "KEY=VALUE is not read" and before "remove it", so that it may name another way
    #: out; ``{section.key}`` stands for a value.
    why: str
    #: ``section.key`` or ``section.*``, several parted by spaces, if this is not at the key itself.
    keys: str = ""


def only_with(key: str, instead: str = "set that") -> Unread:
    """Of what is read only where another key is set: not null, false or 0."""
    return Unread(lambda config: value_at(config, key) in (None, 0),
                  f"because {key} is {{{key}}}; {instead}, or")


#: Where the whole of a new engine is compared after each update.
WHOLE_PROOF = Unread(lambda c: c.inference_model.weight_sync == "restart",
                     "by inference_model.weight_sync=restart, because of a new engine all tensors "
                     "are compared;", "train.proof_interval")

#: Of runs on Atropos environments that are told where their engine is.
ENGINE_AT_URL = (
    Unread(lambda c: c.inference_model.url is not None,
           "because inference_model.url={inference_model.url} says where the engine is;",
           "atropos.vllm_port atropos.bridge_config"),
)

#: Of ``atropos-grpo``, which starts no environments.
ALONE = (
    Unread(lambda c: c.atropos.bridge or c.inference_model.url is not None,
           "by atropos-grpo where it starts no engine that could log there;", "atropos.log_dir"),
)

#: On a CPU, for which vLLM has neither.
ON_A_CPU = (
    Unread(lambda c: True, "on a CPU; set inference_model.kv_cache_memory_bytes, and",
           "inference_model.gpu_memory_utilization"),
    Unread(lambda c: (
        c.engine == "server" and c.inference_model.enforce_eager is False),
           "by a server on a CPU, which compiles nothing; use engine=process, or",
           "inference_model.enforce_eager"),
)

#: Where Transformers generates, which depends on what is installed.
TRANSFORMERS = (
    Unread(lambda c: True, "by inference_model.backend=transformers;",
           "inference_model.engine inference_model.url inference_model.weight_sync "
           "inference_model.max_num_seqs "
           "inference_model.gpu_memory_utilization inference_model.kv_cache_memory_bytes "
           "inference_model.enforce_eager"),
    Unread(lambda c: True, "by inference_model.backend=transformers, whose workers have one device "
           "each; raise inference_model.num_devices, and", "inference_model.tensor_parallel_size"),
)

#: Where vLLM generates, and nothing is trained beside it.
VLLM_ALONE = (
    Unread(lambda c: True, "by vLLM, which chooses its own kernels; use "
           "inference_model.backend=transformers, or", "train_model.attn_implementation"),
)


#: Where no reward function is called in another process.
REWARDS_HERE = (
    Unread(lambda c: True, "because no reward of this run is called in another process "
           "(env.reward_processes={env.reward_processes});", "env.reward_memory"),
)


def refuse_unread(config: BaseModel, table: tuple[Unread, ...]) -> None:
    """Refuse the first key that is set and not read by the ``table``, its section or itself.

    Raises:
        ConfigError: naming the key, its value, why it is not read, and the fix.

    Examples:
        >>> from grpo.config.schema import Config
        >>> Config(train={"keep_checkpoints": 2, "checkpoint_frequency": 0})
        Traceback (most recent call last):
        ...
        pydantic_core._pydantic_core.ValidationError: 1 validation error for Config
          Value error, train.keep_checkpoints=2 is not read because train.checkpoint_frequency is \
0; raise that, or remove it [type=value_error, ...
    """
    for key, value, own in _keys_that_are_set(config):
        named = [one for one in table if any(fnmatchcase(key, name) for name in one.keys.split())]
        for entry in named + own:
            if entry.where(config):
                why = re.sub(r"{([\w.]+)}", lambda m: typed(value_at(config, m[1])), entry.why)
                raise ConfigError(f"{key}={typed(value)} is not read {why} remove it")


def _keys_that_are_set(
    section: BaseModel, prefix: str = ""
) -> Iterator[tuple[str, Any, list[Unread]]]:
    """Keys with another value than their default, the value, and who does not read them."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _keys_that_are_set(value, f"{prefix}{name}.")
        elif value != field.get_default(call_default_factory=True):
            rules = (getattr(section, "only", None), *field.metadata)
            yield prefix + name, value, [rule for rule in rules if isinstance(rule, Unread)]


def value_at(config: BaseModel, key: str) -> Any:
    """The value of ``section.key``."""
    return reduce(getattr, key.split("."), config)


def typed(value: Any) -> str:
    """A value as it is typed on a command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
