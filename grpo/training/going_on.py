"""From where a run that has ended early goes on."""

from __future__ import annotations

from pathlib import Path

from grpo.training.checkpoint import Checkpoint
from grpo.weights.canary import StaleWeightsError


def how_to_go_on(
    run_dir: Path, saved: Checkpoint, compared: Checkpoint | None, reason: BaseException
) -> str:
    """What a run says at its end.

    Weights that an engine lacked may have been trained on what it generated without them, so after
    a failed proof an earlier checkpoint is the one to take.

    Args:
        run_dir: of the run.
        saved: the newest checkpoint; that of its parent where a branch could save none, which
            ``resume=auto`` does not take, as its settings are others.
        compared: the newest one before which all weights were compared with the engine's.
        reason: what has ended the run.

    Examples:
        >>> run, at = Path("."), lambda step: Checkpoint(Path(f"checkpoints/step_{step}"), step)
        >>> how_to_go_on(run, at(12), at(10), KeyError())
        'the run can go on: resume=auto, or resume=checkpoints/step_12'
        >>> how_to_go_on(Path("branch"), at(12), at(12), KeyError())
        'the run can go on: resume=checkpoints/step_12'
        >>> print(how_to_go_on(run, at(12), at(10), StaleWeightsError()))
        the run can go on: resume=checkpoints/step_10, the last checkpoint that was compared as a \
whole; resume=auto takes checkpoints/step_12, which may have been trained on what other weights \
generated
        >>> print(how_to_go_on(run, at(12), None, StaleWeightsError()))
        the run can go on: resume=auto takes checkpoints/step_12, which may have been trained on \
what other weights generated; no checkpoint before it was compared as a whole
    """
    if not isinstance(reason, StaleWeightsError) or saved == compared:
        auto = "resume=auto, or " if saved.run_dir.resolve() == run_dir.resolve() else ""
        return f"the run can go on: {auto}resume={saved.folder}"
    auto = (f"resume=auto takes {saved.folder}, which may have been trained on what other weights "
            "generated")
    if compared is None:
        return f"the run can go on: {auto}; no checkpoint before it was compared as a whole"
    return (f"the run can go on: resume={compared.folder}, the last checkpoint that was compared "
            f"as a whole; {auto}")
