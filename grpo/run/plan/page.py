"""A plan as text."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from grpo.config.asynchronous import AsyncConfig
from grpo.config.schema import Config, ConfigError
from grpo.config.unread import value_at
from grpo.run.ledger import GIB
from grpo.run.plan.layouts import Planned, Planner

#: Share of a step that the trainer of an asynchronous run waits, where it is not what holds it up;
#: and times that of one row which a decode step of all rows takes, where more engines would help.
_WAITS, _LONGER = 0.1, 1.2
_OF_REFERENCE = ("ref_model.num_devices", "ref_model.devices", "ref_model.sharded")
HEADER = ("layout", "script", "tensor parallel", "trains", "GiB a device", "generate", "train",
          "transfer", "step", "tokens/s", "held up by")


def table(plans: Sequence[Planned], *, markdown: bool = False) -> str:
    """One line a layout that fits."""
    rows = [HEADER, *(_row(plan) for plan in plans if plan.outcome is not None)]
    if markdown:
        rows.insert(1, ("---",) * len(HEADER))
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(
        row, widths, strict=True)).rstrip() for row in rows)


def _row(plan: Planned) -> tuple[str, ...]:
    layout, outcome = plan.layout, plan.outcome
    return (str(layout), plan.script, str(layout.tensor_parallel),
            f"LoRA {layout.lora.rank}" if layout.lora else "all", memory(plan),
            f"{outcome.generate:.2f}", f"{outcome.train:.2f}", f"{plan.phases.publish:.2f}",
            f"{outcome.step:.2f}", f"{outcome.tokens_per_second:,.0f}", bottleneck(plan))


def memory(plan: Planned) -> str:
    """Of a device of each role, in the order of the layout."""
    return " + ".join(f"{ledger.total / GIB:.1f}" for ledger in plan.ledgers.values())


def bottleneck(plan: Planned) -> str:
    """What is at work all the time; in a synchronous run what takes most of it."""
    outcome, phases = plan.outcome, plan.phases
    parts = {"training": outcome.train, "the update": phases.publish + phases.canary,
             "the trainer's process": phases.driver}
    waits = outcome.wait > (_WAITS * outcome.step if plan.layout.staleness else
                            max(parts.values()))
    if waits:
        if outcome.reference_idle < 0.1 and plan.layout.reference:
            return "the reference"
        # Where a decode step of fewer rows is as long, more engines are of no use.
        alone, full = phases.decode(1), phases.decode(max(1, plan.rows))
        return "generation" if full > _LONGER * alone else "the longest rollouts"
    return max(parts, key=parts.__getitem__)


def page(planner: Planner, plans: list[Planned], command: Sequence[str], *, rows: int,
         refused: Sequence[ConfigError] = ()) -> str:
    """All that is printed.

    Args:
        planner: that made the plans.
        plans: the best first.
        command: the recipe of ``grpo-async.py`` and what else the user gave the run, as typed.
        rows: layouts that are shown.
        refused: why other layouts are no runs of this configuration.
    """
    work, shape, options = planner.work, planner.shape, planner.options
    fitting = [plan for plan in plans if plan.outcome is not None]
    lines = [
        f"{planner.config.model.name}: {shape.parameters / 1e6:,.1f} M parameters; "
        f"{work.groups} prompts x {work.rows} completions x ({work.prompt_tokens} + "
        f"{work.mean_tokens:g}, at most {work.max_tokens}) tokens, sigma {work.sigma:g}",
        f"{options.num_gpus} devices of {planner.memory / GIB:.1f} GiB, {options.gpus_per_host} a "
        f"host; times of {planner.costs.source}", ""]
    if fitting:
        lines += [table(fitting[:rows]), ""]
    if len(fitting) > rows:
        lines.append(f"{len(fitting) - rows} more layouts take longer")
    if missing := [plan for plan in plans if plan.outcome is None]:
        least = min(missing, key=_excess)
        lines.append(f"{len(missing)} layouts do not fit; the nearest, {least.layout}, needs "
                     f"{memory(least)} GiB a device")
    if refused:
        lines.append(f"{len(refused)} layouts are refused, the first: "
                     f"{str(refused[0]).splitlines()[-1].strip()}")
    lines += not_counted(planner.config)
    for lora in (False, True):
        best = planner.recommended(plans, lora=lora)
        if best is not None:
            lines += [f"recommended to train {'adapters' if lora else 'all weights'} "
                      f"({best.layout}, {best.outcome.step:.2f} s a step):",
                      "  " + command_line(best, command)]
    return "\n".join(lines)


def not_counted(config: Config) -> list[str]:
    """What makes the steps of a run longer than a plan says."""
    lines, train = [], config.train
    if train.max_sampling_rounds is not None:
        lines.append(f"not counted: train.max_sampling_rounds={train.max_sampling_rounds}, with "
                     "which up to so many times the rows of a batch are generated for it")
    if config.train_model.quantization is not None:
        lines.append(f"not counted: train_model.quantization={config.train_model.quantization}, "
                     "with which each product writes its weights out first")
    return lines


def command_line(plan: Planned, command: Sequence[str]) -> str:
    """What to type for a layout; ``command`` is a recipe of ``grpo-async.py`` and further keys."""
    recipe, *keys = command
    chosen = {_name(key) for key in plan.keys}
    keys = [key for key in keys if _name(key) not in chosen]  # given as null
    program = "train-async"
    if plan.script == "grpo.py":
        program = "train"
        recipe = recipe.replace("_async", "")
        keys = [key for key in keys if not _of_async_alone(_name(key)) and (
            plan.layout.has_workers or _name(key) != "train.rollout_timeout")]
    if plan.layout.lora and not plan.layout.reference:  # which is the trainer's own model
        keys = [key for key in keys if _name(key) not in _OF_REFERENCE]
    return " ".join([f"grpo {program} --config-name {recipe}",
                     *map(shlex.quote, [*keys, *plan.keys])])


def _name(text: str) -> str:
    return text.partition("=")[0].lstrip("+")


def _of_async_alone(key: str) -> bool:
    """Whether ``grpo-async.py`` has a key that ``grpo.py`` has not; earlier names are in neither
    configuration, but both take them."""
    return _has(AsyncConfig(), key) and not _has(Config(), key)


def _has(config: Config, key: str) -> bool:
    try:
        value_at(config, key)
    except AttributeError:
        return False
    return True


def _excess(plan: Planned) -> int:
    return max(ledger.total for ledger in plan.ledgers.values())
