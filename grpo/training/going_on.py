"""From where a run that has ended early goes on."""

from __future__ import annotations

from grpo.training.checkpoint import Checkpoint
from grpo.weights.canary import StaleWeightsError


def how_to_go_on(
    saved: Checkpoint, compared: Checkpoint | None, reason: BaseException
) -> str:
    """What a run says at its end.

    Weights that an engine lacked may have been trained on what it generated without them, so after
    a failed proof an earlier checkpoint is the one to take.

    Args:
        saved: the newest checkpoint.
        compared: the newest one before which all weights were compared with the engine's.
        reason: what has ended the run.

    Examples:
        >>> from pathlib import Path
        >>> at = lambda step: Checkpoint(Path(f"step_{step:06d}"), step)
        >>> how_to_go_on(at(12), at(10), KeyError())
        'the run can go on: resume=auto, or resume=step_000012'
        >>> print(how_to_go_on(at(12), at(10), StaleWeightsError()))
        the run can go on: resume=step_000010, the last checkpoint that was compared as a whole; \
resume=auto takes step_000012, which may have been trained on what other weights generated
        >>> print(how_to_go_on(at(12), None, StaleWeightsError()))
        the run can go on: resume=auto takes step_000012, which may have been trained on what \
other weights generated; no checkpoint before it was compared as a whole
    """
    if not isinstance(reason, StaleWeightsError) or saved == compared:
        return f"the run can go on: resume=auto, or resume={saved.folder}"
    auto = (f"resume=auto takes {saved.folder}, which may have been trained on what other weights "
            "generated")
    if compared is None:
        return f"the run can go on: {auto}; no checkpoint before it was compared as a whole"
    return (f"the run can go on: resume={compared.folder}, the last checkpoint that was compared "
            f"as a whole; {auto}")
