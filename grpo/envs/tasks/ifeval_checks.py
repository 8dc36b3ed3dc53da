"""The 25 kinds of instructions of IFEval, each a function that says whether a text follows it.

Zhou et al., *Instruction-Following Evaluation for Large Language Models*, 2023 (arXiv:2311.07911).
Verdicts are those of the paper's program; ``docs/tasks.md`` says where they differ and why. Time is
linear in the text, and counting ends where the verdict is known.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from grpo.envs.tasks.language import capital_words, is_language, sentences

CHECKS: dict[str, Callable[..., bool]] = {}
_OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_POSTSCRIPTS = {"P.S.": re.compile(r"p\.\s?s\."), "P.P.S": re.compile(r"p\.\s?p\.\s?s")}


def check(name: str, arguments: Mapping[str, Any]) -> Callable[[str], bool]:
    """The check of an instruction with its arguments, those that are null left out.

    Raises:
        ValueError: if there is no such instruction, or it does not take these arguments.

    Examples:
        >>> two_points = check("detectable_format:number_bullet_lists", {"num_bullets": 2})
        >>> two_points("* one"), two_points("* one\\n- two")
        (False, True)
    """
    if name not in CHECKS:
        raise ValueError(f"instruction_id_list has {name!r}, which is no instruction of IFEval; "
                         f"use some of {', '.join(sorted(CHECKS))}")
    function = CHECKS[name]
    given = {key: value for key, value in arguments.items() if value is not None}
    wanted = list(inspect.signature(function).parameters)[1:]
    if sorted(given) != sorted(wanted):
        raise ValueError(f"kwargs of {name} must be {', '.join(wanted) or 'empty'}, "
                         f"got {', '.join(sorted(given)) or 'none'}")
    return lambda text: function(text, **given)


def _instruction(name: str) -> Callable[[Callable[..., bool]], Callable[..., bool]]:
    def register(function: Callable[..., bool]) -> Callable[..., bool]:
        CHECKS[name] = function
        return function

    return register


def _compare(items: Iterable[Any], relation: str, number: int) -> bool:
    """Whether there are "at least" or "less than" so many."""
    if relation not in ("at least", "less than"):
        raise ValueError(f"relation {relation!r} must be 'at least' or 'less than'")
    return _at_least(items, number) == (relation == "at least")


def _at_least(items: Iterable[Any], number: int) -> bool:
    return number <= 0 or next(islice(items, number - 1, None), None) is not None


def _matches(pattern: str, text: str) -> Iterator[re.Match[str]]:
    return re.finditer(pattern, text, re.IGNORECASE)


# -- keywords and letters -------------------------------------------------------------------------


@_instruction("keywords:existence")
def _existence(text: str, keywords: list[str]) -> bool:
    return all(re.search(re.escape(word), text, re.IGNORECASE) for word in keywords)


@_instruction("keywords:frequency")
def _frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _compare(_matches(re.escape(keyword.strip()), text), relation, frequency)


@_instruction("keywords:forbidden_words")
def _forbidden_words(text: str, forbidden_words: list[str]) -> bool:
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE)
                   for word in forbidden_words)


@_instruction("keywords:letter_frequency")
def _letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    found = text.lower().count(letter.strip().lower())
    return _compare(range(found), let_relation, let_frequency)


# -- language and case ----------------------------------------------------------------------------


@_instruction("language:response_language")
def _response_language(text: str, language: str) -> bool:
    return is_language(text, language)


@_instruction("change_case:english_capital")
def _english_capital(text: str) -> bool:
    return text.isupper() and is_language(text, "en")


@_instruction("change_case:english_lowercase")
def _english_lowercase(text: str) -> bool:
    return text.islower() and is_language(text, "en")


@_instruction("change_case:capital_word_frequency")
def _capital_word_frequency(text: str, capital_frequency: int, capital_relation: str) -> bool:
    return _compare(capital_words(text), capital_relation, capital_frequency)


# -- length ---------------------------------------------------------------------------------------


@_instruction("length_constraints:number_sentences")
def _number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    return _compare(sentences(text), relation, num_sentences)


@_instruction("length_constraints:number_words")
def _number_words(text: str, num_words: int, relation: str) -> bool:
    return _compare(re.finditer(r"\w+", text), relation, num_words)


@_instruction("length_constraints:number_paragraphs")
def _number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Between ``***``; only the first and the last may be empty."""
    parts = re.split(r"\s?\*\*\*\s?", text)
    if not all(part.strip() for part in parts[1:-1]):
        return False
    return sum(bool(part.strip()) for part in parts) == num_paragraphs


