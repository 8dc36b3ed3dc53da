"""Why an environment failed, as its log says: the last traceback, or a module that is missing."""

from __future__ import annotations

import re
from pathlib import Path

from grpo.system.child_process import log_tail

_MOST_BYTES = 256 << 10  # of the end of a log
_MOST_LINES = 24  # of a traceback
_MORE_LINES = 6
_MOST_WIDTH = 400
_ERROR = re.compile(r"\b(ERROR|CRITICAL|Error|\w+Error|\w*Exception)\b")
_HEAD = "Traceback (most recent call last)"
# Modules that come in a package of another name.
_PACKAGES = {"PIL": "pillow", "bs4": "beautifulsoup4", "cv2": "opencv-python",
             "dotenv": "python-dotenv", "skimage": "scikit-image", "sklearn": "scikit-learn",
             "yaml": "pyyaml"}


def last_traceback(path: Path, *, since: int = 0, more: int = 0) -> list[str]:
    """The last traceback in a log, from its head to what was raised, and ``more`` lines, because a
    message may be long. The first ``since`` bytes belong to an earlier run."""
    lines = _end(path, since)
    heads = [at for at, line in enumerate(lines) if _HEAD in line]
    if not heads:
        return []
    found = lines[heads[-1]:]
    end = next((at for at, line in enumerate(found[1:], 1) if line[:1].strip(" |")), len(found) - 1)
    return found[: end + 1 + more]


def failed_import(path: Path, *, since: int = 0) -> str | None:
    """The import error that is the last thing a log tells of, or None.

    Examples:
        >>> failed_import(Path("/nowhere")) is None
        True
    """
    raised = "".join(last_traceback(path, since=since)[-1:])
    return raised if re.match(r"(ModuleNotFoundError|ImportError)\b", raised) else None


def import_fix(raised: str, *, python: str, script: Path) -> str:
    """What to do about an import error, whose line in the log is ``raised``.

    Examples:
        >>> import_fix("ModuleNotFoundError: No module named 'yaml'", python="venv/bin/python",
        ...            script=Path("/envs/math.py"))
        "needs the module 'yaml'; install it there: venv/bin/python -m pip install pyyaml"
        >>> import_fix("ImportError: cannot import name 'a' from 'b'", python="python",
        ...            script=Path("/envs/math.py"))[:59]
        "cannot be imported (ImportError: cannot import name 'a' fro"
    """
    named = re.search(r"No module named '([\w.]+)'", raised)
    if named is None:
        return (f"cannot be imported ({raised}); install the version of that package that it wants "
                f"with {python} -m pip install")
    module = named[1]
    top = module.partition(".")[0]
    for folder in list(script.absolute().parents)[:4]:
        if (folder / top).is_dir() or (folder / f"{top}.py").is_file():
            return (f"needs the module {module!r}, which seems to lie in {folder}; start the "
                    f"command with PYTHONPATH={folder}")
    return (f"needs the module {module!r}; install it there: {python} -m pip install "
            f"{_PACKAGES.get(top, top)}")


def quoted(path: Path, *, since: int = 0) -> str:
    """The last traceback in a log, or else its end, set for the end of an error message."""
    lines = last_traceback(path, since=since, more=_MORE_LINES)
    return _set(lines, path) if lines else log_tail(path)


def troubles(path: Path, *, since: int = 0) -> str:
    """The errors in the log of an environment that still runs, set as by :func:`quoted`; atroposlib
    goes on after one in ``collect_trajectories``, of which it logs one line."""
    lines = last_traceback(path, since=since, more=_MORE_LINES) or [
        line for line in _end(path, since) if _ERROR.search(line)][-_MORE_LINES:]
    return _set(lines, path) if lines else ""


def _set(lines: list[str], path: Path) -> str:
    if len(lines) > _MOST_LINES:
        lines = [lines[0], "  ...", *lines[2 - _MOST_LINES:]]
    text = "\n".join(f"  | {line[:_MOST_WIDTH]}" for line in lines)
    return f"; the last error in {path}:\n{text}"


def _end(path: Path, since: int) -> list[str]:
    if not path.exists():
        return []
    with path.open("rb") as log:
        size = log.seek(0, 2)
        log.seek(max(since, size - _MOST_BYTES))
        return log.read().decode("utf-8", "replace").splitlines()
