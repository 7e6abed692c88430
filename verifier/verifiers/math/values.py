"""Owns the kinds of values that an answer can have.

Must not read text or compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Numeral:
    """An exact rational. Of a decimal, `places` are the digits after the point, `digits` the significant digits."""

    value: Fraction
    places: int = 0
    digits: int = 0


@dataclass(frozen=True)
class Ordinal:
    """A place in an order: `18th`. It is no amount."""

    place: int


@dataclass(frozen=True)
class Formula:
    """A mathematical expression that is no rational number, as cleaned LaTeX."""

    text: str


@dataclass(frozen=True)
class Unit:
    """What a number counts. `dimensions`: base units and their powers, empty for things; `factor`: in base units.

    `nouns`: for things, their words in the singular.
    """

    dimensions: tuple[tuple[str, int], ...]
    factor: Fraction = Fraction(1)
    nouns: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Quantity:
    """A number or expression with its unit."""

    magnitude: Numeral | Formula
    unit: Unit


@dataclass(frozen=True)
class Words:
    """Text that is no mathematics, in lower case, without articles and punctuation."""

    text: str


@dataclass(frozen=True)
class Choice:
    """A letter of multiple choice, in upper case, and the option's text ('' if only the letter is given)."""

    letter: str
    content: str = ""


@dataclass(frozen=True)
class Several:
    """Values in any order: the elements of a set in braces (`braced`), or a list of solutions."""

    items: tuple[Value, ...]
    braced: bool = False


@dataclass(frozen=True)
class Ordered:
    """Values in order, with their brackets: a tuple, a point, an interval, a matrix of rows.

    `variable`: of an inequality that was read as an interval, '' otherwise.
    """

    opening: str
    items: tuple[Value, ...]
    closing: str
    variable: str = ""


@dataclass(frozen=True)
class Pieces:
    """A union of intervals or sets, in any order."""

    parts: tuple[Value, ...]


@dataclass(frozen=True)
class Proportion:
    """A ratio of two or more numbers."""

    parts: tuple[Fraction, ...]


@dataclass(frozen=True)
class ClockTime:
    """A time of day, or a ratio that is written like one. `half`: 'am', 'pm' or ''."""

    hour: int
    minute: int
    half: str = ""


@dataclass(frozen=True)
class BasedNumeral:
    """Digits, in upper case without leading zeros, in a base other than the usual notation's."""

    digits: str
    base: int


@dataclass(frozen=True)
class Relation:
    """`left` `sign` `right`, the sides as cleaned LaTeX; `sign` is one of = < > \\le \\ge \\ne."""

    left: str
    sign: str
    right: str


@dataclass(frozen=True)
class Unclear:
    """No single answer: the text hedges, or gives several numbers without saying which one counts."""

    why: str


Value = (
    Numeral
    | Ordinal
    | Formula
    | Quantity
    | Words
    | Choice
    | Several
    | Ordered
    | Pieces
    | Proportion
    | ClockTime
    | BasedNumeral
    | Relation
    | Unclear
)
