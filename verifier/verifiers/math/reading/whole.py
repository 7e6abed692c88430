"""Owns the reading of a whole answer text as a value: number, formula, quantity, words, list, interval and so on.

Must not search: a text that is no value as a whole is prose (`prose` searches it).
"""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

from verifier.verifiers.math.reading import structures
from verifier.verifiers.math.reading.calendar import clock, date
from verifier.verifiers.math.reading.formulas import is_formula
from verifier.verifiers.math.reading.hedges import hedge
from verifier.verifiers.math.reading.inequalities import bounds
from verifier.verifiers.math.reading.notation import words
from verifier.verifiers.math.reading.number_words import in_words, ordinal
from verifier.verifiers.math.reading.numerals import OversizeError, based, decimal_comma, rational, repeating
from verifier.verifiers.math.reading.units import as_money, leading_currency, parse_unit, rate, splits
from verifier.verifiers.math.values import (
    Choice,
    Formula,
    Numeral,
    Ordered,
    Pieces,
    Proportion,
    Quantity,
    Relation,
    Several,
    Unit,
    Value,
    Words,
)

DEPTH = 6  # of structures in structures
ITEMS = 60
WORDS = 12  # of an answer in words; a longer text is prose
UNION = re.compile(r"\\cup(?![A-Za-z])|\\[{}]|\\langle|\\rangle|[()\[\]{}]|(?<=[\])}])\s*(?:U|or|and)\s*(?=[\[({\\])")
CONJUNCTION = re.compile(r"\\[{}]|\\langle|\\rangle|[()\[\]{}]|\s*,?\s+(?:and|or)\s+(?!a half|one half)", re.IGNORECASE)
RATIO = re.compile(r"-?[\d.,]+(?:/\d+)?(?:\s*(?::|\bto\b)\s*-?[\d.,]+(?:/\d+)?)+", re.IGNORECASE)
MIXED = re.compile(r"(-?\d{1,9}) and (\d{1,9}/\d{1,9})")
AMOUNT = re.compile(r"(\d[\d,]*(?:\.\d+)?)\s*([A-Za-z]+)")
SUMMED = re.compile(rf"{AMOUNT.pattern}(?:(?:\s*,\s*|\s+)(?:and\s+)?{AMOUNT.pattern}){{1,3}}")
PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])|\+/-|\+-")
MINUS_PLUS = re.compile(r"\\mp(?![A-Za-z])")
ANGLE_OF_FUNCTION = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])[^=]*\Z")
BUILDER = re.compile(r"\\?[A-Za-z](?:\s*\\in\s*\(-\\infty, \\infty\))?\s*(?:\||:)\s*(.+)")
"""The condition of `\\{x : x > 2\\}`."""

GROUPED_AMOUNT = re.compile(r"([-+]?\d{1,3}(?:\.\d{3})+,\d+)\s*([^\s\d,][^\d,]{0,40})")
REALS = re.compile(r"(?:all|any|every|the)?(?: set of)?(?: all)? ?real(?:s| numbers?)(?: line)?", re.IGNORECASE)
MEMBER = re.compile(r"[A-Za-z]\s*\\in(?![A-Za-z])\s*")
INTRODUCTION = re.compile(r"^(?:[A-Za-z]{2,}\s+)+(?=\\?[A-Za-z](?![A-Za-z ]))")
"""The words in `we find that x`, before a variable."""

NAME = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?'?\s*(?:\([A-Za-z\d, -]*\))?|[|\\A-Za-z ]+")


def readings(text: str, glued_units: bool) -> tuple[Value, ...]:
    """How a whole cleaned text can be read, the likeliest first; empty for prose and for text that is nothing.

    `glued_units`: `2m` may be two metres (in a response); else it is twice the variable m.
    """
    return _readings(text, glued_units, 0)


@lru_cache(maxsize=4096)
def _readings(text: str, glued_units: bool, depth: int) -> tuple[Value, ...]:
    if not text or depth > DEPTH:
        return ()
    try:
        number = None if text[0] in "([{" and "," in text else rational(text)
    except OversizeError:
        return (Formula(text),)
    if number is not None:
        comma = decimal_comma(text)
        return (number,) if comma is None or comma == number else (number, comma)
    found: list[Value] = []
    for reader in READERS:
        value = reader(text, glued_units, depth)
        if value is not None:
            found.append(value)
            if isinstance(value, Quantity) and (money := as_money(text)) != text:
                found += _readings(money, glued_units, depth)
            break
    comma = decimal_comma(text)
    if comma is not None:
        found.insert(0 if text.lstrip("+-").startswith("0,") else len(found), comma)
    return tuple(found)


