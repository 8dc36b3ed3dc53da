"""A run from Python: ``train(config, reward=fn, dataset=rows)``."""

from __future__ import annotations

import functools
import inspect
import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import hydra
from omegaconf import OmegaConf

from grpo.config.asynchronous import AsyncConfig
from grpo.config.presets import describe_preset, leaves
from grpo.config.recipes import recipes
from grpo.config.schema import Config, ConfigError
from grpo.config.sent import load_sent
from grpo.config.trl_names import FIELDS, translate
from grpo.envs.rewards import RewardFn, get_reward, register_reward, reward_names
from grpo.envs.rewards.registry import path_of
from grpo.report.history import History
from grpo.run.assemble import assemble, assemble_async
from grpo.run.resume import open_run

#: A function, or the name or import path of a reward.
Reward = str | Callable[..., Any]
#: Problems that are held out of a data set that brings none of its own.
_HELD_OUT, _SHARE = 100, 10


@dataclass(frozen=True)
class Result:
    """What a run has left.

    Attributes:
        run_dir: its folder, with ``report.html``, ``metrics.jsonl`` and checkpoints.
        config: all settings.
        history: metrics, a row a step.
        final_model: folder that Transformers and vLLM load; where adapters were trained, theirs.
    """

    run_dir: Path
    config: Config
    history: Sequence[Mapping[str, Any]]
    final_model: Path


def train(
    config: Mapping[str, Any] | None = None, *,
    reward: Reward | Sequence[Reward] | None = None,
    dataset: Iterable[Mapping[str, Any]] | None = None,
    eval_dataset: Iterable[Mapping[str, Any]] | None = None,
    run_dir: str | Path | None = None, recipe: str = "grpo",
) -> Result:
    """Train a model and return when the run is through.

    Args:
        config: values by the dotted keys of ``config/``, by TRL's names, or in sections; ``env``,
            ``preset`` and ``optimizer`` may name a group, as on the command line.
        reward: a function, or several: of a completion and its problem, of lists of both
            (:func:`~grpo.envs.rewards.batch_reward`), or as TRL calls them. One that can be
            imported is called in a process of its own. None: what the task or ``env.reward`` says.
        dataset: rows with a ``prompt``, a text that the model continues or a list of chat messages,
            and, if there is one, an ``answer``; ``problem.row`` has all columns. They must be JSON.
        eval_dataset: held-out rows; None: a tenth of ``dataset``, 100 at most.
        run_dir: of the run, which must not hold one; None: a new folder in ``outputs``.
        recipe: of ``config/``; those that begin with ``grpo_async`` are asynchronous.

    Raises:
        ConfigError: naming keys that are unknown, wrong or not read.

    Examples:
        >>> from grpo import train
        >>> def right(completion, problem):
        ...     return float(completion.strip() == problem.answer)
        >>> rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
        >>> result = train({"train.max_steps": 20, "optimizer.lr": 1e-4}, reward=right,
        ...                dataset=rows)                                     # doctest: +SKIP
        >>> result.final_model                                               # doctest: +SKIP
    """
    folder = Path("outputs", f"{datetime.now():%Y-%m-%d/%H-%M-%S}-{secrets.token_hex(4)}")
    folder = folder if run_dir is None else Path(run_dir)
    keys = own_keys(config or {})
    if dataset is not None:
        keys = of_rows(dataset, eval_dataset, folder / "dataset") | keys
    elif eval_dataset is not None:
        raise ConfigError("eval_dataset without dataset: held-out rows belong to rows that are "
                          "trained on; give dataset, too")
    given = reward if isinstance(reward, list | tuple) else [] if reward is None else [reward]
    if given:
        if "env.reward" in keys:
            raise ConfigError(f"env.reward={keys['env.reward']} and reward= are the same setting; "
                              "give one")
        keys["env.reward"] = [reward_name(one) for one in given]
    made = compose(keys, recipe)
    if made.has_workers and (mine := [name for name in keys.get("env.reward", ())
                                      if name in _GIVEN]):
        raise ConfigError(f"reward={mine[0]}: engines are processes of their own here, which must "
                          "be able to import it; put it into a module")
    build = assemble_async if isinstance(made, AsyncConfig) else assemble
    with ExitStack() as at_end:
        folder, checkpoint = open_run(made, folder, at_end, key="run_dir")
        trainer = build(made, folder, checkpoint, at_end)
        trainer.fit()
    final = next(folder / f"final_{kind}" for kind in ("model", "adapter")
                 if (folder / f"final_{kind}").is_dir())
    return Result(folder, made, History.read(folder).rows, final)


