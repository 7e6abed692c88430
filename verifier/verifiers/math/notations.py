"""Owns the comparison of ratios, times, places in an order and numerals in a base.

Must not compare values inside values.
"""

from __future__ import annotations

from fractions import Fraction

from verifier.verifiers.math.values import (
    BasedNumeral,
    ClockTime,
    Formula,
    Numeral,
    Ordinal,
    Proportion,
    Value,
    Words,
)

Verdict = tuple[bool, str]
"""Whether the values are equal, and the rule."""


def ordinal(reference: Ordinal, found: Value) -> Verdict:
    """The same place; a bare number is one too, as the question asks for a place."""
    place = found.place if isinstance(found, Ordinal) else found.value if isinstance(found, Numeral) else None
    return place == reference.place, "same place" if place == reference.place else "different places"


def proportion(reference: Proportion, found: Value) -> Verdict:
    """Equal ratios of as many parts."""
    parts: tuple[Fraction, ...] = ()
    if isinstance(found, Proportion):
        parts = found.parts
    elif isinstance(found, ClockTime) and not found.half:
        parts = (Fraction(found.hour), Fraction(found.minute))
    elif isinstance(found, Numeral) and len(reference.parts) == 2:
        parts = (found.value, Fraction(1))
    if len(parts) != len(reference.parts):
        return False, "no ratio of as many parts"
    cross = [one * parts[0] == other * reference.parts[0] for one, other in zip(reference.parts, parts, strict=True)]
    equal = all(cross) and any(parts)
    return equal, "equal ratios" if equal else "different ratios"


def clock(reference: ClockTime, found: Value) -> Verdict:
    """The same time of day; without `am` or `pm`, also the same digits."""
    if isinstance(found, ClockTime):
        halves = {reference.half, found.half}
        if "" in halves or len(halves) == 1:
            equal = (reference.hour, reference.minute) == (found.hour, found.minute)
        else:
            equal = False
        if not equal and len(halves) == 2 and "" in halves:
            equal = _minutes(reference) == _minutes(found)
        return equal, "same time" if equal else "different times"
    if isinstance(found, Proportion) and not reference.half:
        equal = list(found.parts) == [reference.hour, reference.minute]
        return equal, "same ratio" if equal else "different ratios"
    return False, "different kinds of answer"


def _minutes(time: ClockTime) -> int:
    hour = time.hour % 12 if time.half else time.hour
    return 60 * (hour + (12 if time.half == "pm" else 0)) + time.minute


def based(reference: BasedNumeral, found: Value) -> Verdict:
    """The same digits and base; the base may be left out, as the question names it."""
    if isinstance(found, BasedNumeral):
        equal = found == reference
        return equal, "same digits and base" if equal else "different digits or base"
    digits = (
        str(found.value) if isinstance(found, Numeral) else found.text if isinstance(found, Formula | Words) else ""
    )
    equal = digits.upper() == reference.digits
    return equal, "same digits; the question names the base" if equal else "different digits"
