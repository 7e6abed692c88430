"""Owns the comparison of two values: equal or not, and by which rule.

Must not read a response. The reference's kind decides: a response's value of another kind is first unwrapped
(`x = 5` to 5, `(C) 5` to 5), never the other way round, except where the reference's own text allows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from verifier.verifiers.math import notations, symbolic
from verifier.verifiers.math.reading import units
from verifier.verifiers.math.reading.numerals import same
from verifier.verifiers.math.reading.whole import readings
from verifier.verifiers.math.values import (
    BasedNumeral,
    Choice,
    ClockTime,
    Formula,
    Numeral,
    Ordered,
    Ordinal,
    Pieces,
    Proportion,
    Quantity,
    Relation,
    Several,
    Unclear,
    Value,
    Words,
)

Verdict = tuple[bool, str]
"""Whether the values are equal, and the rule."""

PLACE = re.compile(r"(?:on|in|at) ")  # before a day or a place
PERCENT = (("percent", 1),)
CALL = re.compile(r"\\?[A-Za-z]+'*(?:\^\{?-1\}?)?\s*\([^()]*\)")
SUBSCRIPT = re.compile(r"_(?:\{[^{}]*\}|\w)")
COMPUTING = re.compile(r"[\d+*/^\-]|\\(?:sqrt|cdot|times)(?![A-Za-z])")
NUMBERS_ONLY = re.compile(r"[\d\s.,+\-*/^(){}!%$€£]|\\(?:frac|times|cdot|div|sqrt|pi)(?![A-Za-z])")


def compare(reference: Value, found: Value) -> Verdict:
    """Whether `found` equals `reference`. Raises UndecidedError."""
    if isinstance(found, Unclear):
        return False, found.why
    if type(found) is not type(reference):
        unwrapped = _unwrapped(reference, found)
        if unwrapped is not None:
            return unwrapped
    return COMPARED[type(reference)](reference, found)


def _unwrapped(reference: Value, found: Value) -> Verdict | None:
    """The verdict on what is inside a value of another kind; None if it has no inside."""
    if isinstance(found, Relation) and found.sign == "=" and is_result(found.left):
        if is_numeric(found.left) and not _holds(found.left, found.right):
            return False, "an equation that does not hold"
        return _any(reference, readings(found.right, glued_units=True))
    if isinstance(found, Choice) and found.content:
        return _any(reference, readings(found.content, glued_units=True))
    if isinstance(found, Several) and found.items and not isinstance(reference, Ordered | Pieces):
        if found.braced and len(found.items) > 1:
            return False, "several values for one"
        if len(set(found.items)) < len(found.items):  # "5,5" is no way to write 5
            return False, "a value repeated"
        verdicts = [compare(reference, item) for item in found.items]
        return verdicts[0] if all(correct for correct, _ in verdicts) else (False, "several different values for one")
    if isinstance(reference, Several) and len(reference.items) == 1:
        return compare(reference.items[0], found)
    return None


def _any(reference: Value, found: tuple[Value, ...]) -> Verdict:
    verdict = (False, "different kinds of answer")
    for value in found:
        verdict = compare(reference, value)
        if verdict[0]:
            break
    return verdict


def is_name(left: str) -> bool:
    """Whether a left side only names what is on the right: `x`, `f(2)`, `a_1`, `total cost`."""
    return bool(CALL.fullmatch(left)) or not COMPUTING.search(SUBSCRIPT.sub("", left))


def is_numeric(left: str) -> bool:
    """Whether a left side has numbers and no name: `16 - 3`, `\\frac{10}{2}`, `9 * $2`."""
    return not is_name(left) and not NUMBERS_ONLY.sub("", left).strip()


def _holds(left: str, right: str) -> bool:
    """Whether a numeric left side equals the right side, or rounds to it."""
    plain = re.sub(r"(\d+(?:\.\d+)?)\s*\\?%", r"(\1/100)", left) if re.search(r"[*/+]|\\[a-z]", left) else left
    computed = readings(re.sub(r"[$€£]", "", plain).strip(), glued_units=True)
    given = readings(right, glued_units=True)
    if not computed or not given:
        return False
    one, other = (value.magnitude if isinstance(value, Quantity) else value for value in (computed[0], given[0]))
    if isinstance(one, Numeral) and isinstance(other, Numeral) and other.places:
        return abs(one.value - other.value) <= Fraction(1, 2 * 10**other.places)
    return compare(other, one)[0]


def is_result(left: str) -> bool:
    """Whether a left side only names or computes what is on the right: `x`, `f(2)`, `16 - 3`, `m + n`, not `2x + 3`."""
    if is_name(left):
        return True
    if is_numeric(left):
        return True
    letters = set(re.findall(r"(?<![A-Za-z\\])[A-Za-z]+", left))
    return len(letters) > 1 or bool(re.search(r"[A-Za-z]\s*\(", left))


def _text(value: Numeral | Formula) -> str:
    if isinstance(value, Formula):
        return value.text
    number = value.value
    return str(number) if number.denominator == 1 else f"\\frac{{{number.numerator}}}{{{number.denominator}}}"


def _magnitudes(reference: Numeral | Formula, found: Numeral | Formula) -> Verdict:
    if isinstance(reference, Numeral) and isinstance(found, Numeral):
        equal = same(reference, found)
        return equal, "equal numbers" if equal else "different numbers"
    decimals = [value for value in (reference, found) if isinstance(value, Numeral) and value.digits >= 6]
    tolerance = Fraction(1, 10 ** decimals[0].places) if decimals else Fraction(0)
    return symbolic.equal(_text(reference), _text(found), tolerance)


def _number(reference: Numeral | Formula, found: Value) -> Verdict:
    """The reference has no unit: the question fixed it, so any unit of the response is accepted."""
    if isinstance(found, Numeral | Formula):
        return _magnitudes(reference, found)
    if isinstance(found, Quantity):
        verdict = _magnitudes(reference, found.magnitude)
        if found.unit.dimensions != PERCENT:
            return verdict[0], f"{verdict[1]}; the response's unit is not in the reference"
        if found.unit.factor != 1:  # per mille
            return _magnitudes(reference, _scaled(found.magnitude, found.unit.factor / 100))
        return verdict if verdict[0] else _part(reference, found.magnitude, verdict)
    if isinstance(found, BasedNumeral) and isinstance(reference, Numeral):
        equal = found.base == 10 and str(reference.value) == found.digits
        return equal, "same digits" if equal else "a numeral in another base"
    if isinstance(found, Proportion) and len(found.parts) == 2 and found.parts[1]:
        return _magnitudes(reference, Numeral(found.parts[0] / found.parts[1]))
    if isinstance(reference, Formula) and isinstance(found, Choice) and not found.content:
        equal = reference.text.casefold() == found.letter.casefold()
        return equal, "same letter" if equal else "different letters"
    return False, "different kinds of answer"


def _part(reference: Numeral | Formula, percents: Numeral | Formula, otherwise: Verdict) -> Verdict:
    """Percents for a part of one: 50 % for 0.5, but not 5000 % for 50."""
    if isinstance(reference, Numeral) and reference.value.denominator == 1 and abs(reference.value) > 1:
        return otherwise
    return _magnitudes(reference, _scaled(percents, Fraction(1, 100)))


def _scaled(value: Numeral | Formula, factor: Fraction) -> Numeral | Formula:
    if isinstance(value, Numeral):
        return Numeral(value.value * factor)
    if factor == 1:
        return value
    return Formula(f"\\frac{{{factor.numerator}}}{{{factor.denominator}}} \\cdot ({value.text})")


def _quantity(reference: Quantity, found: Value) -> Verdict:
    if isinstance(found, Quantity):
        if not units.compatible(reference.unit, found.unit):
            return False, "different unit"
        equal, rule = _magnitudes(reference.magnitude, found.magnitude)
        if units.is_one_scale(reference.unit, found.unit):
            return equal, f"{rule}, same unit"
        one, other = _scaled(reference.magnitude, reference.unit.factor), _scaled(found.magnitude, found.unit.factor)
        equal, rule = _magnitudes(one, other)
        return equal, f"{rule} after conversion of the unit"
    if isinstance(found, Numeral | Formula):
        equal, rule = _magnitudes(reference.magnitude, found)
        if not equal and reference.unit.dimensions == PERCENT:
            equal, rule = _magnitudes(_scaled(reference.magnitude, reference.unit.factor / 100), found)
        return equal, f"{rule}; the question names the unit"
    return False, "different kinds of answer"


def _words(reference: Words, found: Value) -> Verdict:
    if isinstance(found, Words):
        wanted = _singular(reference.text)
        equal = found.text == reference.text or wanted in (_singular(found.text), _singular(PLACE.sub("", found.text)))
        return equal, "same words" if equal else "different words"
    return False, "the reference is in words"


def _singular(text: str) -> list[str]:
    return [units.singular(word) for word in text.split()]


def _choice(reference: Choice, found: Value) -> Verdict:
    if isinstance(found, Choice):
        if found.letter != reference.letter:
            return False, "different choice"
        if found.content and reference.content:
            expected = readings(reference.content, glued_units=False)
            equal = not expected or _any(expected[0], readings(found.content, glued_units=True))[0]
            return equal, "same choice" if equal else "same letter with another content"
        return True, "same choice"
    if isinstance(found, Formula) and found.text.upper() == reference.letter:
        return True, "same choice"
    if reference.content:
        expected = readings(reference.content, glued_units=False)
        return compare(expected[0], found) if expected else (False, "different kinds of answer")
    return False, "the reference is a choice"


def _ordered(reference: Ordered, found: Value) -> Verdict:
    if isinstance(found, Several) and reference.opening == "(" and not found.braced:
        found = _assigned(found)
    if isinstance(found, Formula) and reference.opening == "matrix" and (matrix := _latex(reference)):
        return symbolic.equal(matrix, found.text)
    if isinstance(found, Choice) and found.letter == "R" and reference == _reals():
        return True, "the real numbers"
    if not isinstance(found, Ordered):
        return False, "different kinds of answer"
    if reference.variable and found.variable and reference.variable != found.variable:
        return False, "different variables"
    if {reference.opening, found.opening} == {"(", "matrix"}:
        reference, found = _vector(reference), _vector(found)
    if (found.opening, found.closing) != (reference.opening, reference.closing):
        return False, "different brackets"
    if len(found.items) != len(reference.items):
        return False, "different number of values"
    equal = all(compare(one, other)[0] for one, other in zip(reference.items, found.items, strict=True))
    return equal, "equal values in order" if equal else "different values in order"


def _reals() -> Value:
    return readings("(-\\infty, \\infty)", glued_units=False)[0]


def _vector(value: Ordered) -> Ordered:
    """A matrix of one row or one column as a tuple; any other value as it is."""
    rows = [row.items for row in value.items if isinstance(row, Ordered)] if value.opening == "matrix" else []
    if len(rows) == 1:
        return Ordered("(", rows[0], ")")
    return Ordered("(", tuple(row[0] for row in rows), ")") if rows and {len(row) for row in rows} == {1} else value


def _latex(matrix: Ordered) -> str:
    """A matrix of numbers and formulas as LaTeX, '' if it has other entries."""
    rows = [row.items for row in matrix.items if isinstance(row, Ordered)]
    texts = [[_text(entry) for entry in row if isinstance(entry, Numeral | Formula)] for row in rows]
    if [len(row) for row in rows] != [len(row) for row in texts]:
        return ""
    inside = " \\\\ ".join(" & ".join(row) for row in texts)
    return f"\\begin{{pmatrix}} {inside} \\end{{pmatrix}}"


def _assigned(found: Several) -> Value:
    """`x = 1, y = 2` as (1, 2)."""
    relations = [item for item in found.items if isinstance(item, Relation) and item.sign == "="]
    names = [item.left for item in relations]
    if len(relations) != len(found.items) or names != sorted(set(names)):
        return found
    values = [readings(item.right, glued_units=True) for item in relations]
    return Ordered("(", tuple(value[0] for value in values), ")") if all(values) else found


def _several(reference: Several, found: Value) -> Verdict:
    if isinstance(found, Choice) and len(reference.items) > 1:
        return False, "one choice of several"
    given = found.items if isinstance(found, Several) else (found,)
    expected = _unnamed(reference.items)
    given = _unnamed(given)
    if reference.braced or (isinstance(found, Several) and found.braced):
        expected, given = _distinct(expected), _distinct(given)
    return _matched(expected, given if len(given) == len(expected) else _distinct(given))


def _matched(expected: tuple[Value, ...], given: tuple[Value, ...]) -> Verdict:
    if len(expected) != len(given):
        return False, "different number of values"
    left = list(given)
    for value in expected:
        place = next((at for at, other in enumerate(left) if compare(value, other)[0]), None)
        if place is None:
            return False, "different values"
        del left[place]
    return True, "equal values in any order"


def _unnamed(items: tuple[Value, ...]) -> tuple[Value, ...]:
    """`x = 5, x = -5` as 5, -5, if all have the same name, or the first alone has one."""
    names = [item.left if isinstance(item, Relation) and item.sign == "=" else None for item in items]
    if not names or names[0] is None or set(names[1:]) - {None, names[0]}:
        return items
    if is_numeric(names[0]) or not is_result(names[0]):
        return items
    if None in names[1:] and names[0] in names[1:]:
        return items
    values = [readings(item.right, glued_units=True)[:1] if isinstance(item, Relation) else (item,) for item in items]
    found: list[Value] = []
    for value in values:
        found += value[0].items if value and isinstance(value[0], Several) else value
    return tuple(found) if all(values) else items


def _distinct(items: tuple[Value, ...]) -> tuple[Value, ...]:
    kept: list[Value] = []
    for item in items:
        if not any(compare(other, item)[0] for other in kept):
            kept.append(item)
    return tuple(kept)


def _pieces(reference: Pieces, found: Value) -> Verdict:
    if not isinstance(found, Pieces | Several):
        return False, "different kinds of answer"
    return _matched(reference.parts, found.parts if isinstance(found, Pieces) else found.items)


def _relation(reference: Relation, found: Value) -> Verdict:
    if isinstance(found, Relation):
        if found.sign != reference.sign:
            return False, "different relations"
        if symbolic.condensed(found.left) == symbolic.condensed(reference.left) or not (
            is_variable(found.left) and is_variable(reference.left)
        ):
            sides = [readings(text, glued_units=False) for text in (reference.right, found.right)]
            if symbolic.condensed(found.left) == symbolic.condensed(reference.left) and all(sides):
                return compare(sides[0][0], sides[1][0])
            if reference.sign == "=":
                return symbolic.equal_relations((reference.left, reference.right), (found.left, found.right))
        return False, "different variables"
    if reference.sign == "=" and is_name(reference.left):
        right = readings(reference.right, glued_units=False)
        if right:
            return compare(right[0], found)
    return False, "different kinds of answer"


def is_variable(text: str) -> bool:
    """Whether the text is one letter, with or without a subscript."""
    return bool(re.fullmatch(r"\s*\\?[A-Za-z]+(?:_\{?\w+\}?)?\s*", text))


def _unclear(reference: Unclear, found: Value) -> Verdict:
    return False, reference.why


COMPARED: dict[type, Callable[[Any, Value], Verdict]] = {
    Numeral: _number,
    Ordinal: notations.ordinal,
    Formula: _number,
    Quantity: _quantity,
    Words: _words,
    Choice: _choice,
    Several: _several,
    Ordered: _ordered,
    Pieces: _pieces,
    Proportion: notations.proportion,
    ClockTime: notations.clock,
    BasedNumeral: notations.based,
    Relation: _relation,
    Unclear: _unclear,
}
"""By the reference's kind."""
