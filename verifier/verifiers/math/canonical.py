"""Owns the canonical string of a value: equal for equal values of the same notation.

Must not compare values or read text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verifier.verifiers.math.symbolic import condensed
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
    Unit,
    Value,
    Words,
)


def canonical(value: Value) -> str:
    """A value as a string that is equal for equal values of the same notation; decimals as fractions."""
    return CANONICAL[type(value)](value)


def _joined(items: tuple[Value, ...], ordered: bool) -> str:
    texts = [canonical(item) for item in items]
    return ", ".join(texts if ordered else sorted(texts))


def _unit_name(unit: Unit) -> str:
    named = " ".join(sorted(unit.nouns)) or "*".join(
        base if power == 1 else f"{base}^{power}" for base, power in unit.dimensions
    )
    return named if unit.factor == 1 else f"{unit.factor} {named}"


CANONICAL: dict[type, Callable[[Any], str]] = {
    Numeral: lambda value: str(value.value),
    Ordinal: lambda value: f"place {value.place}",
    Formula: lambda value: condensed(value.text),
    Quantity: lambda value: f"{canonical(value.magnitude)} [{_unit_name(value.unit)}]",
    Words: lambda value: value.text,
    Choice: lambda value: value.letter,
    Several: lambda value: f"{{{_joined(value.items, False)}}}" if value.braced else _joined(value.items, False),
    Ordered: lambda value: f"{value.opening}{_joined(value.items, True)}{value.closing}",
    Pieces: lambda value: " U ".join(sorted(canonical(part) for part in value.parts)),
    Proportion: lambda value: ":".join(str(part) for part in value.parts),
    ClockTime: lambda value: f"{value.hour}:{value.minute:02d}{value.half}",
    BasedNumeral: lambda value: f"{value.digits}_{value.base}",
    Relation: lambda value: condensed(f"{value.left}{value.sign}{value.right}"),
    Unclear: lambda value: "",
}