def own_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the dotted keys of today; says what becomes of TRL's names."""
    named = {key: value for key, value in config.items() if key in FIELDS}
    own = dict(leaves({key: value for key, value in config.items() if key not in named}))
    done = translate(named, own)
    for line in done.said:
        print(line)
    if both := [key for key in done.keys if own.get(key, done.keys[key]) != done.keys[key]]:
        raise ConfigError(f"{both[0]}={own[both[0]]} and a name of TRL for the same are given; "
                          "give one")
    return own | done.keys


def compose(keys: Mapping[str, Any], recipe: str = "grpo") -> Config:
    """The checked configuration of a recipe with some keys, of which those without a dot that name
    a folder of ``config/`` are groups.

    Examples:
        >>> compose({"env": "countdown", "env.repeats": 4}).env.dataset
        'countdown'
    """
    keys = dict(keys)
    if "env" not in keys and (recipes() / "env" / f"{keys.get('env.dataset')}.yaml").is_file():
        keys["env"] = keys.pop("env.dataset")  # what goes with it comes along
    groups = {key: value for key, value in keys.items()
              if isinstance(value, str) and (recipes() / key).is_dir()}
    with hydra.initialize_config_dir(str(recipes()), version_base=None):
        values = hydra.compose(recipe, [f"{key}={value}" for key, value in groups.items()])
    OmegaConf.set_struct(values, False)
    for key, value in keys.items():
        if key not in groups:
            OmegaConf.update(values, key, value, merge=False)
    if (preset := groups.get("preset", "none")) != "none":
        print("preset", describe_preset(preset, values, config_folder=recipes()))
    return load_sent(OmegaConf.to_container(values, resolve=True))


# -- rows and functions ---------------------------------------------------------------------------


def of_rows(
    rows: Iterable[Mapping[str, Any]], held_out: Iterable[Mapping[str, Any]] | None, folder: Path
) -> dict[str, Any]:
    """Write rows where every process of the run can read them, and say so in keys of ``env``."""
    rows = [dict(row) for row in rows]
    _write(rows, folder / "train.jsonl", "dataset")
    keys = {"env": "dataset", "env.path": str(folder.absolute()), "env.prompt_column": "prompt",
            "env.task.chat": False}
    if all("answer" in row for row in rows):
        keys["env.answer_column"] = "answer"
    if held_out is None:
        keys["env.task.num_test"] = max(1, min(_HELD_OUT, len(rows) // _SHARE))
    else:
        _write([dict(row) for row in held_out], folder / "test.jsonl", "eval_dataset")
        keys["env.task.test_split"] = "test"
    return keys


def _write(rows: list[dict[str, Any]], path: Path, what: str) -> None:
    if not rows:
        raise ConfigError(f"{what}: it has no rows")
    for number, row in enumerate(rows):
        if "prompt" not in row:
            raise ConfigError(f"{what}: row {number} has no column 'prompt', but "
                              f"{', '.join(map(str, row)) or 'none'}")
    try:
        lines = [json.dumps(row) for row in rows]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what}: rows are texts, numbers, lists and tables, which go into a "
                          f"file for all processes of the run: {error}") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


#: Names under which this process alone knows functions.
_GIVEN: set[str] = set()



def reward_name(reward: Reward) -> str:
    """What ``env.reward`` calls a function: its import path, or, where no other process would find
    it, a name under which this one knows it from now on.

    Examples:
        >>> reward_name("exact_match"), reward_name(get_reward("exact_match"))
        ('exact_match', 'grpo.envs.rewards.answers:exact_match')
        >>> reward_name(lambda completion, problem: 1.0)  # doctest: +ELLIPSIS
        'lambda...'
    """
    if isinstance(reward, str):
        return reward
    if not callable(reward):
        raise ConfigError(f"reward={reward!r:.80}: give a function, or the name of a reward")
    path = path_of(reward)
    if path is not None and path.partition(":")[2].isidentifier():
        return path
    base = "".join(char for char in getattr(reward, "__name__", type(reward).__name__)
                   if char.isidentifier() or char.isdigit())
    for number in range(1, len(reward_names()) + 2):
        name = base if number == 1 else f"{base}_{number}"
        if name not in reward_names():
            register_reward(name)(_markable(reward))
            _GIVEN.add(name)
            break
        if _original(get_reward(name)) is reward:
            break
    return name


def _markable(reward: RewardFn) -> RewardFn:
    """The function, or something around it that may have marks, which methods may not."""
    if inspect.isfunction(reward):
        return reward
    own = functools.partial(reward)
    own.takes_lists = getattr(reward, "takes_lists", False)
    return own


def _original(reward: RewardFn) -> Any:
    return reward.func if isinstance(reward, functools.partial) else reward
