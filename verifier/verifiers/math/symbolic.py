"""Owns the equality of formulas, by math-verify and sympy; imports them only when a formula is judged.

Must not pass on a text that `formulas` refuses: too large a text, or one outside the alphabet of formulas.

math-verify swallows errors of the libraries below it, memory and recursion errors included, and then calls the answer
wrong. So the formulas are also evaluated at fixed points: a difference there proves that they differ, and equality at
all of them decides where math-verify finds none.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

from verifier.verifiers.base import UndecidedError
from verifier.verifiers.math.reading.formulas import is_formula, is_label, refusal

FORMULAS = 512  # parsed formulas that are kept: a prompt's reference is compared with each of its responses
PRECISION = 30  # digits of an evaluation
RELATIVE = Decimal("1e-18")  # difference that is none
POINTS = (
    (1.3719, 2.2361, 0.6131, 1.7713, 3.1173, 0.8387),
    (-0.7273, 1.1619, -2.3147, 0.4519, -1.6181, 2.7291),
    (2.9173, -0.3571, 1.4271, -1.1377, 0.7919, -2.0839),
    (0.2137, 0.5923, 3.3391, 2.6131, -0.4721, 1.2517),
)
"""Values of the variables, in alphabetical order, at which formulas are compared."""

VARIABLES = 6
FUNCTION_OF_ANGLE = re.compile(r"(?<![A-Za-z])(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
DEGREES = re.compile(r"(\d+(?:\.\d+)?|\\[a-z]+|(?<![A-Za-z])[a-z])\s*°")
INFINITE = re.compile(r"[+-]?\s*\\infty\s*")
HALF_SLASH = re.compile(r"\d\s*/\s*\d+[a-hj-z](?![A-Za-z])")
"""`1/2x`: half of x, or one over 2x."""

CAPITALS = re.compile(r"(?<!\\)(?<![a-z])[A-Z](?![a-z])")
FRACTION_BEFORE = re.compile(r"(?<![\w.)}\]^/])(\d+)\s*/\s*(\d+)(?=\s+[A-Za-z]|\s*\\(?:pi|sqrt)(?![A-Za-z])|\s*\()")
"""`4/3 \\pi r^3` and `1/2 (x + 1)`: a fraction of numbers, then other factors."""

OBJECTS = frozenset("ABCDEMPQSTUXYZ")
"""What sets and matrices are called; other capital letters are rather quantities, as in `I^2 R`."""

PRODUCT_OF_CAPITALS = re.compile(
    r"[A-Z](?:\^(?:\{[^{}]*\}|\w))?\s*(?P<sign>\\times(?![A-Za-z])|\\cdot(?![A-Za-z])|\*|)\s*[A-Z]"
)
TERMS = re.compile(r"(?<![\^{(*])[+-]")


@contextmanager
def _library(what: str) -> Iterator[None]:
    """Turns exhaustion inside a library into an undecided verdict."""
    from math_verify.errors import TimeoutException

    try:
        yield
    except (MemoryError, RecursionError, TimeoutError, TimeoutException) as error:
        raise UndecidedError(f"{type(error).__name__} while {what}") from None


def condensed(text: str) -> str:
    """The formula without spaces, as it is compared before any library sees it."""
    return re.sub(r"\s+(?!\d)|(?<!\d)\s+", "", text)


def equal(reference: str, found: str, tolerance: Fraction = Fraction(0)) -> tuple[bool, str]:
    """Whether two cleaned formulas are equal, and by which rule. `tolerance`: the absolute difference allowed.

    A response too large to compute is wrong. Raises UndecidedError if the reference is too large to compute, or a
    library runs out of memory, stack or time.
    """
    if condensed(reference) == condensed(found):
        return True, "same formula"
    if not is_formula(found) or not is_formula(reference):
        return False, "not the same text"
    if _primes(reference) != _primes(found):
        return False, "different primes"
    if is_label(reference) or is_label(found):
        return False, "not the same letters"
    if "\\infty" in reference + found and not (INFINITE.fullmatch(reference) and INFINITE.fullmatch(found)):
        return False, "no number"
    if HALF_SLASH.search(found):
        return False, "a fraction that can be read in two ways"
    if _in_another_order(reference, found):
        return False, "a product of sets or matrices in another order"
    if reason := _refused(reference, found):
        return False, reason
    expected, given = parsed(reference), parsed(found)
    if expected is None or given is None:
        return False, "not the same formula"
    return _compared(expected, given, Decimal(tolerance.numerator) / tolerance.denominator)


def _in_another_order(reference: str, found: str) -> bool:
    """Whether products of capital letters alone, as of sets and matrices, have another order of their letters."""
    product = PRODUCT_OF_CAPITALS.search(reference)
    if product is None or "\\frac" in reference or "/" in reference or set(CAPITALS.findall(reference)) - OBJECTS:
        return False
    if "times" not in product["sign"] and re.search(r"(?<![A-Za-z\\])[a-z]", reference):
        return False  # a formula of quantities
    if "(" in reference + found:
        orders = [CAPITALS.findall(text) for text in (reference, found)]
        return len(orders[0]) == len(orders[1]) and orders[0] != orders[1]
    orders = [sorted("".join(CAPITALS.findall(term)) for term in TERMS.split(text)) for text in (reference, found)]
    return orders[0] != orders[1]


def _primes(text: str) -> int:
    return len(re.findall(r"(?<!\d)'|'(?!\d{3})|\\prime", text))


def _refused(reference: str, found: str) -> str:
    """Why a response's formula is not computed, '' if it is. Raises UndecidedError if the reference is too large."""
    if reason := refusal(reference):
        raise UndecidedError(f"a formula is not computed: {reason}")
    reason = refusal(found)
    return f"too large to compute: {reason}" if reason else ""


