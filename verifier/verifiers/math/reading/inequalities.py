"""Owns inequalities in one variable as intervals: `1 < x \\le 2` is (1, 2].

Must not compare.
"""

from __future__ import annotations

import re
from typing import NamedTuple

VARIABLE = re.compile(r"\\?[A-Za-z]+(?:_\{?\w\}?)?(?:\([A-Za-z]\))?")
NEGATED = re.compile(r"-\s*([A-Za-z])")
FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}


class BoundedVariable(NamedTuple):
    """An interval of a variable: its brackets, and its bounds as text."""

    opening: str
    low: str
    high: str
    closing: str
    variable: str


def bounds(sides: list[str], signs: list[str]) -> BoundedVariable | None:
    """What a chain of inequalities bounds; None if it bounds no single variable."""
    if len(sides) == 3 and VARIABLE.fullmatch(sides[1]):
        if set(signs) <= {"<", "\\le"}:
            return BoundedVariable(_bracket(signs[0], "["), sides[0], sides[2], _bracket(signs[1], "]"), sides[1])
        if set(signs) <= {">", "\\ge"}:
            return BoundedVariable(_bracket(signs[1], "["), sides[2], sides[0], _bracket(signs[0], "]"), sides[1])
        return None
    if len(sides) != 2 or signs[0] not in FLIPPED:
        return None
    left, right, sign = sides[0], sides[1], signs[0]
    if _is_variable(right) and not _is_variable(left):
        left, right, sign = right, left, FLIPPED[sign]
    if not _is_variable(left) or _is_variable(right):
        return None
    if NEGATED.fullmatch(left):
        left = left.lstrip("- ")
        right, sign = (right[1:] if right.startswith("-") else f"-{right}"), FLIPPED[sign]
    if sign in (">", "\\ge"):
        return BoundedVariable(_bracket(sign, "["), right, "\\infty", ")", left)
    return BoundedVariable("(", "-\\infty", right, _bracket(sign, "]"), left)


def _is_variable(side: str) -> bool:
    return bool(VARIABLE.fullmatch(side) or NEGATED.fullmatch(side)) and side not in ("\\infty", "\\pi")


def _bracket(sign: str, closed: str) -> str:
    return closed if sign in ("\\le", "\\ge") else {"[": "(", "]": ")"}[closed]