@_instruction("length_constraints:nth_paragraph_first_word")
def _nth_paragraph_first_word(
    text: str, num_paragraphs: int, nth_paragraph: int, first_word: str,
) -> bool:
    """Between two newlines. Empty ones do not count, but keep their place in the order."""
    parts = text.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    if count != num_paragraphs or nth_paragraph > count:
        return False
    words = parts[nth_paragraph - 1].split(maxsplit=1)
    if not words:
        return False
    word = words[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word, maxsplit=1)[0].lower() == first_word.lower()


# -- content --------------------------------------------------------------------------------------


@_instruction("detectable_content:number_placeholders")
def _number_placeholders(text: str, num_placeholders: int) -> bool:
    return _at_least(_brackets(text), num_placeholders)


def _brackets(text: str) -> Iterator[int]:
    """Places of ``[...]`` within a line."""
    for line in text.split("\n"):
        end = -1
        while (start := line.find("[", end + 1)) >= 0 and (end := line.find("]", start)) >= 0:
            yield end


@_instruction("detectable_content:postscript")
def _postscript(text: str, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    pattern = _POSTSCRIPTS.get(marker)
    return marker.lower() in text.lower() if pattern is None else bool(pattern.search(text.lower()))


# -- format ---------------------------------------------------------------------------------------


@_instruction("detectable_format:number_bullet_lists")
def _number_bullet_lists(text: str, num_bullets: int) -> bool:
    """Lines that begin with ``*`` or ``-``. A line that is ``*`` alone goes on in the next one."""
    found, goes_on = 0, False
    lines = text.split("\n")
    for number, line in enumerate(lines):
        line, began, goes_on = line.lstrip(), goes_on, False
        if line.startswith("-"):
            found += 1
        elif line == "*" and not began and number + 1 < len(lines):
            found, goes_on = found + 1, True
        elif line[:1] == "*" and line[1:2] not in ("", "*") and not began:
            found += 1
    return found == num_bullets


@_instruction("detectable_format:constrained_response")
def _constrained_response(text: str) -> bool:
    return any(option in text for option in _OPTIONS)


@_instruction("detectable_format:number_highlighted_sections")
def _number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """``*so*`` counts once, ``**so**`` twice: its inside is one of the former."""
    def found() -> Iterator[bool]:
        for pattern in (r"\*([^\n*]*)\*", r"\*\*([^\n*]*)\*\*"):
            yield from (True for match in re.finditer(pattern, text) if match[1].strip())

    return _at_least(found(), num_highlights)


@_instruction("detectable_format:multiple_sections")
def _multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    pattern = rf"{re.escape(section_spliter.strip())}\s?\d+"
    return _at_least(re.finditer(pattern, text), num_sections)


@_instruction("detectable_format:json_format")
def _json_format(text: str) -> bool:
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):  # of what is nested too deep
        return False
    return True


@_instruction("detectable_format:title")
def _title(text: str) -> bool:
    """``<<so>>`` within a line."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start:end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


# -- whole responses ------------------------------------------------------------------------------


@_instruction("combination:two_responses")
def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    if not all(parts[1:-1]):
        return False
    said = [part for part in parts if part]
    return len(said) == 2 and said[0] != said[1]


@_instruction("combination:repeat_prompt")
def _repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


@_instruction("startend:end_checker")
def _end_checker(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@_instruction("startend:quotation")
def _quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


@_instruction("punctuation:no_comma")
def _no_comma(text: str) -> bool:
    return "," not in text