def _first(text: str, glued_units: bool, depth: int) -> Value | None:
    found = _readings(text.strip(), glued_units, depth + 1)
    return found[0] if found else None


def _items(parts: list[str], glued_units: bool, depth: int) -> tuple[Value, ...] | None:
    """The value of each part; None if one has none. A plus-minus sign makes two values of one part."""
    if len(parts) > ITEMS:
        return None
    found: list[Value] = []
    for part in parts:
        value = _first(part, glued_units, depth)
        if value is None:
            return None
        found += value.items if isinstance(value, Several) and not value.braced else (value,)
    return tuple(found)


def _matrix(text: str, glued_units: bool, depth: int) -> Value | None:
    rows = structures.rows_of_matrix(text) if text.startswith("\\begin") else None
    if not rows:
        return None
    lines = [_items(row, glued_units, depth) for row in rows]
    if any(line is None for line in lines):
        return None
    return Ordered("matrix", tuple(Ordered("row", line or (), "row") for line in lines), "matrix")


def _reals(text: str, glued_units: bool, depth: int) -> Value | None:
    return _first("(-\\infty, \\infty)", glued_units, depth) if REALS.fullmatch(text) else None


def _member(text: str, glued_units: bool, depth: int) -> Value | None:
    """`x \\in [0, 1]` as the interval."""
    found = MEMBER.match(text)
    value = _first(text[found.end() :], glued_units, depth) if found else None
    return replace(value, variable=text[0]) if isinstance(value, Ordered) and value.opening != "matrix" else value


def _union(text: str, glued_units: bool, depth: int) -> Value | None:
    if "\\cup" not in text and not re.search(r"[\])}]\s*(?:U|or|and)\s*[\[({\\]", text):
        return None
    places = structures.top_level(text, UNION)
    if not places:
        return None
    parts = _items(structures.divided(text, [(start, end) for start, end, _ in places]), glued_units, depth)
    if parts is None or not all(isinstance(part, Ordered | Several) for part in parts):
        return None
    return (
        Pieces(parts) if all("cup" in sign or sign.strip() in ("U", "or") for _, _, sign in places) else Several(parts)
    )


def _plus_minus(text: str, glued_units: bool, depth: int) -> Value | None:
    """`1 \\pm \\sqrt{2}` as two values, outside sets and tuples."""
    if not PLUS_MINUS.search(text) or structures.enclosed(text) or len(structures.elements(text)) > 1:
        return None
    above = MINUS_PLUS.sub("-", PLUS_MINUS.sub("+", text)).lstrip("+ ")
    below = MINUS_PLUS.sub("+", PLUS_MINUS.sub("-", text))
    parts = _items([re.sub(r"=\s*\+", "= ", above), below], glued_units, depth)
    return None if parts is None else Several(parts)


def _bracketed(text: str, glued_units: bool, depth: int) -> Value | None:
    """Sets, tuples, points and intervals."""
    if text in ("\\emptyset", "\\{ \\}", "\\{\\}"):
        return Several((), braced=True)
    found = structures.enclosed(text)
    if found is None:
        return None
    opening, inside, closing = found
    if opening == "\\{" and (condition := BUILDER.fullmatch(inside)):
        bounded = _first(condition[1], glued_units, depth)
        return bounded if isinstance(bounded, Ordered | Pieces) else None
    parts = structures.elements(inside, bracketed=True)
    if opening == "\\{" or (opening == "{" and len(parts) > 1):
        items = _items(parts, glued_units, depth)
        return None if items is None else Several(items, braced=True)
    if len(parts) < 2:
        return _first(inside, glued_units, depth) if opening in ("(", "[") and not structures.choice(text) else None
    items = _items(parts, glued_units, depth)
    if opening == "\\langle":
        opening, closing = "(", ")"
    return None if items is None else Ordered(opening, items, closing)


