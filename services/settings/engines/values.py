"""Owns how the values of an engine's argument are described, and the check of a value against that.

Must not know an argument or an engine.
"""

from __future__ import annotations

import re
from typing import Any, TypedDict

from services.settings.faults import shown

MOST = 2**63 - 1
"""The largest number that the engines and every reader of a recipe can hold."""


class Accepted(TypedDict, total=False):
    """The values of an argument; empty if they could not be told.

    `values` lists all. Otherwise `kinds` are types as recipes name them, where a `whole` number may be written as 5e8.
    A list has at least one item, and `items` describes each. A number is at least `least` and at most `most`, a text
    matches `pattern`.
    """

    values: list[Any]
    kinds: list[str]
    items: Accepted
    least: int
    most: int
    pattern: str


def fits(value: Any, accepted: Accepted) -> bool:
    """Whether an argument may have `value`. What fits is a JSON value, so that a stored recipe can be read again.

    Lists without `items`, mappings, and texts without `pattern` never fit.
    """
    if "values" in accepted:
        # By type too, because true equals 1.
        return any(type(value) is type(listed) and value == listed for listed in accepted["values"])
    kinds = {*accepted.get("kinds", ())}
    match value:
        case None:
            return "null" in kinds
        case bool():
            return "bool" in kinds
        case int():
            return bool(kinds & {"int", "whole", "float"}) and _within(value, accepted)
        case float():
            return ("float" in kinds or ("whole" in kinds and value.is_integer())) and _within(value, accepted)
        case str():
            pattern = accepted.get("pattern")
            return "str" in kinds and pattern is not None and re.fullmatch(pattern, value) is not None
        case list():
            items = accepted.get("items")
            return "list" in kinds and bool(value) and items is not None and all(fits(item, items) for item in value)
    return False


def _within(number: float, accepted: Accepted) -> bool:
    """Whether a number is finite and within its limits: nan compares as false, and an infinity exceeds MOST."""
    return accepted.get("least", -MOST) <= number <= accepted.get("most", MOST)


def described(accepted: Accepted) -> str:
    """The accepted values in words, to follow the word "expected"."""
    if "values" in accepted:
        return "one of " + ", ".join(shown(value) for value in accepted["values"])
    text = "a value of type " + " or ".join("whole number" if kind == "whole" else kind for kind in accepted["kinds"])
    if "items" in accepted:
        text += f" with at least one item, each {described(accepted['items'])}"
    if "pattern" in accepted:
        text += f" that matches {accepted['pattern']}"
    if "least" in accepted:
        text += f", at least {accepted['least']}"
    return text + (f", at most {accepted['most']}" if "most" in accepted else "")
