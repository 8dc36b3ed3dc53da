"""Answers in the text of a completion, and numbers in whatever notation.

Everything here takes time linear in the text: plain searches, and expressions that have one way to
match.
"""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise

_DROPPED = str.maketrans("", "", ",$%")
_DECIMAL = re.compile(r"[-+]?[0-9]+\.[0-9]+")

# A number is looked for in so many characters: no answer is longer, and arithmetic on millions of
# digits takes minutes.
_WINDOW = 200
_DIGITS = "0123456789"
_CURRENCY = "$€£¥₹"
_NUMBER = re.compile(
    rf"(?:(?<![\w)\]}}.,])(?P<sign>[-+])[{_CURRENCY}]?)?"  # 5-3 has no negative number
    r"(?<![\d^_.])(?<![^\W\d])"  # neither in 3^2 nor in m2
    r"(?:(?P<whole>[0-9]+)[ ](?=[0-9]+/[0-9]))?"  # of 1 1/2
    r"(?P<number>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:/(?P<below>[0-9]+))?")
_EMPHASIS = re.compile(r"(?<![\w)\]}])_{1,3}(?!_)")  # of __18__; x_18 is an index
_SPACE = re.compile(r"\s(?![0-9])|(?<![0-9])\s")  # outside 1 1/2
_FRACTION = re.compile(r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")
# What LaTeX writes between digits or around numbers, and other signs for minus.
_LATEX = (("{,}", ","), ("\\,", ""), ("\\!", ""), ("\\$", "$"), ("\u2212", "-"), ("\u2013", "-"))


def answer_tag(completion: str) -> str | None:
    """Content of the first ``<answer>`` block, stripped; None if there is no complete block.

    Examples:
        >>> answer_tag("<think>3 * 6</think><answer> 18 </answer><answer>19</answer>")
        '18'
        >>> answer_tag("18") is None
        True
    """
    # Plain searches stay linear in text that opens the tag again and again; a regex does not.
    _, opened, rest = completion.partition("<answer>")
    content, closed, _ = rest.partition("</answer>")
    return content.strip() if opened and closed else None


def normalize_number(text: str) -> str:
    """Bring numbers that differ in notation only to one form.

    Surrounding space, ``,`` ``$`` ``%``, a trailing ``.`` and trailing zeros after the decimal
    point are dropped. Anything else stays as it is.

    Examples:
        >>> [normalize_number(text) for text in ("$1,080.00", "50 %", "2.50", "18.", "100")]
        ['1080', '50', '2.5', '18', '100']
    """
    text = text.translate(_DROPPED).strip().rstrip(".").rstrip()
    if _DECIMAL.fullmatch(text):
        text = text.rstrip("0").rstrip(".")
    return text


def one_number(text: str) -> Fraction | None:
    """The value of a text that names one number, with units or without; of an equation what stands
    behind its last ``=``. None if it names none, or several that differ, or a word has several,
    such as ``9,5``: commas stand between groups of three digits alone.

    Examples:
        >>> [str(one_number(text)) for text in ("$1,080.00", "-5 degrees", "3/4 cup", "2 * 9 = 18",
        ...                                     r"\\boxed{\\frac{1}{2}}", "18 or 20", "9,5")]
        ['1080', '-5', '3/4', '18', '1/2', 'None', 'None']
    """
    if len(text) > _WINDOW:
        return None
    text = _plain(text.rpartition("=")[2])
    found = [*_NUMBER.finditer(text)]
    values = {_value(match) for match in found}
    apart = all(any(map(str.isspace, text[one.end():two.start()])) for one, two in pairwise(found))
    return values.pop() if len(values) == 1 and apart else None


def last_number(text: str) -> Fraction | None:
    """The value of the last number in a text; None if there is none.

    Examples:
        >>> str(last_number("Of 20 eggs 3 break, so 17 are left.")), last_number("none")
        ('17', None)
    """
    end, at = len(text), dict.fromkeys(_DIGITS, len(text))
    # From the end in steps, because a number may be anywhere in a megabyte.
    while True:
        for digit, place in at.items():
            if place >= end:  # else it is the last still, and a search would read all of the text
                at[digit] = text.rfind(digit, 0, end)
        end = max(at.values()) + 1
        if not end:
            return None
        start = max(0, end - _WINDOW)
        # What the step cuts in two is left to the next one.
        if start and (space := _SPACE.search(text, start, end)):
            start = space.start()
        if found := [*_NUMBER.finditer(_plain(text[start:end]))]:
            return _value(found[-1])
        end = start


def _plain(text: str) -> str:
    for latex, plain in _LATEX:
        text = text.replace(latex, plain)
    return _FRACTION.sub(r"\1/\2", _EMPHASIS.sub("", text))


def _value(match: re.Match[str]) -> Fraction | None:
    """None for a division by zero."""
    value = Fraction(match["number"].replace(",", ""))
    if match["below"] is not None:
        if not int(match["below"]):
            return None
        value = int(match["whole"] or 0) + value / int(match["below"])
    return -value if match["sign"] == "-" else value
