"""Which policy version sampled which tokens of a row."""

from __future__ import annotations

from collections.abc import Sequence

#: ``(version, tokens)``: so many tokens in a row are of this version.
Spans = Sequence[tuple[int, int]]
#: ``(version, position)``: tokens before the position have at most this version.
Cuts = Sequence[tuple[int, int]]


def spans_of(cuts: Cuts, version: int, *, start: int = 0, end: int) -> list[tuple[int, int]]:
    """The versions of the tokens ``start`` to ``end``.

    Args:
        cuts: where newer versions began.
        version: of tokens behind the last cut.
        start: first token.
        end: behind the last token.

    Examples:
        >>> spans_of([(3, 0), (4, 2)], 5, end=5)
        [(4, 2), (5, 3)]
    """
    spans = []
    for value, stop in [*cuts, (version, end)]:
        stop = min(stop, end)
        if stop > start:
            spans.append((value, stop - start))
            start = stop
    return spans


def first_spans(spans: Spans, size: int) -> list[tuple[int, int]]:
    """The spans of the first ``size`` tokens.

    Examples:
        >>> first_spans([(4, 2), (5, 3)], 3)
        [(4, 2), (5, 1)]
    """
    first = []
    for version, count in spans:
        if size > 0:
            first.append((version, min(count, size)))
        size -= count
    return first
