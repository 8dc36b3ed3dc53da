"""Where an evaluation's result goes; looked at before the work, which may take hours."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from grpo.config.keys import ConfigError
from grpo.report.loggers import METRICS_FILE
from grpo.system.folders import why_not_writable

_EVALUATIONS = Path("outputs", "evaluations")


def result_folder(out: str | None, *parts: str) -> Path:
    """The folder of a result, in which nothing stands in the way of it.

    Args:
        out: is it; None: a new one in ``outputs/evaluations``, which is made once there is a
            result.
        parts: folders in it that get a result each; none: it gets one itself.

    Raises:
        ConfigError: if it cannot be written, or is that of a run.
    """
    if out is None:
        place = _EVALUATIONS
        # Jobs of an array start in the same second.
        folder = place / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{secrets.token_hex(4)}"
    else:
        place = folder = Path(out)
    if problem := why_not_writable(place):
        raise ConfigError(f"out={place}: results cannot be written there ({problem}); give another "
                          "folder, such as out=/tmp/evaluation")
    for one in (folder / part for part in parts or ("",)):
        if (one / METRICS_FILE).exists():
            raise ConfigError(f"out={folder}: {one} is the folder of a run (it has a "
                              f"{METRICS_FILE}), whose report and metrics would be overwritten; "
                              f"give another, such as out={one}/evaluation")
    return folder
