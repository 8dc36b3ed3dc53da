"""What an evaluation found, as a table of estimates and as ``metrics/eval_iter_NNN.json``.

The file has the figures of the first task at its top (``pass@8``, ``pass_ordered@8``, ``mean@8``,
``best@8``), under ``tasks`` those of each with intervals, and which sample of which problem was
right, from which two evaluations are compared problem by problem.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from grpo.config.keys import ConfigError
from grpo.report.at_k import Estimate, Samples, Values, all_at_k, estimates
from grpo.report.loggers import write_atomically

FOLDER = "metrics"
#: What the file says of how a task was asked: section ``env``, tokens of a response at most,
#: temperature of the samples, if there are any, rewards and their weights, and of each problem
#: :func:`grpo.envs.prompts.digest`.
ASKED = ("env", "max_tokens", "temperature", "reward", "hashes")


@dataclass(frozen=True)
class TaskScores:
    """What was found on the problems of one task.

    Args:
        name: of the task.
        ids: of its ``P`` problems.
        greedy: bool ``[P]``, whether the greedy completion was right.
        samples: ``n`` of each problem; None: no more was drawn.
        errors: completions without a reward, which count as wrong.
        asked: what was asked and how it was scored, see :data:`ASKED`; empty where that is not
            known.
    """

    name: str
    ids: Sequence[str]
    greedy: Sequence[bool]
    samples: Samples | None = None
    errors: int = 0
    asked: Mapping[str, Any] = field(default_factory=dict)

    def per_problem(self, ks: Sequence[int]) -> dict[str, Values]:
        """Each figure of each problem, float ``[P]``, by its name."""
        found = {"accuracy": np.array(self.greedy, dtype=np.float64)}
        return found if self.samples is None else found | all_at_k(self.samples, ks)

    def estimates(self, ks: Sequence[int], *, seed: int) -> dict[str, Estimate]:
        """Each figure with its interval."""
        return estimates(self.per_problem(ks), seed=seed)


def record_of(
    tasks: Sequence[TaskScores], *, ks: Sequence[int], seed: int, temperature: float | None,
    lm_eval: Mapping[str, Mapping[str, Any]] | None = None, **about: Any,
) -> dict[str, Any]:
    """What the file holds of an evaluation.

    Args:
        tasks: the first of them is the run's own.
        ks: of pass@k and its relatives.
        seed: of samples and bootstrap.
        temperature: of the samples; None without any.
        lm_eval: of each task of lm-eval the number of ``problems``, and ``metrics`` with ``value``
            and ``stderr``.
        about: further values for its top, such as the model.
    """
    own, samples = tasks[0], tasks[0].samples
    found = {task.name: task.estimates(ks, seed=seed) for task in tasks}
    return {
        **about, "seed": seed, "temperature": temperature, "num_ids": len(own.ids),
        "replicates": samples.n if samples else 0, "k": list(ks),
        **{name: value.value for name, value in found[own.name].items()},
        "tasks": {task.name: {
            "problems": len(task.ids), "errors": task.errors,
            "estimates": {name: value._asdict() for name, value in found[task.name].items()},
            "ids": list(task.ids), "greedy": bits(task.greedy),
            "samples": None if task.samples is None else [*map(bits, task.samples.correct)],
            **task.asked,
        } for task in tasks}, **({"lm_eval": dict(lm_eval)} if lm_eval else {})}


def bits(right: Sequence[bool]) -> str:
    """Right and wrong as a text of ones and zeros.

    Examples:
        >>> bits([True, False, True])
        '101'
    """
    return "".join("1" if one else "0" for one in right)


def write_record(run_dir: Path, iteration: int, record: dict[str, Any]) -> Path:
    """Write ``metrics/eval_iter_NNN.json`` of a run.

    Raises:
        OSError: if it cannot be written; an earlier one is left as it was.
    """
    path = run_dir / FOLDER / f"eval_iter_{iteration:03d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({"iteration": iteration, **record}) + "\n")
    return path


def read_tasks(path: Path) -> dict[str, TaskScores]:
    """The tasks of a file, whose samples have no answers.

    Raises:
        ConfigError: for a file that is none of these.
    """
    try:
        record = json.loads(path.read_text())
        found: dict[str, dict[str, Any]] = record["tasks"]
        for task in found.values():
            if task["samples"] and "temperature" in record:  # of older files at their top alone
                task.setdefault("temperature", record["temperature"])
        return {name: TaskScores(
            name, task["ids"], [one == "1" for one in task["greedy"]],
            task["samples"] and Samples(np.array([[one == "1" for one in row]
                                                  for row in task["samples"]])),
            task["errors"], {key: task[key] for key in ASKED if key in task})
            for name, task in found.items()}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is no result of an evaluation ({type(error).__name__}: {error}"
                          "); give a metrics/eval_iter_NNN.json") from error
