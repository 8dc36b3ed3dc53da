"""``python -m grpo.run.evaluate``: how good a model is on held-out problems, greedily and sampled.

    python -m grpo.run.evaluate model.name=RUN/final_model eval.samples=64 eval.k=[1,8]
    python -m grpo.run.evaluate compare FIRST SECOND

``model.name`` is a folder, a hub id, a run, one of its checkpoints, or embedded. Keys are those of
a run that say what is asked and what generates: env, model, eval, inference_model. A run has its
section env with it, where env= and --config-name are not given; two that are compared have that of
the first that is a run. Several tasks:
eval.benchmarks=[gsm8k]. ``compare`` takes two results (metrics/eval_iter_NNN.json) or two models,
which it evaluates with the keys given. Keys of the command itself:

    out=FOLDER           of the result, not a run's (default: a new one in outputs/evaluations)
    batch_size=null      completions at a time; null: 256, of a small model on a CPU 2,048
    completions=false    true: written to completions.jsonl
    url=null             of a server with OpenAI's /v1/completions, in the place of an engine here
    served_model=null    the model's name there; null: the only one
    send=tokens          tokens or text: what the server gets as prompts
    timeout=1200         seconds that a batch may take there, with all that is tried again
    connections=64       requests at a time
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo.config.keys import ConfigError
from grpo.config.recipes import recipes
from grpo.run.evaluate.folder import result_folder
from grpo.run.evaluate.options import EvaluateOptions, split_options
from grpo.system.command_line import Parser, errors_in_a_line
from grpo.training.stopping import signals_end_the_process

_RECIPE = "grpo"


def main(argv: list[str] | None = None, *, prog: str = "python -m grpo.run.evaluate") -> None:
    """Evaluate or compare, and print what was found."""
    parser = Parser(prog=prog, description=__doc__)
    parser.add_argument("--config-name", default=_RECIPE, help="recipe of grpo.py (default: grpo)")
    parser.add_argument("keys", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(argv)
    compared = args.keys[:1] == ["compare"]
    typed = args.keys[compared:]
    # Folders of a sweep are called after its keys, such as lr=0.1: what is there is a path.
    names = [text for text in typed if "=" not in text or (
        compared and os.path.exists(os.path.expanduser(text)))]
    overrides = [text for text in typed if text not in names]
    with signals_end_the_process(), errors_in_a_line(
            ValueError, OSError, ImportError, RuntimeError, switch="HYDRA_FULL_ERROR"):
        if compared and len(names) != 2:
            command = prog.removesuffix(" compare")
            raise ConfigError(f"compare takes two results or two models, not {len(names)}; write "
                              f"{command} compare FIRST SECOND")
        if names and not compared:
            raise ConfigError(f"{names[0]}: has no value; write {names[0]}=VALUE")
        options, keys = split_options(overrides)
        if compared:
            if all(Path(name).suffix == ".json" for name in names):
                chosen = args.config_name
                _refuse([f"--config-name {chosen}"] * (chosen != _RECIPE) + overrides)
            _compare(names, options, args.config_name, keys)
        else:
            _check_there(_model(keys), "model.name")
            config = _config(args.config_name, keys)
            _evaluate(config, options, result_folder(options.out))


def _check_there(name: str, key: str) -> None:
    """Refuse a model that is not there; needs no PyTorch."""
    from grpo.policies.model_source import look_for
    from grpo.run.evaluate.source import find_source

    if (model := find_source(name, key=key).model) != "embedded":
        look_for(model, key=key)


def _config(recipe: str, keys: list[str], env_of: str | None = None) -> Any:
    """The checked configuration, of a run's model with its section ``env``; imports PyTorch.

    ``env_of`` is the run whose section it is; None: that of ``model.name``.
    """
    from grpo.run.cli.names import with_env_groups
    from grpo.run.cli.script import check_names
    from grpo.run.evaluate.source import refuse_atropos, saved_env, with_saved_env

    keys, saved = with_env_groups(keys, recipes()), None
    if recipe == _RECIPE and not any(text.startswith(("env=", "env.dataset=")) for text in keys):
        saved = saved_env(env_of or _model(keys))
    if saved is not None:
        run = env_of or f"model.name={_model(keys)}"
        refuse_atropos(saved["dataset"], f"{run} was trained with env=atropos")
    if saved is not None and (recipes() / "env" / f"{saved['dataset']}.yaml").is_file():
        keys = [f"env={saved['dataset']}", *keys]
    check_names(recipes(), recipe, keys)
    import hydra

    with hydra.initialize_config_dir(str(recipes()), version_base=None):
        values = hydra.compose(recipe, overrides=keys)
    refuse_atropos(values.env.dataset, "env=atropos")
    import logging

    import grpo.run.cli  # noqa: F401  shares the cores, before PyTorch is imported
    from grpo.config.asynchronous import AsyncConfig
    from grpo.config.schema import Config, load_config

    logging.basicConfig(format="%(message)s")
    logging.getLogger("grpo").setLevel(logging.INFO)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    if saved is not None:
        values = with_saved_env(values, saved, keys)
    return load_config(values, AsyncConfig if "async" in recipe else Config)


def _model(keys: list[str]) -> str:
    given = [text.partition("=")[2] for text in keys if text.startswith("model.name=")]
    return given[-1].strip("'\"") if given else "embedded"


def _evaluate(
    config: Any, options: EvaluateOptions, folder: Path, beside: Sequence[str] = ()
) -> Any:
    from rich.console import Console

    from grpo.report.eval_file import write_record
    from grpo.report.eval_page import screen_tables, write_page
    from grpo.run.evaluate.evaluate import evaluate

    screen = Console(highlight=False)
    screen.print(f"evaluating {config.model.name}", markup=False)
    found = evaluate(config, options, folder, beside=beside,
                     say=lambda line: screen.print(line, markup=False))
    for table in screen_tables(found.record):  # is known even if the disk is full by now
        screen.print(table)
    path = write_record(folder, found.iteration, found.record)
    write_page(folder, found.tasks, found.record)
    spent = ", ".join(f"{name} {value:.1f} s" for name, value in found.seconds.items())
    screen.print(f"{spent}\nresult {path}\nreport {folder / 'report.html'}", markup=False,
                 soft_wrap=True)
    return found


def _refuse(typed: list[str]) -> None:
    """What was typed beside two results, of which nothing is sampled."""
    if unread := [text for text in typed if not text.startswith("out=")]:
        raise ConfigError(f"{unread[0]} is not read where two results are compared; remove it")


def _compare(names: list[str], options: EvaluateOptions, recipe: str, keys: list[str]) -> None:
    from rich.console import Console

    from grpo.report.eval_file import read_tasks
    from grpo.report.loggers import write_atomically
    from grpo.report.paired import compare, comparison_tables
    from grpo.run.evaluate.source import saved_env

    if any(text.startswith("model.name=") for text in keys):
        raise ConfigError("model.name is not read by compare, which is given two; remove it")
    files = [Path(name).suffix == ".json" for name in names]
    # Both are looked for before one is evaluated, which may take hours.
    read: list[Any] = [read_tasks(Path(name)) if is_file else None
                       for name, is_file in zip(names, files, strict=True)]
    for place, name, is_file in zip(("FIRST", "SECOND"), names, files, strict=True):
        if not is_file:
            _check_there(name, f"compare {place}")
    run = next((name for name in names if saved_env(name) is not None), None)
    configs = [None if is_file else _config(recipe, [*keys, f"model.name='{name}'"], run)
               for name, is_file in zip(names, files, strict=True)]
    folder = None if all(files) and options.out is None else result_folder(
        options.out, "first", "second")
    sides = [
        there if config is None else {task.name: task for task in _evaluate(
            config, options, folder / part, names).tasks}
        for there, config, part in zip(read, configs, ("first", "second"), strict=True)]
    sampled = next((config.eval for config in configs if config is not None), None)
    found = compare(*sides) if sampled is None else compare(
        *sides, ks=sampled.k, seed=sampled.seed)
    screen = Console(highlight=False)
    for table in comparison_tables(found, tuple(names)):
        screen.print(table)
    if folder is not None:
        path = folder / "compare.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"first": names[0], "second": names[1], "tasks": [
            one.as_dict() for one in found]}, indent=2) + "\n")
        screen.print(f"result {path}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main(sys.argv[1:])
