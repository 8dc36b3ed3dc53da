"""A run from Python: ``train(config, reward=fn, dataset=rows)``."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from omegaconf import OmegaConf

from grpo.config.asynchronous import AsyncConfig
from grpo.config.presets import describe_preset, leaves
from grpo.config.recipes import recipes, unknown_group
from grpo.config.schema import Config, ConfigError, load_config
from grpo.config.trl_names import FIELDS, translate, typed
from grpo.config.trl_names.loss import refuse_both
from grpo.policies.model_source import look_for
from grpo.report.history import History
from grpo.report.loggers import METRICS_FILE
from grpo.run.assemble import assemble, assemble_async
from grpo.run.given import (
    Reward,
    Rows,
    as_rewards,
    as_rows,
    check_answers,
    known_here,
    of_rows,
    reward_name,
)
from grpo.run.kept import Kept, keep, kept_rows
from grpo.run.resume import open_run
from grpo.system.folders import why_not_writable


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


class Named(NamedTuple):
    """What a caller calls what it was given, for messages."""

    folder: str = "run_dir"
    rows: str = "dataset"
    held_out: str = "eval_dataset"
    rewards: str = "reward"
    model: str = "model.name"
    resume: str = "resume=auto"


#: By :func:`train`.
NAMED = Named()


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
        run_dir: of the run, which must not hold one unless that goes on; None: a new folder in
            ``outputs``, where ``resume=auto`` then looks for the newest run with the same settings
            and rows.
        recipe: of ``config/``; those that begin with ``grpo_async`` are asynchronous.

    Raises:
        ConfigError: naming keys that are unknown, wrong or not read, and where a run is to go on
            with other rows.

    Examples:
        >>> from grpo import train
        >>> def right(completion, problem):
        ...     return float(completion.strip() == problem.answer)
        >>> rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
        >>> result = train({"train.max_steps": 20, "optimizer.lr": 1e-4}, reward=right,
        ...                dataset=rows)                                     # doctest: +SKIP
        >>> result.final_model                                               # doctest: +SKIP
    """
    if not isinstance(config or {}, Mapping):
        raise ConfigError(f"config is a {type(config).__name__}: give a dictionary of keys, such "
                          "as {'train.max_steps': 20}; names of TRL may be keys of it")
    keys = own_keys(config or {})
    column = keys.get("env.prompt_column", "prompt")
    rows = None if dataset is None else as_rows(dataset, "dataset", column)
    if rows is None and eval_dataset is not None:
        raise ConfigError("eval_dataset without dataset: held-out rows belong to rows that are "
                          "trained on; give dataset, too")
    held_out = None if eval_dataset is None else as_rows(eval_dataset, "eval_dataset", column)
    rewards = as_rewards(reward, "reward", rows, keys.get("env.reward_options"))
    return run(keys, rewards, rows, held_out, run_dir, recipe)


