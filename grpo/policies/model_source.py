"""Where a model comes from, looked at before anything slow is started: a folder, the cache of the
Hugging Face hub, or the hub."""

from __future__ import annotations

import functools
import logging
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from grpo.config.keys import ConfigError
from grpo.system.threads import in_background

logger = logging.getLogger(__name__)

_REACH_SECONDS = 3.0
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def find_model(name: str, *, key: str) -> str:
    """The folder or hub id that a key names, of which at least the configuration can be read.

    Raises:
        ConfigError: see :func:`look_for`; and for files that are missing or damaged.
    """
    look_for(name, key=key)
    path = Path(name).expanduser()
    if path.is_dir():
        _check_folder(path, f"{key}={name}")
    from transformers import AutoConfig

    where = str(path) if path.is_dir() else name
    try:
        AutoConfig.from_pretrained(where)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}={name}: its config.json cannot be used: {first_line(error)}; "
                          f"give {_what(key)}") from error
    return where


def look_for(name: str, *, key: str) -> None:
    """Refuse the name of a model that is not there; needs neither PyTorch nor Transformers.

    Raises:
        ConfigError: naming key, value and fix, if it is neither a folder, nor in the cache, nor on
            the hub, or the hub cannot be asked.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return
    if path.is_absolute() or name.startswith((".", "~")):
        raise ConfigError(f"{key}={name}: there is no such folder; give {_what(key)}")
    _check_hub(name, key)


def first_line(error: Exception) -> str:
    """What an error of a library says first, without the advice that follows."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _what(key: str) -> str:
    return "a folder written by save_pretrained, or a hub id" + (
        ", or 'embedded'" if key == "model.name" else "")


def _check_folder(path: Path, given: str) -> None:
    if not (path / "config.json").exists():
        raise ConfigError(f"{given}: there is no config.json in that folder; give a folder written "
                          "by save_pretrained, or a hub id")
    files = [file for pattern in _WEIGHTS for file in path.glob(pattern)]
    if not files:
        raise ConfigError(f"{given}: there are no weights in that folder (model.safetensors); give "
                          "one that save_pretrained has written to its end")
    from safetensors import SafetensorError, safe_open

    for file in files:
        if file.suffix != ".safetensors":
            continue
        try:
            with safe_open(file, framework="pt"):  # reads the header alone
                pass
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{given}: {file.name} is damaged ({first_line(error)}); fetch or "
                              "write it again") from error


def _check_hub(name: str, key: str) -> None:
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    given = f"{key}={name}"
    try:
        cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        raise ConfigError(f"{given} is neither a folder here nor the id of a model on the hub; "
                          f"give {_what(key)}") from None
    offline = "HF_HUB_OFFLINE=1" if constants.HF_HUB_OFFLINE else why_no_hub()
    if cached and offline:
        logger.warning("%s is taken from the cache as it is: %s", given, offline)
        return
    if offline:
        raise ConfigError(
            f"{given}: there is no such folder here, the cache {constants.HF_HUB_CACHE} does not "
            f"have it, and the hub is not asked ({offline}); give a folder written by "
            f"save_pretrained, or fetch it where there is a network: hf download {name}")
    try:
        hf_hub_download(name, "config.json")
    except GatedRepoError:
        raise ConfigError(f"{given} is given only to those who accepted its terms; do so on its "
                          "page, then `hf auth login`") from None
    except RepositoryNotFoundError:
        raise ConfigError(f"{given}: there is no such folder here, and no such model on the hub "
                          f"that you may read (`hf auth login`, if it is private); give "
                          f"{_what(key)}") from None
    except EntryNotFoundError:
        raise ConfigError(f"{given}: that repository has no config.json, so it holds no model of "
                          "Transformers; give another") from None
    except OSError as error:
        raise ConfigError(f"{given}: the hub did not give it ({first_line(error)}); try again, or "
                          "give a folder") from error


@functools.cache
def why_no_hub() -> str | None:
    """Why the hub cannot be reached; None if it can.

    Where it cannot, libraries are told so, which would otherwise try again for a minute with each
    file, in this process and in those that it starts.
    """
    from huggingface_hub import constants

    target = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy") or constants.ENDPOINT
    parts = urlsplit(target)
    address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))

    def connect() -> None:
        socket.create_connection(address, timeout=_REACH_SECONDS).close()

    asked = in_background(connect)  # a name server that is silent has no deadline of its own
    try:
        asked.result(timeout=_REACH_SECONDS)
        return None
    except (OSError, TimeoutError) as error:
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True
        return f"{address[0]} cannot be reached: {error or f'silent for {_REACH_SECONDS:g} s'}"