def equal_relations(reference: tuple[str, str], found: tuple[str, str]) -> tuple[bool, str]:
    """Whether two equations, as (left, right), have the same solutions: one is a multiple of the other."""
    differences = [f"({left})-({right})" for left, right in (reference, found)]
    if not all(is_formula(text) for text in differences):
        return False, "not the same text"
    if reason := _refused(*differences):
        return False, reason
    expected, given = (parsed(text) for text in differences)
    if expected is None or given is None:
        return False, "not the same equation"
    ratios = [_ratio(one, other) for one, other in _pairs(expected, given)]
    known = [ratio for ratio in ratios if ratio is not None]
    constant = len(known) > 1 and all(ratio and abs(ratio - known[0]) <= 1e-12 * abs(ratio) for ratio in known)
    return constant, "the same equation, up to a factor" if constant else "a different equation"


@lru_cache(maxsize=FORMULAS)
def parsed(text: str) -> Any:
    """The sympy object of a formula that `formulas` accepts, None if math-verify cannot read it."""
    _quiet()
    latex = _for_library(text)
    return _shared_symbols(_read(latex))


def _shared_symbols(formula: Any) -> Any:
    """The formula with `i` as the imaginary unit and equal symbols for equal letters.

    math-verify gives a letter other assumptions where it expects complex numbers, and leaves `i` a letter.
    """
    from sympy import Basic, I, MatrixBase, Symbol

    if not isinstance(formula, Basic | MatrixBase):
        return formula
    letters = [symbol for symbol in formula.free_symbols if isinstance(symbol, Symbol)]
    shared = {letter: I if letter.name == "i" else Symbol(letter.name, real=True) for letter in letters}
    with _library("sympy named the symbols of a formula"):
        try:
            return formula.xreplace(shared)
        except (MemoryError, RecursionError, TimeoutError):
            raise
        except Exception:  # noqa: BLE001 - a relation or set of complex numbers that sympy does not build
            return formula


def _read(latex: str) -> Any:
    """What math-verify reads, None if it reads nothing."""
    from math_verify import LatexExtractionConfig, parse
    from math_verify.grader import should_treat_as_complex
    from math_verify.parser import NormalizationConfig, latex2sympy, normalize_latex

    config = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
    with _library("math-verify parsed a formula"):
        try:
            found = parse(
                f"${latex}$",
                [LatexExtractionConfig(normalization_config=config)],
                fallback_mode="no_fallback",
                parsing_timeout=None,
                raise_on_error=True,
            )
            if found:
                return found[0]
            # `parse` drops each error of the parser below it: ask that one whether the text or the memory is at fault.
            real = not should_treat_as_complex(latex)
            return latex2sympy(normalize_latex(latex, config), is_real=real, normalization_config=None)
        except (MemoryError, RecursionError, TimeoutError):
            raise
        except Exception:  # noqa: BLE001 - the parser raises bare Exception for a text that is no formula
            return None