def run(
    keys: Mapping[str, Any], rewards: Sequence[Reward], rows: Rows | None, held_out: Rows | None,
    folder: Any = None, recipe: str = "grpo", *, named: Named = NAMED, model: Kept | None = None,
) -> Result:
    """Train with what has been checked; see :func:`train`.

    Args:
        keys: of today.
        rewards: of which none is what ``keys`` say.
        rows: that are trained on; None: those of the task.
        held_out: rows that are not.
        folder: of the run; None: a new one, or that of the run that goes on.
        recipe: of ``config/``.
        named: what the caller calls these.
        model: to start from, where it is no name.

    Raises:
        ConfigError: naming what was given, its value and the fix.
        FileExistsError: if the folder holds a run, and none is resumed.
    """
    if not isinstance(folder, str | Path | None):
        raise ConfigError(f"{named.folder}={folder!r:.80}: give the path of a folder")
    chosen = {} if folder is None else {"key": named.folder}
    folder = _new_folder() if folder is None else Path(folder)
    keys, kept = dict(keys), [] if model is None else [model]
    if rows is not None:
        for key in ("env", "env.dataset", "env.name", "env.path", "env.dataset_mixture"):
            if keys.get(key) not in (None, "dataset"):
                raise ConfigError(f"{named.rows} and {key}={keys[key]} both say what is trained "
                                  "on; give one")
        column = keys.get("env.prompt_column", "prompt")
        if not (rewards or {"env.reward", "env.answer_column"} & keys.keys()):
            check_answers(rows, named.rewards, column=column)
        keys = of_rows(rows, held_out, folder / "dataset", what=named.rows,
                       column=column) | keys
        kept.append(kept_rows(rows, held_out, what=named.rows, held_out_what=named.held_out))
    if rewards:
        if "env.reward" in keys:
            raise ConfigError(f"env.reward={keys['env.reward']} and {named.rewards}= are the same "
                              "setting; give one")
        keys["env.reward"] = [reward_name(one) for one in rewards]
    made = compose(keys, recipe)
    if made.has_workers and (mine := known_here(keys.get("env.reward", ()))):
        raise ConfigError(f"{named.rewards}={mine[0]}: engines are processes of their own here, "
                          "which must be able to import it; put it into a module")
    if made.resume is None and made.model.name != "embedded" and model is None:
        look_for(made.model.name, key=named.model)
    if problem := why_not_writable(folder):
        raise ConfigError(f"{named.folder}={folder}: runs cannot be written there ({problem}); "
                          "give another folder")
    build = assemble_async if isinstance(made, AsyncConfig) else assemble
    with ExitStack() as at_end:
        run_dir, checkpoint = open_run(made, folder, at_end, kept=kept, **chosen)
        if checkpoint is None and (run_dir / METRICS_FILE).exists():
            raise FileExistsError(_holds_a_run(run_dir, made, named))
        made = keep(made, kept, run_dir, checkpoint)
        trainer = build(made, run_dir, checkpoint, at_end)
        trainer.fit()
    final = next(run_dir / f"final_{kind}" for kind in ("model", "adapter")
                 if (run_dir / f"final_{kind}").is_dir())
    return Result(run_dir, made, History.read(run_dir).rows, final)


def _new_folder() -> Path:
    return Path("outputs", f"{datetime.now():%Y-%m-%d/%H-%M-%S}-{secrets.token_hex(4)}")


def _holds_a_run(run_dir: Path, made: Config, named: Named) -> str:
    """What to do about a run that is not gone on with, though that may have been asked for."""
    found = f"{named.folder}={run_dir} already holds the metrics of a run"
    if made.resume is None:
        return f"{found}; go on with it by {named.resume}, or give another folder"
    return (f"{found}, but no checkpoint that {named.resume} goes on from with "
            f"train.exp_name={made.train.exp_name}; give another folder")


def own_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the dotted keys of today; says what becomes of TRL's names."""
    named = {key: value for key, value in config.items() if key in FIELDS}
    own = dict(leaves({key: value for key, value in config.items() if key not in named}))
    refuse_both(f"preset={own.get('preset', 'none')}", named.get("loss_type"))
    done = translate(named, own)
    for line in done.said:
        print(line)
    other = [key for key in done.keys if own.get(key, done.keys[key]) != done.keys[key]]
    if both := [key for key in other if key not in done.implied]:
        raise ConfigError(f"{both[0]}={own[both[0]]} and a name of TRL for the same are given; "
                          "give one")
    if other:  # than what a name only implies
        text = " ".join(f"{key}={typed(own[key])}" for key in other)
        print(f"the key that is given wins: {text}")
    return own | done.keys | own


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
              if isinstance(key, str) and isinstance(value, str) and (recipes() / key).is_dir()}
    known = sorted(path.stem for path in recipes().glob("grpo*.yaml"))
    if recipe not in known:
        raise ConfigError(f"recipe={recipe!r}: there is no such recipe; known: {', '.join(known)}")
    if errors := [error for key, value in groups.items()
                  if (error := unknown_group(recipes(), key, value))]:
        raise ConfigError(errors[0])
    with hydra.initialize_config_dir(str(recipes()), version_base=None):
        values = hydra.compose(recipe, [f"{key}={value}" for key, value in groups.items()])
    schema = AsyncConfig if "ray" in values else Config  # the recipe says, no key beside it
    OmegaConf.set_struct(values, False)
    for key, value in keys.items():
        if key not in groups:
            OmegaConf.update(values, key, value, merge=value == {})  # which empties no section
    if (preset := groups.get("preset", "none")) != "none":
        print("preset", describe_preset(preset, values, config_folder=recipes()))
    return load_config(OmegaConf.to_container(values, resolve=True), schema)
