"""Owns the judgement of a response: extracts its answer, compares it with the reference, and says why.

Must not set alarms; the sandbox limits the time. Keeps no state except bounded caches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from verifier.verifiers.base import Judgement, UndecidedError, bounded
from verifier.verifiers.math.canonical import canonical
from verifier.verifiers.math.comparison import compare
from verifier.verifiers.math.extraction import SURROGATE, Extraction, boxes, extract
from verifier.verifiers.math.reading.hedges import polar
from verifier.verifiers.math.reading.notation import LONGEST, balanced, clean, readable, words
from verifier.verifiers.math.reading.prose import understand
from verifier.verifiers.math.reading.whole import readings
from verifier.verifiers.math.symbolic import condensed
from verifier.verifiers.math.values import Choice, Formula, Numeral, Quantity, Several, Unclear, Value, Words

REFERENCES = 1024  # references whose reading is kept
REASON = 300  # characters
SHOWN = 80  # characters of a text in a reason
SAME_TEXT = {Numeral: "equal numbers", Words: "same words", Choice: "same choice"}
DEFAULTS: Mapping[str, Any] = MappingProxyType({})
OPTIONS: dict[str, tuple[type, str]] = {"last_number": (bool, "true or false")}
DATE_OR_RANGE = re.compile(r"\d{1,4}/\d{1,2}/\d{1,4}|\d+(?:[.,]\d+)*-\d+(?:[.,]\d+)*(?:-\d+)?")
"""`1/2/2024`, `2005-5-1`, `2010-12`: text, no arithmetic."""

APPROXIMATELY = re.compile(r"\b(?:approx|about|around|roughly|nearly|almost|rounded)|\\approx|\u2248", re.IGNORECASE)

WORKED = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])|####|\banswer\b", re.IGNORECASE)
EXPECTED = "expected a number, a formula in LaTeX, a choice or words"


def judge(text: str, reference: Mapping[str, Any], options: Mapping[str, Any] = DEFAULTS) -> Judgement:
    """`reference` holds `answer`; `options` may hold `last_number`. Correct iff the response's one answer equals it.

    The judged answer of every correct response is the reference's, of a wrong response its own. Raises ValueError for
    a reference that cannot be read or an unknown option, UndecidedError if a library runs out of memory or stack, or
    an answer is too large to compute.
    """
    _check_options(options)
    expected = _expected(_answer_of(reference))
    try:
        return _judged(text, expected, options)
    except (MemoryError, RecursionError) as error:
        raise UndecidedError(f"{type(error).__name__} while the answer was read") from None


def _judged(text: str, expected: Expected, options: Mapping[str, Any]) -> Judgement:
    found = extract(text, bool(options.get("last_number", False)))
    if found is None:
        return _wrong("", "no answer found: no box and no answer line")
    if found.fault:
        return _wrong(_own_answer(found), f"{found.fault}; extracted {_shown(found.text)} from the {found.source}")
    correct, rule = _compared(expected, found.text, found.source == "answer line")
    if found.others and not correct:
        correct = _one_per_box(expected, (*found.others, found.text))
        rule = "equal values, one per box" if correct else rule
    elif different := [other for other in found.others if not _compared(expected, other, sentence=False)[0]]:
        correct, rule = False, f"several different boxes: also {_shown(different[0])}"
    if correct and found.later and _contradicts(expected, found.later):
        correct, rule = False, f"several different answers: behind the box {_shown(found.later)}"
    wanted = canonical(expected.values[0])
    why = f"extracted {_shown(found.text)} from the {found.source}, compared with {_shown(wanted)}: {rule}"
    answer = wanted if correct else _own_answer(found)
    return Judgement(correct, float(correct), bounded(answer), _line(why))


def check_reference(reference: Mapping[str, Any], options: Mapping[str, Any] = DEFAULTS) -> None:
    """Raises ValueError if `judge` could not use this reference or these options."""
    _check_options(options)
    _expected(_answer_of(reference))


def _check_options(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name not in OPTIONS:
            raise ValueError(f"math.{name}: {value!r} is not valid: expected no option but {', '.join(OPTIONS)}")
        kind, accepted = OPTIONS[name]
        if not isinstance(value, kind):
            raise ValueError(f"math.{name}: {value!r} is not valid: expected {accepted}")


def _answer_of(reference: Mapping[str, Any]) -> str:
    answer = reference["answer"]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"reference answer: {answer!r} is not valid: {EXPECTED}")
    return str(answer)


def _stated(answer: str) -> str:
    """What the boxes or the answer line of a worked solution hold, if the reference is one; else all of it."""
    if not WORKED.search(answer):
        return answer
    found = list(dict.fromkeys(boxes(answer)))
    if len(found) > 1:
        return ", ".join(found)
    extraction = extract(answer, last_number=False)
    return answer if extraction is None or not extraction.text.strip() else extraction.text


@dataclass(frozen=True)
class Expected:
    """A reference's clean text and its readings, likeliest first."""

    text: str
    values: tuple[Value, ...]


