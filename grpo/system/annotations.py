"""Values that somebody typed, beside the annotations of the function that they are for."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

#: JSON's names for what is typed.
_WORDS = {"an object": "a mapping", "a valid array": "a list"}


def check_types(fn: Callable[..., Any], values: Mapping[str, Any], prefix: str) -> None:
    """Refuse values that are not of the types that a function's parameters are annotated with.

    Nothing is converted: the text ``"3"`` is no number, nor is ``true``. A whole number may stand
    for a float, a list for any sequence, and a text for a path, as in a file of JSON. What such a
    file cannot say, a parameter without an annotation, and annotations that cannot be resolved or
    are classes of one's own, are left to the function; and so is a parameter's default.

    Args:
        fn: a function, an object that is called, or a class.
        values: by parameter.
        prefix: of the message, which goes on with the parameter and its value.

    Raises:
        ValueError: for the first value of another type.

    Examples:
        >>> def brevity(completion, problem, *, scale: float = 1.0): ...
        >>> check_types(brevity, {"scale": 2}, "reward 'brevity': ")
        >>> check_types(brevity, {"scale": "2"}, "reward 'brevity': ")
        Traceback (most recent call last):
        ...
        ValueError: reward 'brevity': scale='2' should be a valid number
    """
    # Imported here, because processes that only call such functions do without.
    from pydantic import TypeAdapter, ValidationError
    from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError

    while isinstance(fn, functools.partial):
        fn = fn.func
    hints, parameters = _hints(fn), inspect.signature(fn).parameters if values else {}
    for name, value in values.items():
        if name not in hints or value is parameters[name].default:
            continue
        try:
            typed = json.dumps(value)
            TypeAdapter(hints[name]).validate_json(typed, strict=True)
        except ValidationError as error:
            wanted = dict.fromkeys(one["msg"].removeprefix("Input ") for one in error.errors())
            said = ", or ".join(wanted)
            for theirs, ours in _WORDS.items():
                said = said.replace(theirs, ours)
            raise ValueError(f"{prefix}{name}={value!r} {said}") from error
        except (TypeError, PydanticUserError, PydanticUndefinedAnnotation):
            continue


def _hints(fn: Callable[..., Any]) -> dict[str, Any]:
    if inspect.isclass(fn):
        fn = fn.__init__
    elif not inspect.isroutine(fn):
        fn = type(fn).__call__
    try:
        return get_type_hints(fn, include_extras=True)
    except (NameError, TypeError, AttributeError):  # imported for type checkers alone, or no types
        return {}