def _clock(text: str, glued_units: bool, depth: int) -> Value | None:
    return clock(text)


def _date(text: str, glued_units: bool, depth: int) -> Value | None:
    return date(text)


def _proportion(text: str, glued_units: bool, depth: int) -> Value | None:
    if not RATIO.fullmatch(text):
        return None
    try:
        parts = [rational(part.strip()) for part in re.split(r":|\bto\b", text, flags=re.IGNORECASE)]
    except OversizeError:
        return None
    values = tuple(part.value for part in parts if part is not None)
    return Proportion(values) if len(values) == len(parts) else None


def _based(text: str, glued_units: bool, depth: int) -> Value | None:
    return based(text)


def _relation(text: str, glued_units: bool, depth: int) -> Value | None:
    sides, signs = structures.relation(text)
    sides[0] = INTRODUCTION.sub("", sides[0])
    if not signs or len(structures.elements(text)) > 1 or structures.top_level(text, CONJUNCTION):
        return None
    if "\\approx" in signs:  # what an exact value is approximately is no part of the answer
        at = signs.index("\\approx")
        exact = sides[: at + 1] if at > 0 or not NAME.fullmatch(sides[0]) else [*sides[:1], *sides[-1:]]
        sides, signs = exact, signs[:at] or ["="]
        if len(sides) == 1:
            return _first(sides[0], glued_units, depth)
    if not sides[0] and len(sides) == 2 and signs == ["="]:  # "= 5"
        return _first(sides[1], glued_units, depth)
    if "" in sides or "\\in" in signs or "\\implies" in signs:
        return None
    if not _is_value(sides[-1], glued_units, depth) or len(sides[0].split()) > 6:
        return None
    if set(signs) == {"="}:
        return Relation(sides[0] if re.search("[A-Za-z]", sides[0]) else sides[-2], "=", sides[-1])
    return _interval(sides, signs, glued_units, depth) or (
        Relation(sides[0], signs[0], sides[1]) if len(signs) == 1 else Formula(re.sub(r"\s+", " ", text))
    )


def _is_value(text: str, glued_units: bool, depth: int) -> bool:
    """Whether the text is a value, or at most three words."""
    value = _first(text, glued_units, depth)
    return value is not None and not (isinstance(value, Words) and len(value.text.split()) > 3)


def _interval(sides: list[str], signs: list[str], glued_units: bool, depth: int) -> Value | None:
    found = bounds(sides, signs)
    if found is None:
        return None
    items = _items([found.low, found.high], glued_units, depth)
    if items is None or any(isinstance(item, Words) for item in items):
        return None
    return Ordered(found.opening, items, found.closing, found.variable)


def _listed(text: str, glued_units: bool, depth: int) -> Value | None:
    """Values between commas, `and` or `or`."""
    parts = _pieces(text)
    if len(parts) < 2:
        return None
    items = _items(parts, glued_units, depth)
    if items is None or len({isinstance(item, Words) for item in items}) > 1:
        return None
    if any(isinstance(item, Words) and len(item.text.split()) > 3 for item in items):
        return None
    return Several(items)


def _pieces(text: str) -> list[str]:
    parts: list[str] = []
    for part in structures.elements(text):
        stripped = re.sub(r"^(?:and|or|either|both)\s+", "", part, flags=re.IGNORECASE)
        places = structures.top_level(stripped, CONJUNCTION)
        parts += structures.divided(stripped, [(start, end) for start, end, _ in places])
    return parts


def _in_words(text: str, glued_units: bool, depth: int) -> Value | None:
    mixed = MIXED.fullmatch(text)
    return rational(f"{mixed[1]} {mixed[2]}") if mixed else ordinal(text) or in_words(text)


def _repeating(text: str, glued_units: bool, depth: int) -> Value | None:
    return repeating(text)


