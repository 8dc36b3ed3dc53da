"""What ``python -m grpo.run.evaluate`` is told beside keys of a run, and which of those it reads;
needs no PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator

from grpo.config.keys import ConfigError, errors_text
from grpo.config.section import Section

#: Samples of each problem where ``eval.samples`` is not given.
SAMPLES = 8

_PROBLEMS = ("env", "env.*", "model.*", "train.seed", "eval.*", "inference_model.max_tokens",
             "inference_model.max_model_len")
_ENGINE = ("device", "inference_model.backend", "inference_model.gpu_memory_utilization",
           "inference_model.kv_cache_memory_bytes", "inference_model.enforce_eager",
           "inference_model.ignore_eos", "train_model.torch_dtype",
           "train_model.attn_implementation", "train_model.fp32_head")
_NEVER = ("env.num_envs", "env.repeats", "env.url", "env.environment", "env.port",
          "env.forward_ports", "eval.at_checkpoints", "eval.batch_size")


class EvaluateOptions(Section):
    """Keys without a section, beside those of the run."""

    out: str | None = None
    """Folder of the result; null: a new one in ``outputs/evaluations``."""
    batch_size: int | None = Field(None, ge=1)
    """Completions that are generated at a time. Samples are the same again with the same number.
    Null: 256, of a model below 16 MiB on a CPU 2,048."""
    completions: bool = False
    """Write them to ``completions.jsonl``."""
    url: str | None = None
    """Of a server with OpenAI's ``/v1/completions``, which generates in the place of an engine
    here; ``model.name`` then says whose tokenizer it has. Its key is the variable
    ``OPENAI_API_KEY``."""
    served_model: str | None = None
    """The model's name at the server; null: the only one there."""
    send: Literal["tokens", "text"] = "tokens"
    """What the server gets as prompts."""
    timeout: Annotated[float, Field(gt=0)] = 1200.0
    """Seconds that a batch may take at the server, with all that is tried again."""
    connections: int = Field(64, ge=1)
    """Requests at a time to the server."""

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str | None) -> str | None:
        parts = urlsplit(url or "http://none")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must begin with http:// or https:// and name a host, such as "
                             "http://127.0.0.1:8000")
        return url


def split_options(overrides: Sequence[str]) -> tuple[EvaluateOptions, list[str]]:
    """The command's own options among ``key=value``, and the keys of the run.

    Raises:
        ConfigError: naming key, value and fix; also for keys that an evaluation does not read.

    Examples:
        >>> options, keys = split_options(["batch_size=8", "env=gsm8k"])
        >>> options.batch_size, keys
        (8, ['eval.samples=8', 'env=gsm8k'])
        >>> split_options(["optimizer.lr=1"])
        Traceback (most recent call last):
        ...
        grpo.config.keys.ConfigError: optimizer.lr=1 is not read by an evaluation; remove it
    """
    values, rest = {}, []
    for text in overrides:
        key, _, value = text.partition("=")
        if key in EvaluateOptions.model_fields:
            values[key] = None if value == "null" else value
        else:
            rest.append(text)
    try:
        options = EvaluateOptions.model_validate(values)
    except ValidationError as error:
        raise ConfigError(errors_text([
            f"{problem['loc'][0]}={problem['input']}: "
            f"{problem['msg'].removeprefix('Value error, ')}"
            for problem in error.errors()])) from None
    if options.url is None and (unread := values.keys() & {
            "served_model", "send", "timeout", "connections"}):
        key = sorted(unread)[0]
        raise ConfigError(f"{key}={values[key]} is not read without url; give the address of a "
                          "server, or remove it")
    for text in rest:
        _check_read(text, server=options.url is not None)
    if not any(text.startswith("eval.samples=") for text in rest):
        rest.insert(0, f"eval.samples={SAMPLES}")
    return options, rest


def _check_read(text: str, *, server: bool) -> None:
    key = text.partition("=")[0].lstrip("+~")
    read = (*_PROBLEMS, *(() if server else _ENGINE))
    if key in _NEVER or not any(fnmatchcase(key, name) for name in read):
        where = " with url, because the server is started with its own" if (
            server and key in _ENGINE) else ""
        raise ConfigError(f"{text} is not read by an evaluation{where}; remove it")