def _quiet() -> None:
    """Keeps out one warning: that the caller has to limit the time, which the sandbox does."""
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _for_library(text: str) -> str:
    """The formula in the library's spelling."""
    text = re.sub(r"(?<=\d)[,'](?=\d{3}(?!\d))", "", text)
    text = DEGREES.sub(r"(\1 \\pi/180)", text) if FUNCTION_OF_ANGLE.search(text) else text
    text = text.replace("°", "")
    text = re.sub(r"(?<=\d)[eE]([-+]?\d+)", r" \\cdot 10^{\1}", text)
    text = FRACTION_BEFORE.sub(r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\lg(?![A-Za-z])", r"\\log", text)
    return re.sub(
        r"(?<![\\A-Za-z])(sqrt|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|ln|log|exp)(?![A-Za-z])", r"\\\1 ", text
    )


def _compared(expected: Any, given: Any, tolerance: Decimal) -> tuple[bool, str]:
    pairs = _pairs(expected, given)
    if any(not _close(one, other, tolerance) for one, other in pairs):
        return False, "the formulas differ in value"
    if pairs and tolerance:
        return True, "equal to the decimals given"
    if _verified(expected, given):
        return True, "symbolic equality by math-verify"
    if len(pairs) == len(POINTS):
        return True, f"equal in value at {len(POINTS)} points"
    _simplified(expected, given)
    return False, "no symbolic equality by math-verify"


def _verified(expected: Any, given: Any) -> bool:
    from math_verify import verify

    with _library("math-verify compared formulas"):
        try:
            return bool(verify([expected], [given], timeout_seconds=None, raise_on_error=True))
        except (MemoryError, RecursionError, TimeoutError):
            raise
        except Exception:  # noqa: BLE001 - it cannot compare these kinds, or one is not defined (1/0)
            return False


def _simplified(expected: Any, given: Any) -> None:
    """Repeats math-verify's last step without its net: running out of memory or stack there is no difference."""
    from sympy import simplify

    with _library("sympy compared formulas"):
        try:
            simplify(expected - given)
        except (MemoryError, RecursionError, TimeoutError):
            raise
        except Exception:  # noqa: BLE001 - any other error means that the kinds cannot be subtracted
            return


Point = tuple[Decimal, Decimal]
"""The real and the imaginary part of a value."""


def _close(one: Point, other: Point, tolerance: Decimal) -> bool:
    try:
        scale = max(Decimal(1), *(abs(part) for part in (*one, *other)))
        return all(abs(a - b) <= max(tolerance, RELATIVE * scale) for a, b in zip(one, other, strict=True))
    except ArithmeticError:  # a value beyond the largest Decimal; equal texts are found before
        return False


def _ratio(one: Point, other: Point) -> complex | None:
    try:
        below = complex(*map(float, other))
        return complex(*map(float, one)) / below if below else None
    except ArithmeticError:  # beyond the largest float
        return None


def _pairs(expected: Any, given: Any) -> list[tuple[Point, Point]]:
    """The values of both formulas at the points at which both have one."""
    symbols = sorted({symbol for one in (expected, given) for symbol in getattr(one, "free_symbols", ())}, key=str)
    if len(symbols) > VARIABLES:
        return []
    with _library("the formulas were evaluated"):
        found = [
            [_value(formula, dict(zip(symbols, point, strict=False))) for formula in (expected, given)]
            for point in POINTS
        ]
    return [(one, other) for one, other in found if one is not None and other is not None]


def _value(formula: Any, at: Mapping[Any, float]) -> Point | None:
    from sympy import Expr, Float, MatrixExpr

    if not isinstance(formula, Expr) or isinstance(formula, MatrixExpr):
        return None
    try:
        value = formula.evalf(PRECISION, subs={symbol: Float(number, PRECISION) for symbol, number in at.items()})
        if not value.is_number or not value.is_finite:
            return None
        real, imaginary = value.as_real_imag()
        return Decimal(str(real)), Decimal(str(imaginary))
    except (MemoryError, RecursionError, TimeoutError):
        raise
    except Exception:  # noqa: BLE001 - sympy raises many kinds where a formula has no value
        return None