def _summed(text: str, glued_units: bool, depth: int) -> Value | None:
    """`1 hour 30 minutes`, `18 dollars and 50 cents`: amounts of one dimension, each unit smaller than the last."""
    text = re.sub(r"\$(\d[\d,]*)(?= .*cents?)", r"\1 dollars", text)
    if not SUMMED.fullmatch(text):
        return None
    found = [(rational(amount), parse_unit(name, things=False)) for amount, name in AMOUNT.findall(text)]
    parts = [(amount, unit) for amount, unit in found if amount is not None and unit is not None]
    units = [unit for _, unit in parts]
    if len(parts) < max(2, len(found)) or not units[0].dimensions or len({unit.dimensions for unit in units}) > 1:
        return None
    if any(smaller.factor >= larger.factor for larger, smaller in pairwise(units)):
        return None
    total = sum((amount.value * unit.factor for amount, unit in parts), Fraction(0))
    return Quantity(Numeral(total / units[0].factor), units[0])


def magnitude(text: str) -> Numeral | Formula | None:
    """A number or a formula, as the magnitude of a quantity."""
    try:
        number = rational(text) or decimal_comma(text) or in_words(text)
    except OversizeError:
        return Formula(text)
    return number or (Formula(text) if is_formula(text) else None)


def _priced(text: str, glued_units: bool, depth: int) -> Value | None:
    """`€1.234,50`, `1.234,50 kg`: one number whose comma makes no list."""
    if "," not in text:
        return None
    if (grouped := GROUPED_AMOUNT.fullmatch(text)) is not None:
        number, unit = rational(grouped[1]), parse_unit(grouped[2], things=True)
        return _counted(number, unit) if number is not None and unit is not None else None
    currency = leading_currency(text)
    if currency is None:
        return None
    try:
        number = rational(currency[0]) or decimal_comma(currency[0])
    except OversizeError:
        return None
    return Quantity(number, currency[1]) if number is not None else None


def _quantity(text: str, glued_units: bool, depth: int) -> Value | None:
    currency = leading_currency(text)
    if currency is not None:
        amount, unit = currency
        value = magnitude(amount)
        if value is not None:
            return Quantity(value, unit)
        for before, after in splits(amount):
            value = magnitude(before)
            priced = rate(unit, after) or (unit if parse_unit(after, things=True) is not None else None)
            if value is not None and priced is not None:
                return Quantity(value, priced)
        return None
    for before, after in splits(text):
        if not glued_units and len(after) == 1 and after.isalpha() and not text[len(before)].isspace():
            continue
        value = magnitude(before)
        if value is None or (after.startswith("°") and ANGLE_OF_FUNCTION.search(before)):
            continue
        unit_found = parse_unit(after, things=isinstance(value, Numeral))
        if isinstance(value, Numeral) and re.match(r"/\w{2}", after):  # "5/hour"
            unit_found = rate(Unit(()), after)
        if unit_found is not None and not hedge(after):
            return _counted(value, unit_found)
    return None


def _counted(value: Numeral | Formula, unit: Unit) -> Value:
    return Quantity(value, unit) if unit.dimensions or unit.nouns else value


def _choice(text: str, glued_units: bool, depth: int) -> Value | None:
    found = structures.choice(text, remark=glued_units)
    if found is None or (len(text) == 1 and text.islower()) or hedge(found[1]):
        return None
    inner = structures.choice(found[1])
    if found[1][:1] in tuple(",+*/=<>^|&"):
        return None
    if inner is not None and inner[1]:  # "A: B: C: ..." is no option with its content
        return None
    if re.search(r"(?:\b(?:or|and)\b|,|/)\s*\(?[A-Z]\)?(?![A-Za-z])|^\(?[A-Z]\)?(?:\s|$)|^(?:or|and)\b", found[1]):
        return None
    return Choice(*found)


def _formula(text: str, glued_units: bool, depth: int) -> Value | None:
    return Formula(text) if is_formula(text) else None


def _text(text: str, glued_units: bool, depth: int) -> Value | None:
    if re.search(r"\d|[\\=<>{}^$]", text) or len(text.split()) > WORDS:
        return None
    plain = words(text)
    return Words(plain) if re.search(r"[^\W\d_]", plain) else None


READERS = (
    _matrix,
    _reals,
    _priced,
    _member,
    _choice,
    _union,
    _bracketed,
    _clock,
    _date,
    _proportion,
    _based,
    _in_words,
    _repeating,
    _summed,
    _plus_minus,
    _listed,
    _relation,
    _quantity,
    _formula,
    _text,
)
"""Tried in this order; the first that reads the whole text decides."""
