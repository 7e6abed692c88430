"""Owns the form in which values leave a program's process: JSON that holds plain data and nothing else.

Must not evaluate, unpickle, or call a method of a value's own class: both ends may be hostile. JSON instead of Python
literals, because parsing deeply nested literals can crash the interpreter that parses them.
"""

from __future__ import annotations

import json
import numbers
from collections.abc import Callable, ItemsView, KeysView
from typing import Any

DEPTH = 60
LARGE_BITS = 10_000
"""Larger integers are written in hexadecimal: Python refuses to convert them from decimal digits."""


class NotPlainError(ValueError):
    """A value has no plain form, or a text is not the plain form of a value."""


class Foreign:
    """A value that has no plain form, such as an object of the program's own class: it equals nothing."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __repr__(self) -> str:
        return f"<{self._kind}>"


Handle = Callable[[object], int]
"""Keeps an object that has no plain form, and returns its number."""


def encode(value: object, handle: Handle | None = None, depth: int = DEPTH) -> Any:
    """What `json.dumps` can write. Without `handle`, other objects are encoded by the name of their type.

    Subclasses are written as their base: a `Counter` as a dict. Raises NotPlainError for values nested deeper than 60.
    """
    if depth == 0:
        raise NotPlainError(f"value: nested more than {DEPTH} deep is not valid: expected less")
    if value is None or isinstance(value, bool):
        return value
    if type(value).__name__ in RATIOS and hasattr(value, "as_integer_ratio"):
        return ["r", *map(_integer, value.as_integer_ratio())]
    for kind, write in WRITERS.items():
        if isinstance(value, kind):
            return write(value, lambda each: encode(each, handle, depth - 1))
    return ["o", type(value).__name__[:40]] if handle is None else ["h", handle(value)]


def decode(written: Any, proxy: Callable[[int], object] | None = None) -> object:
    """The value that `encode` wrote; `proxy` makes the stand-in for an object by its number. Raises NotPlainError."""
    try:
        return _decoded(written, proxy, DEPTH)
    except (TypeError, ValueError, IndexError, KeyError, OverflowError, ZeroDivisionError) as error:
        raise NotPlainError(f"not the plain form of a value: {type(error).__name__}") from None


def _decoded(written: Any, proxy: Callable[[int], object] | None, depth: int) -> object:
    if depth == 0:
        raise NotPlainError("nested too deep")
    if not isinstance(written, list):
        if isinstance(written, dict):
            raise NotPlainError("an object of JSON")
        return written
    kind, *content = written
    if kind == "h" and proxy is not None:
        return proxy(int(content[0]))
    return READERS[kind](content, lambda each: _decoded(each, proxy, depth - 1))


def _integer(value: int) -> Any:
    plain = int.__int__(value)
    return plain if plain.bit_length() < LARGE_BITS else ["i", hex(plain)]


Inner = Callable[[Any], Any]
WRITERS: dict[Any, Callable[[Any, Inner], Any]] = {
    int: lambda value, _: _integer(value),
    float: lambda value, _: float.__float__(value),
    str: lambda value, _: str.__str__(value),
    (bytes, bytearray): lambda value, _: ["b", bytes(value).hex()],
    complex: lambda value, _: ["c", value.real, value.imag],
    list: lambda value, inner: ["l", *map(inner, list.__iter__(value))],
    tuple: lambda value, inner: ["t", *map(inner, tuple.__iter__(value))],
    set: lambda value, inner: ["s", *map(inner, set.__iter__(value))],
    frozenset: lambda value, inner: ["f", *map(inner, frozenset.__iter__(value))],
    dict: lambda value, inner: ["d", *([inner(key), inner(each)] for key, each in dict.items(value))],
    range: lambda value, _: ["g", value.start, value.stop, value.step],
    (KeysView, ItemsView): lambda value, inner: ["s", *map(inner, value)],
    numbers.Integral: lambda value, _: _integer(int(value)),
    numbers.Real: lambda value, _: float(value),
}
"""By type, first match: how its values are written."""


RATIOS = frozenset(("Fraction", "Decimal"))
"""Exact numbers, known by name: importing their modules would delay the start of every jail."""


def _number(written: Any) -> int:
    return int(written[1], 16) if isinstance(written, list) else int(written)


def _ratio(numerator: int, denominator: int) -> object:
    from fractions import Fraction

    return Fraction(numerator, denominator)


READERS: dict[Any, Callable[[list[Any], Inner], Any]] = {
    "i": lambda content, _: int(content[0], 16),
    "b": lambda content, _: bytes.fromhex(content[0]),
    "c": lambda content, _: complex(content[0], content[1]),
    "l": lambda content, inner: [inner(each) for each in content],
    "t": lambda content, inner: tuple(inner(each) for each in content),
    "s": lambda content, inner: {inner(each) for each in content},
    "f": lambda content, inner: frozenset(inner(each) for each in content),
    "d": lambda content, inner: {inner(key): inner(each) for key, each in content},
    "r": lambda content, _: _ratio(_number(content[0]), _number(content[1])),
    "g": lambda content, _: range(*content),
    "o": lambda content, _: Foreign(str(content[0])[:40]),
}
"""By the first element of a list: how the rest of it is read."""


def dumps(value: object) -> bytes:
    """One line of JSON."""
    return json.dumps(value).encode() + b"\n"


def loads(line: str | bytes) -> Any:
    """What one line of JSON holds. Raises NotPlainError."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NotPlainError(f"not JSON: {type(error).__name__}") from None
