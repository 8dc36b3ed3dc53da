"""One evaluation, from a checked configuration to its result."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.config.env import EnvConfig
from grpo.config.keys import ATROPOS
from grpo.config.schema import Config, ConfigError
from grpo.envs.tasks import Task
from grpo.policies.model_source import first_line
from grpo.report.eval_file import TaskScores, record_of
from grpo.run import build
from grpo.run.build_engine import Setup
from grpo.run.build_eval import Questions, build_benchmarks, build_evaluations, held_out, questions
from grpo.run.evaluate.engine import check, open_policy, quick
from grpo.run.evaluate.options import EvaluateOptions
from grpo.run.evaluate.source import Source, find_source, saved_env
from grpo.training.evaluations import without_trace

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """What was found, of which model."""

    tasks: list[TaskScores]
    record: dict[str, Any]  # as of grpo.report.eval_file
    iteration: int
    seconds: dict[str, float]  # of the parts of the work


def evaluate(
    config: Config, options: EvaluateOptions, folder: Path, *, say: Callable[[str], None],
    beside: Sequence[str] = (),
) -> Result:
    """Measure a model on the held-out problems of its task and of benchmarks.

    Args:
        config: what is evaluated, on what.
        options: of the command.
        folder: of the result; it gets the completions, if they are asked for.
        say: is told what goes on.
        beside: models with which it is compared; what they were trained on is left out, too.

    Raises:
        ConfigError: for a configuration that cannot work, naming key and fix.
    """
    build.quiet_libraries()
    source = find_source(config.model.name)
    began, seconds = time.perf_counter(), {}
    with ExitStack() as at_end:
        problems, setup, options = prepare(config, source, options, folder, beside)
        config = setup.config
        for one in problems:
            say(one.described)
        if options.url is None:
            say(f"engine {build.resolve_backend(config)}, {options.batch_size:,} completions at a "
                "time")
        policy = open_policy(setup, source, options, at_end)
        limit = min(policy.max_model_len, setup.max_model_len)
        if too_long := [one for one in problems if one.length > limit]:
            raise ConfigError(f"{too_long[0].name} needs {too_long[0].length} tokens for prompt "
                              f"and response, and the server at url={options.url} takes {limit}; "
                              "lower inference_model.max_tokens, or set env.max_prompt_tokens")
        evaluations = build_evaluations(config, problems, policy, rows=options.batch_size)
        seconds["start"] = time.perf_counter() - began
        began = time.perf_counter()
        listen = _writer(folder, at_end) if options.completions else None
        with without_trace(config.eval.seed):
            tasks = [task.run(listen) for task in (evaluations.own, *evaluations.benchmarks)]
            lm_eval = evaluations.run_harness()
        seconds["sampling and rewards"] = time.perf_counter() - began
    sampled = config.eval.samples is not None
    record = record_of(
        tasks, ks=config.eval.ks, seed=config.eval.seed, model=config.model.name, lm_eval=lm_eval,
        temperature=config.eval.temperature if sampled else None,
        engine=options.url or build.resolve_backend(config), batch_size=options.batch_size,
        seconds={name: round(value, 2) for name, value in seconds.items()})
    return Result(tasks, record, source.iteration, seconds)


def prepare(
    config: Config, source: Source, options: EvaluateOptions, folder: Path,
    beside: Sequence[str] = (),
) -> tuple[list[Any], Setup, EvaluateOptions]:
    """The rendered problems, the run's own first, what an engine is started from, and the options
    with what was left open."""
    device = build.resolve_device(config)
    task = build.build_task(config)
    build.reward_function(config, task)  # refused now, if it cannot be imported
    path = build.model_folder(with_model(config, source.model), task)
    config, options = quick(config, options, device, path)
    check(config, options, device)
    tokenizer = build.load_tokenizer(str(source.adapter or path))
    limit = config.inference_model.max_model_len or build.context_of(config, path)
    if limit is None:
        raise ConfigError("the model does not say how long its context is; set "
                          "inference_model.max_model_len")
    trained = frozenset[tuple[str, ...]]().union(*(
        _trained_on(name, config, task) for name in {config.model.name, *beside}))
    own = held_out(task.name, config, tokenizer, max_tokens=config.max_tokens, limit=limit,
                   task=task, trained=trained)
    problems = [own, *build_benchmarks(config, tokenizer, limit=limit, trained=trained)]
    setup = Setup(config=config, path=path, tokenizer=tokenizer, device=device,
                  dtype=build.resolve_dtype(config, device), folder=folder / "engine",
                  max_model_len=config.inference_model.max_model_len or max(
                      one.length for one in problems))
    return problems, setup, options


def _trained_on(name: str, config: Config, task: Task) -> Questions:
    """What the run was trained on whose model this is; empty if it is no run's."""
    if (saved := saved_env(name)) is None:
        return frozenset()
    try:
        if saved["dataset"] == ATROPOS:
            raise ConfigError("environments of Atropos chose them")
        if (env := EnvConfig.model_validate(saved)) != config.env:
            task = build.build_task(config.model_copy(update={"env": env}))
    except (ValueError, OSError, ImportError) as error:
        logger.warning("which problems the run was trained on is not known (%s); they may be among "
                       "those that it is asked", first_line(error))
        return frozenset()
    return questions(task.train)


def _writer(folder: Path, at_end: ExitStack) -> Callable[[dict[str, Any]], None]:
    folder.mkdir(parents=True, exist_ok=True)
    file = at_end.enter_context((folder / "completions.jsonl").open("w"))
    return lambda row: file.write(json.dumps(row) + "\n")


def with_model(config: Config, name: str) -> Config:
    """The same evaluation of another model."""
    return config.model_copy(update={"model": config.model.model_copy(update={"name": name})})
