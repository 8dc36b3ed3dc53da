"""Sentences, capital words and the language of a text, by nltk and langdetect, without downloads.

Both are deterministic here: Punkt has its rules for English and a list of abbreviations, where
nltk's own models come from a download; langdetect draws random numbers, from a seed.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

#: Words behind which a full stop ends no sentence, in lower case and without it.
ABBREVIATIONS = frozenset("""
    a.d a.m adm al alt apr approx apt assn assoc asst attn aug ave b.c blvd bros capt cf cmdr co col
    corp cpl d.c dec dept dist div dr e.g ed eds esq est etc feb fig figs ft gen gov govt hon hr inc
    incl jan jr lt ltd maj mar messrs mfg mgr misc mr mrs ms msgr mt natl nov oct oz p.m ph.d pp
    pres prof rep reps rev sat sen sens sept sgt sr st ste supt tel u.k u.n u.s u.s.a univ v vol
    vols vs yr
""".split())
#: Words that tell a new sentence from a name where they follow "Farm Y." with a capital.
COMMON_WORDS = frozenset("""
    a after all also an and are as at be because before both but by can could did do does during
    each every finally find first for from give had has have he hence her here his how if in include
    is it its let make many more my next no not now of on one or our over please she since so some
    such than that the their then there therefore these they this those thus to under use was we
    were what when where which while who whose why will with would write you your
""".split())
# Characters of a text that are looked at, so that a verdict takes no second whatever the text is.
# langdetect itself reads no more than these.
_READ_FOR_LANGUAGE, _READ_FOR_SENTENCES, _READ_FOR_WORDS = 10_000, 100_000, 200_000
_STOPS = re.compile(r"[.?!]")
_MOST_STOPS = 2_000  # the longest of IFEval's texts has a hundred sentences
_PIECE = re.compile(r"""[^\s,;:?!()\[\]{}<>"“”«»„‘’*&@#$%…]+""")
_PARTING = re.compile(r"--+|\.{2,}")
_CONTRACTION = re.compile(r"(?<=.)(?:n't|'(?:s|m|d|ll|re|ve))$", re.IGNORECASE)
_LOADING = threading.Lock()


def sentences(text: str) -> Iterator[str]:
    """Sentences of an English text, one after the other.

    Examples:
        >>> [*sentences("Mr. Smith paid $3.50, e.g. for tea. Did he?! He did.")]
        ['Mr. Smith paid $3.50, e.g. for tea.', 'Did he?!', 'He did.']
    """
    text = text[:_READ_FOR_SENTENCES]
    if (last := next(islice(_STOPS.finditer(text), _MOST_STOPS, None), None)) is not None:
        text = text[:last.start()]
    return (text[start:end] for start, end in _punkt().span_tokenize(text))


def capital_words(text: str) -> Iterator[str]:
    """Words in capital letters, as the Penn Treebank's rules cut them: a contraction is two, words
    with hyphens are one.

    Examples:
        >>> [*capital_words("THE U.S. WON 3-2, DIDN'T it? NASA's WELL-KNOWN A--B")]
        ['THE', 'U.S.', 'WON', 'DID', "N'T", 'NASA', 'WELL-KNOWN', 'A', 'B']
    """
    for match in _PIECE.finditer(text[:_READ_FOR_WORDS]):
        for piece in _PARTING.split(match[0]):
            apart = _CONTRACTION.search(piece[-4:])
            at = len(piece) if apart is None else len(piece) - len(apart[0])
            yield from (part for part in (piece[:at], piece[at:]) if part.isupper())


def is_language(text: str, language: str) -> bool:
    """Whether a text is in the language of a code such as "en". One in which there is nothing to
    tell it by, such as "123", is in every language.

    Examples:
        >>> is_language("Wo ist der Bahnhof?", "de"), is_language("Wo ist der Bahnhof?", "en")
        (True, False)
        >>> is_language("123", "de")
        True
    """
    found = _detected(text[:_READ_FOR_LANGUAGE])
    return found is None or found == language


def warm_up() -> None:
    """Load what takes a second, so that the first verdict does not."""
    _languages()
    _punkt()


@functools.lru_cache(256)
def _detected(text: str) -> str | None:
    from langdetect.lang_detect_exception import LangDetectException

    detector = _languages().create()
    detector.append(text)
    try:
        return detector.detect()
    except LangDetectException:
        return None


def _languages() -> Any:
    with _LOADING:  # which takes half a second, once
        return _loaded_languages()


@functools.cache
def _loaded_languages() -> Any:
    from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

    factory = DetectorFactory()
    factory.load_profile(PROFILES_DIRECTORY)
    factory.seed = 0
    return factory


@functools.cache
def _punkt() -> Any:
    from nltk.tokenize.punkt import _ORTHO_MID_LC, PunktParameters, PunktSentenceTokenizer

    known = PunktParameters()
    known.abbrev_types, known.sent_starters = set(ABBREVIATIONS), set(COMMON_WORDS)
    for word in COMMON_WORDS:
        known.ortho_context[word] = _ORTHO_MID_LC  # it is written small within sentences
    return PunktSentenceTokenizer(known)
