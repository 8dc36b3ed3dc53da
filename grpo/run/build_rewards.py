"""The reward of a run, from ``env.reward`` and what goes with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo.config.schema import Config, ConfigError
from grpo.envs.rewards import RewardFn, RewardScorer, get_reward
from grpo.envs.rewards.length import judged_by
from grpo.envs.rewards.registry import options_of as reward_options
from grpo.envs.rewards.registry import with_options
from grpo.envs.rewards.trl import as_trl_reward, is_trl_reward
from grpo.envs.tasks import Task


def reward_function(
    config: Config, task: Task | type[Task], *, try_first: bool = True
) -> RewardScorer:
    """Texts and problems to rewards: ``env.reward``, or the task's own.

    Args:
        config: of the run.
        task: whose problems are scored; of a class, in processes that have no problems, nothing is
            known about their answers.
        try_first: see :class:`~grpo.envs.rewards.scorer.RewardScorer`.

    Raises:
        ConfigError: for rewards, options and limits that do not go together, and where a reward
            compares with answers that the problems do not have.
    """
    weighted, given = config.env.weighted_rewards(task.default_reward), config.env.reward_options
    for name in (given or {}).keys() - weighted:
        raise ConfigError(f"env.reward_options has options of {name!r}, which is no reward of this "
                          f"run; remove them, or use one of: {', '.join(weighted)}")
    env = config.env
    chosen = {name: named_reward(name, (given or {}).get(name, {})) for name in weighted}
    _check_overlong(config, chosen)
    if "code" in chosen and (most := reward_options(chosen["code"])["total_seconds"]
                             ) >= env.reward_timeout:
        raise ConfigError(f"env.reward=code: its option total_seconds={most:g} must be below "
                          f"env.reward_timeout={env.reward_timeout:g}; lower that or raise this")
    processes = env.reward_processes if env.reward_processes is not None else (
        env.reward_workers if env.reward_workers > 1 else 0)
    try:
        score = RewardScorer(
            [(judged_by(fn, weighted, task.default_reward), weighted[name])
             for name, fn in chosen.items()],
            names=list(weighted), timeout=env.reward_timeout, workers=env.reward_workers,
            try_first=try_first, processes=processes,
            memory=None if env.reward_memory is None else int(env.reward_memory * 2**30))
    except ValueError as error:  # of a verdict that there is not
        raise ConfigError(f"env.reward_options: {error}") from error
    if isinstance(task, Task) and score.compares:
        try:
            task.check_answers(score.compares[0])
        except ValueError as error:
            raise ConfigError(str(error)) from error
    return score


def named_reward(name: str, options: Mapping[str, Any]) -> RewardFn:
    """The reward of ``env.reward``, with its ``env.reward_options``.

    Raises:
        ConfigError: if it cannot be imported, whatever its module raises, or does not have such
            options.
    """
    try:
        fn = get_reward(name)
    except ValueError as error:
        raise ConfigError(f"env.reward: {error}") from error
    except Exception as error:  # somebody's own module may raise anything
        raise ConfigError(f"env.reward={name}: its module cannot be imported: "
                          f"{type(error).__name__}: {error}") from error
    try:
        return as_trl_reward(fn, name, options) if is_trl_reward(fn) else with_options(fn, options)
    except ValueError as error:
        raise ConfigError(f"env.reward_options: {error}") from error


def _check_overlong(config: Config, functions: Mapping[str, RewardFn]) -> None:
    """Refuse a punishment of long completions that is given twice or never."""
    if (name := "soft_overlong_punishment") not in functions:
        return
    if config.train.overlong_buffer:
        raise ConfigError(f"env.reward={name} and train.overlong_buffer="
                          f"{config.train.overlong_buffer} both punish long completions; give one")
    options = reward_options(functions[name])
    free = options["max_completion_len"] - options["soft_punish_cache"]
    if free >= config.max_tokens:
        raise ConfigError(f"env.reward={name} leaves {free} tokens unpunished, which no completion "
                          f"exceeds with inference_model.max_tokens={config.max_tokens}; set "
                          f"env.reward_options={{{name}: {{max_completion_len: "
                          f"{config.max_tokens}, soft_punish_cache: ...}}}}")