@lru_cache(maxsize=REFERENCES)
def _expected(answer: str) -> Expected:
    """The reference's readings, likeliest first. Raises ValueError."""
    answer = _stated(answer)
    cleaned = clean(SURROGATE.sub("\ufffd", answer))
    if len(answer) > LONGEST or not readable(cleaned) or not balanced(cleaned) or not balanced(answer):
        raise ValueError(f"reference answer: {answer[:SHOWN]!r} is not valid: {EXPECTED}, at most {LONGEST} characters")
    if DATE_OR_RANGE.fullmatch(cleaned):
        return Expected(cleaned, (Words(cleaned),))
    found = readings(cleaned, glued_units=False)
    if not found:
        return Expected(cleaned, (Formula(cleaned) if "\\" in cleaned else Words(words(cleaned)),))
    second = [
        value
        for value in found[1:]
        if isinstance(value, Quantity) or (isinstance(value, Numeral) and re.search(r",\d{2}$", cleaned))
    ]
    return Expected(cleaned, (found[0], *second))


def _compared(expected: Expected, text: str, sentence: bool) -> tuple[bool, str]:
    """The verdict on an answer's text: correct if one of its readings equals one of the reference's."""
    if "~" not in text and condensed(clean(text)) == condensed(expected.text):
        return True, SAME_TEXT.get(type(expected.values[0]), "same text")
    if isinstance(expected.values[0], Words) and expected.values[0].text in (polar(clean(text)), words(clean(text))):
        return True, "same words"
    understood = understand(text, sentence)
    verdict = (False, "no value")
    for value in understood.values:
        for reference in expected.values:
            worded = isinstance(value, Words) and isinstance(reference, Words)
            if understood.hedge and not (worded and understood.hedge.casefold() in expected.text.casefold()):
                return False, f"hedged: {understood.hedge!r}"
            verdict = compare(reference, value)
            if verdict[0]:
                return verdict
    if understood.hedge:
        return False, f"hedged: {understood.hedge!r}"
    return verdict


def _contradicts(expected: Expected, later: str) -> bool:
    """Whether an answer line behind the box gives another value; a remark or an approximation gives none."""
    if APPROXIMATELY.search(later) or _compared(expected, later, sentence=True)[0]:
        return False
    given, wanted = understand(later, sentence=True).values[:1], expected.values[0]
    if isinstance(wanted, Words):
        return bool(polar(clean(later))) and bool(polar(wanted.text))
    if isinstance(wanted, Choice):
        return any(isinstance(value, Choice) for value in given)
    return any(not isinstance(value, Words | Unclear | Choice) for value in given)


def _one_per_box(expected: Expected, boxed: tuple[str, ...]) -> bool:
    """Whether the reference has several values and each box holds one of them, without doubt."""
    wanted = expected.values[0]
    if not isinstance(wanted, Several) or len(wanted.items) < 2:
        return False
    understood = [understand(text, sentence=False) for text in boxed]
    if any(not one.values or one.hedge or isinstance(one.values[0], Several | Unclear) for one in understood):
        return False
    return compare(wanted, Several(tuple(one.values[0] for one in understood)))[0]


def _own_answer(found: Extraction) -> str:
    values = understand(found.text, sentence=False).values
    if values and not isinstance(values[0], Unclear):
        return bounded(canonical(values[0]))
    return bounded(re.sub(r"\s+", " ", clean(found.text)))


def _wrong(answer: str, why: str) -> Judgement:
    return Judgement(False, 0.0, answer, _line(why))


def _shown(text: str) -> str:
    text = re.sub(r"\s+", " ", text).strip()
    return repr(text if len(text) <= SHOWN else text[: SHOWN - 3] + "...")


def _line(why: str) -> str:
    """One line of printable text."""
    printable = "".join(character if character.isprintable() else "?" for character in why)
    return printable if len(printable) <= REASON else printable[: REASON - 3] + "..."
