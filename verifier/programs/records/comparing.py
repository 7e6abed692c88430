"""Owns the comparison of what a program computed with what a test expects, in the service's own process.

Must not call anything of the program: values are plain data, and expressions know only the operations listed here.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

TOLERANCE = 1e-6
SHOWN = 60
MOST_BITS = 1 << 16
MOST_LENGTH = 1 << 20
EXPRESSION_DEPTH = 100

Evaluate = Callable[[ast.expr], Any]


class NotEvaluatedError(ValueError):
    """An expression needs an operation that is not listed here, or would make a huge value."""


def shown(value: object) -> str:
    """A value in at most 60 ASCII characters."""
    try:
        text = ascii(value)
    except ValueError:  # an integer of more digits than Python converts
        text = "a huge number"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def same_output(expected: str, found: str) -> bool:
    """Whether two outputs have the same lines; white space at the ends of lines and empty lines at the end are ignored.

    Where the expected token has a decimal point, a number within 1e-6 of it (relative) is the same.
    """
    wanted, written = _lines(expected), _lines(found)
    return len(wanted) == len(written) and all(map(_same_line, wanted, written))


def first_difference(expected: str, found: str) -> tuple[str, str]:
    """The first pair of lines that differ."""
    wanted, written = _lines(expected), _lines(found)
    pairs = zip(wanted + [""] * len(written), written + [""] * len(wanted), strict=False)
    return next(((one, other) for one, other in pairs if not _same_line(one, other)), ("", ""))


def _lines(text: str) -> list[str]:
    return "\n".join(line.rstrip() for line in text.split("\n")).rstrip("\n").split("\n")


def _same_line(expected: str, found: str) -> bool:
    if expected == found:
        return True
    wanted, written = expected.split(), found.split()
    return len(wanted) == len(written) and all(map(_same_token, wanted, written))


def _same_token(expected: str, found: str) -> bool:
    if expected == found:
        return True
    if "." not in expected or "_" in found + expected:
        return False
    try:
        return math.isclose(float(expected), float(found), rel_tol=TOLERANCE, abs_tol=0.0)
    except ValueError:
        return False


def same_value(expected: Any, found: Any) -> bool:
    """Whether values are equal as JSON: a tuple is a list, and a float may differ by 1e-6 (relative)."""
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        return len(expected) == len(found) and all(map(same_value, expected, found))
    if isinstance(expected, dict) and isinstance(found, dict):
        return expected.keys() == found.keys() and all(same_value(expected[key], found[key]) for key in expected)
    if isinstance(expected, float) and isinstance(found, int | float) and not isinstance(found, bool):
        try:
            return math.isclose(expected, found, rel_tol=TOLERANCE, abs_tol=0.0)
        except OverflowError:
            return False
    return bool(expected == found)


def evaluate(expression: ast.expr, values: Mapping[str, object]) -> Any:
    """The value of an expression of a test's author; `values`: what the program computed, by name.

    Raises NotEvaluatedError, or what the operation raises for these values.
    """

    def inner(node: ast.expr, depth: int) -> Any:
        read = OPERATIONS.get(type(node))
        if isinstance(node, ast.Name) and node.id in values:
            return values[node.id]
        if read is None or depth == 0:
            raise NotEvaluatedError(f"{ast.unparse(node)[:SHOWN]!r} is not evaluated outside of a jail")
        return read(node, lambda each: inner(each, depth - 1))

    return inner(expression, EXPRESSION_DEPTH)


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > MOST_BITS:
        raise NotEvaluatedError("a power is too large")
    return base**exponent


def _product(one: Any, other: Any) -> Any:
    for text, count in ((one, other), (other, one)):
        if isinstance(text, str | bytes | list | tuple) and isinstance(count, int) and len(text) * count > MOST_LENGTH:
            raise NotEvaluatedError("a repetition is too long")
    return one * other


def _shift(value: Any, by: Any) -> Any:
    if by > MOST_BITS:
        raise NotEvaluatedError("a shift is too long")
    return value << by


BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: _product,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: _power,
    ast.LShift: _shift,
}
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
    ast.Not: operator.not_,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: lambda one, other: one is other or (type(one) is type(other) and one == other),
    ast.IsNot: lambda one, other: one is not other and not (type(one) is type(other) and one == other),
    ast.In: lambda one, other: one in other,
    ast.NotIn: lambda one, other: one not in other,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (set, frozenset, tuple, list, dict, float, int, str, complex, sorted, len, abs, round, sum, min, max)
} | {"isclose": math.isclose, "math.isclose": math.isclose}
CONSTANTS: dict[str, float] = {f"math.{name}": getattr(math, name) for name in ("pi", "e", "inf", "nan", "tau")}


def dotted(node: ast.expr) -> str:
    """`name` or `module.name`; '' for anything else."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _call(node: Any, inner: Evaluate) -> Any:
    function = FUNCTIONS.get(dotted(node.func))
    named = {each.arg: inner(each.value) for each in node.keywords if each.arg}
    if function is None or len(named) < len(node.keywords):
        raise NotEvaluatedError(f"{ast.unparse(node.func)[:SHOWN]!r} is not called outside of a jail")
    return function(*map(inner, node.args), **named)


def _compared(node: Any, inner: Evaluate) -> bool:
    operands = [inner(each) for each in (node.left, *node.comparators)]
    pairs = zip(node.ops, pairwise(operands), strict=True)
    return all(COMPARISONS[type(kind)](*pair) for kind, pair in pairs)


def _joined(node: Any, inner: Evaluate) -> bool:
    found = [bool(inner(each)) for each in node.values]
    return all(found) if isinstance(node.op, ast.And) else any(found)


def _constant(node: Any, _: Evaluate) -> Any:
    if dotted(node) not in CONSTANTS:
        raise NotEvaluatedError(f"{ast.unparse(node)[:SHOWN]!r} is not known outside of a jail")
    return CONSTANTS[dotted(node)]


def _binary(node: Any, inner: Evaluate) -> Any:
    if type(node.op) not in BINARY:
        raise NotEvaluatedError(f"{ast.unparse(node)[:SHOWN]!r} is not evaluated outside of a jail")
    return BINARY[type(node.op)](inner(node.left), inner(node.right))


def _dict(node: Any, inner: Evaluate) -> dict[Any, Any]:
    if None in node.keys:
        raise NotEvaluatedError("a dict that unpacks another is not evaluated outside of a jail")
    return {inner(key): inner(value) for key, value in zip(node.keys, node.values, strict=True)}


OPERATIONS: dict[type[ast.AST], Callable[[Any, Evaluate], Any]] = {
    ast.Constant: lambda node, _: node.value,
    ast.List: lambda node, inner: [inner(each) for each in node.elts],
    ast.Tuple: lambda node, inner: tuple(inner(each) for each in node.elts),
    ast.Set: lambda node, inner: {inner(each) for each in node.elts},
    ast.Dict: _dict,
    ast.UnaryOp: lambda node, inner: UNARY[type(node.op)](inner(node.operand)),
    ast.BinOp: _binary,
    ast.BoolOp: _joined,
    ast.Compare: _compared,
    ast.Call: _call,
    ast.Attribute: _constant,
}
"""By kind of node: how it is evaluated."""
