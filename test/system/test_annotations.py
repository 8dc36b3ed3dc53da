"""Values are of the types that are annotated, as a configuration file says them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest

from grpo.system.annotations import check_types

if TYPE_CHECKING:
    from decimal import Decimal


class Own:
    pass


def typed(
    completion, problem, *, whole: int = 1, number: float = 1.0, yes: bool = False,
    text: str | None = None, pair: Sequence[float] = (0, 1), place: Path = Path(),
    fixed: tuple[int, int] = (1, 2), way: Literal["a", "b"] = "a", own: Own | None = None,
    table: Mapping[str, float] | None = None, bare=1, wrong: int = None,  # noqa: RUF013
) -> float: ...


class Called:
    def __call__(self, completion, problem, *, whole: int = 1) -> float: ...


class Made:
    def __init__(self, *, whole: int = 1) -> None: ...


async def awaited(completion, problem, *, whole: int = 1) -> float: ...


@pytest.mark.parametrize("values", [
    {"whole": 3}, {"number": 3}, {"number": float("inf")}, {"yes": True}, {"text": "a"},
    {"text": None}, {"pair": [1, 2.5]}, {"pair": (1, 2)}, {"place": "a/b"}, {"place": Path("a")},
    {"fixed": [3, 4]}, {"way": "b"}, {"own": Own()}, {"own": 5}, {"table": {"a": 1}}, {"bare": "x"},
    {"wrong": None}, {"whole": np.int64(3)}])
def test_values_of_the_type_pass(values):
    check_types(typed, values, "it: ")
    check_types(partial(typed, whole=2), values, "it: ")


@pytest.mark.parametrize(("values", "said"), [
    ({"whole": "3"}, "whole='3' should be a valid integer"), ({"whole": True}, "whole=True"),
    ({"whole": 3.5}, "whole=3.5"), ({"whole": None}, "whole=None"), ({"number": "3"}, "number='3'"),
    ({"number": True}, "number=True"), ({"yes": 1}, "yes=1"), ({"text": 5}, "text=5"),
    ({"pair": ["0", "10"]}, "pair="), ({"pair": 5}, "pair=5 should be a list"),
    ({"pair": "01"}, "pair='"),
    ({"fixed": [1]}, "fixed="), ({"way": "c"}, "way='c' should be 'a' or 'b'"),
    ({"table": {"a": "1"}}, "table="), ({"table": [1]}, "table=.* a mapping"),
    ({"number": 1, "wrong": "x"}, "wrong='x'")])
def test_values_of_another_type_are_named(values, said):
    for fn in (typed, partial(typed, whole=2)):
        with pytest.raises(ValueError, match=f"^it: {said}"):
            check_types(fn, values, "it: ")


@pytest.mark.parametrize("fn", [Called(), Made, awaited])
def test_whatever_is_called_has_its_types_checked(fn):
    check_types(fn, {"whole": 3}, "it: ")
    with pytest.raises(ValueError, match="whole='3'"):
        check_types(fn, {"whole": "3"}, "it: ")


def test_a_function_whose_annotations_are_for_type_checkers_is_left_alone():
    def fn(completion, problem, *, exact: Decimal | None = None, whole: int = 1): ...

    check_types(fn, {"whole": "3"}, "it: ")
