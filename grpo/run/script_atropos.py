"""``env=atropos`` in ``grpo.py`` and ``grpo-async.py``: hub and environment are started, if that is
asked for, and the run is put together as those of the Atropos commands are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from grpo.atropos.launcher import EnvironmentProcess, environment_python
from grpo.atropos.trainer import AtroposTrainer
from grpo.config.atropos_script import as_atropos
from grpo.config.schema import Config, ConfigError
from grpo.config.unread import TRANSFORMERS, refuse_unread
from grpo.run import build
from grpo.run.assemble_atropos import TOKENIZER, assemble_atropos
from grpo.run.beside import all_finished, environment, refuse_address, start_hub, troubles_of
from grpo.system.lifeline import bind
from grpo.training.checkpoint import Checkpoint

# Where environments that run already ask, as those of the Atropos commands do.
_PORT = 9001


def assemble_on_atropos(
    config: Config, run_dir: Path, checkpoint: Checkpoint | None, at_end: ExitStack
) -> AtroposTrainer:
    """A trainer whose rollouts are what environments send; see :func:`grpo.run.assemble.assemble`.

    Raises:
        ConfigError: for a configuration that cannot work, naming key and fix.
        EngineStartError: with the end of its log, if hub or engine does not come up.
    """
    if build.resolve_backend(config) == "transformers":
        refuse_unread(config, TRANSFORMERS)
    env, checks, processes = config.env, list[Callable[[], None]](), list[EnvironmentProcess]()
    if env.environment is None:
        composed = as_atropos(config, run_dir, port=env.port or _PORT, url=env.url)
        return assemble_atropos(composed, run_dir, checkpoint, at_end, asked=config)
    script, flags, python = _script_of(config), environment_flags(config), environment_python()
    # An engine that runs already has a port of its own, beside which none is read.
    attached = config.inference_model.url is not None
    composed = as_atropos(config, run_dir, port=env.port or (_PORT if attached else _free_port()),
                          url=env.url or f"http://127.0.0.1:{_free_port()}")
    Path(composed.atropos.log_dir).mkdir(parents=True, exist_ok=True)
    start_hub(composed, at_end, checks, named=f"env.url={composed.atropos.url}")

    def start_environment() -> None:
        process = environment(script, python, composed, (run_dir / TOKENIZER).absolute(), flags)
        processes.append(at_end.enter_context(process))
        checks.append(process.check)

    return assemble_atropos(
        composed, run_dir, checkpoint, at_end, checks=checks, on_serving=start_environment,
        asked=config, explain=lambda: troubles_of(processes),
        ended=lambda: all_finished(processes))


def _script_of(config: Config) -> Path:
    script = Path(config.env.environment)
    if not script.is_file():
        raise ConfigError(f"env.environment={script}: there is no such file; name an environment's "
                          "Python file")
    return script


def environment_flags(config: Config) -> dict[str, Any]:
    """Flags of the environment's ``serve`` command: ``env.task.flags``, and the size of groups.

    Raises:
        ConfigError: if the size is given twice, or an address of the API.

    Examples:
        >>> environment_flags(Config(env={"dataset": "atropos", "environment": "env.py",
        ...                               "task": {"flags": {"env": {"max_num_workers": 8}}},
        ...                               "repeats": 4}))
        {'env.max_num_workers': 8, 'env.group_size': 4}
    """
    flags = dict(_flat(config.env.task.get("flags") or {}))
    if "env.group_size" in flags:
        raise ConfigError(f"env.task.flags has env.group_size={flags['env.group_size']}, which is "
                          f"env.repeats={config.env.repeats}; leave the first out")
    refuse_address(flags, given="env.task.flags", key="env.url")
    return flags | {"env.group_size": config.env.repeats}


def _flat(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _free_port() -> int:
    with bind("127.0.0.1", 0) as sock:
        return sock.getsockname()[1]
