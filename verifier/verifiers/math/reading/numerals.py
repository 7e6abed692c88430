"""Owns numbers in digits: separators, fractions, mixed, scientific and repeating numbers, arithmetic, bases.

Must not compute with more than BITS bits, whatever the text.
"""

from __future__ import annotations

import re
from fractions import Fraction

from verifier.verifiers.math.values import BasedNumeral, Numeral

BITS = 4096
EXPONENT = 1000  # the largest power that is computed
FACTORIAL = 20
DEPTH = 30
LONGEST = 400  # characters of an arithmetic expression

GROUPED = (
    r"[1-9]\d{0,2}(?:,\d{3})+(?!\d)|[1-9]\d?(?:,\d{2})+,\d{3}(?!\d)"
    r"|\d{1,3}(?:'\d{3})+(?!\d)|\d{1,3}(?: \d{3})+(?!\d|\s*/)"
)
"""Thousands with commas (Indian groups too), apostrophes or spaces."""

PLAIN = re.compile(rf"(?:{GROUPED}|\d+)(?:\.(\d*))?|\.(\d+)")
POINT_GROUPED = re.compile(r"(\d{1,3}(?:\.\d{3})+),(\d+)|(\d{1,3}(?:\.\d{3}){2,})")
"""Points as thousands separators, certain: a decimal comma follows, or there are several points."""

COMMA_DECIMAL = re.compile(r"[-+]? ?(?:\d+|\d{1,3}(?: \d{3})+),\d+")
THOUSANDS = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+")
ARITHMETIC = re.compile(r"(?:[\d\s.,'+\-*/^(){}!eE\[\]]|\\(?:frac|times|cdot|div)(?![A-Za-z]))+")
SCIENTIFIC = re.compile(r"(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?\d+)")
TOKEN = re.compile(
    rf"\s*(?:(?P<scientific>{SCIENTIFIC.pattern})(?![A-Za-z\d])|(?P<number>{PLAIN.pattern})"
    r"|\\(?P<command>frac|times|cdot|div)(?![A-Za-z])|(?P<sign>\*\*|[-+*/^(){}!\[\]]))"
)


BASED = re.compile(
    r"(\()?([0-9A-Fa-f](?:[0-9A-Fa-f, ]*[0-9A-Fa-f])?)(?(1)\))\s*(?:_\s*\{?\s*(?:base )?(\w+)\s*\}?"
    r"|\(?\s*(?:in )?base[ -]?(\w+)\s*\)?|\(?in (binary|ternary|octal|decimal|hexadecimal)(?: notation| form)?\)?)"
)
NAMED = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
BASES = {name: base for base, name in enumerate(NAMED.split(), 2)} | {
    "binary": 2,
    "ternary": 3,
    "octal": 8,
    "decimal": 10,
    "hexadecimal": 16,
}
PREFIXED = re.compile(r"0([bBoOxX])([0-9A-Fa-f]+)")
PREFIXES = {"b": 2, "o": 8, "x": 16}
OVERLINED = re.compile(r"(-?)(\d*)\.(\d*)\\overline\s*\{?\s*(\d+)\s*\}?")
REPEATED = re.compile(r"(-?)(\d*)\.(\d{0,6}?)(\d{1,6}?)\4{2,}\.\.\.")
REPEATING_LONGEST = 60  # characters


class OversizeError(Exception):
    """A number is too large to compute."""


def _bounded(value: Fraction) -> Fraction:
    if value.numerator.bit_length() > BITS or value.denominator.bit_length() > BITS:
        raise OversizeError
    return value


def decimal(written: str) -> Numeral:
    """A number in plain notation, with or without separators of thousands. Raises OversizeError."""
    if len(written) > BITS // 4:
        raise OversizeError
    whole, _, fraction = re.sub(r"[, ']", "", written).partition(".")
    value = Fraction(int(whole + fraction or "0"), 10 ** len(fraction))
    return Numeral(value, len(fraction), len((whole + fraction).lstrip("0")) if fraction else 0)


class _Arithmetic:
    """A recursive descent over the tokens of an expression; None marks a text that is no arithmetic."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0
        self.single: Numeral | None = None
        """The numeral, if the expression is just one."""

    def whole(self) -> Fraction | None:
        """The value of all tokens, None if they are no arithmetic."""
        value = self._sum()
        return value if self._at == len(self._tokens) else None

    def _next(self) -> tuple[str, str]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("", "")

    def _taken(self, *wanted: str) -> str:
        kind, text = self._next()
        if kind in ("sign", "command") and text in wanted:
            self._at += 1
            return text
        return ""

    def _sum(self) -> Fraction | None:
        self._depth += 1
        if self._depth > DEPTH:
            raise OversizeError
        total = self._product()
        while total is not None and (sign := self._taken("+", "-")):
            term = self._product()
            total = None if term is None else _bounded(total + (term if sign == "+" else -term))
        self._depth -= 1
        return total

    def _product(self) -> Fraction | None:
        value = self._signed()
        while value is not None:
            sign = self._taken("*", "/", "times", "cdot", "div")
            if not sign:
                kind, text = self._next()
                if not (kind == "command" and text == "frac") and not (kind == "sign" and text in ("(", "[", "{")):
                    return value
            factor = self._signed() if sign else self._power()
            if factor is None or (sign in ("/", "div") and not factor):
                return None
            value = _bounded(value / factor if sign in ("/", "div") else value * factor)
        return value

    def _signed(self) -> Fraction | None:
        negative = False
        while sign := self._taken("+", "-"):
            negative ^= sign == "-"
        value = self._power()
        return -value if negative and value is not None else value

    def _power(self) -> Fraction | None:
        base = self._atom()
        if base is None or not self._taken("^", "**"):
            return base
        exponent = self._signed_exponent()
        if exponent is None or exponent.denominator != 1:
            return None
        power = exponent.numerator
        if abs(power) > EXPONENT or abs(power) * max(base.numerator.bit_length(), base.denominator.bit_length()) > BITS:
            raise OversizeError
        return None if power < 0 and not base else base**power

    def _signed_exponent(self) -> Fraction | None:
        self._depth += 1
        if self._depth > DEPTH:
            raise OversizeError
        sign = self._taken("-", "+")
        value = self._power()
        self._depth -= 1
        return -value if sign == "-" and value is not None else value

    def _atom(self) -> Fraction | None:
        kind, text = self._next()
        self._at += 1
        value: Fraction | None = None
        if kind == "number":
            self.single = decimal(text)
            value = self._mixed(self.single.value)
        elif kind == "scientific":
            value = _scientific(text)
        elif (kind, text) == ("command", "frac"):
            value = self._fraction()
        elif kind == "sign" and text in CLOSING:
            value = self._enclosed(CLOSING[text])
        if value is not None and self._taken("!"):
            if value.denominator != 1 or value < 0:
                return None
            if value > FACTORIAL:
                raise OversizeError
            product = 1
            for factor in range(2, int(value) + 1):
                product *= factor
            value = Fraction(product)
        return value

    def _enclosed(self, closing: str) -> Fraction | None:
        value = self._sum()
        return value if self._taken(closing) else None

    def _fraction(self) -> Fraction | None:
        upper = self._enclosed("}") if self._taken("{") else None
        lower = self._enclosed("}") if upper is not None and self._taken("{") else None
        return _bounded(upper / lower) if upper is not None and lower else None

    def _mixed(self, whole: Fraction) -> Fraction:
        """`2 1/2` and `2\\frac{1}{2}`: a whole number directly before a fraction of natural numbers is added to it."""
        ahead = self._tokens[self._at : self._at + 7]
        texts = [text for _, text in ahead]
        kinds = [kind for kind, _ in ahead]
        if whole.denominator != 1 or not ahead:
            return whole
        if kinds[:3] == ["number", "sign", "number"] and texts[1] == "/":
            above, below, length = texts[0], texts[2], 3
        elif texts[:2] == ["frac", "{"] and texts[3:5] == ["}", "{"] and texts[6:7] == ["}"]:
            above, below, length = texts[2], texts[5], 7
        else:
            return whole
        if not (above.isdigit() and below.isdigit() and int(below)):
            return whole
        self._at += length
        return whole + Fraction(int(above), int(below))


CLOSING = {"(": ")", "{": "}", "[": "]"}


def _scientific(text: str) -> Fraction:
    found = SCIENTIFIC.fullmatch(text)
    assert found is not None
    if len(found[2]) > 5 or abs(int(found[2])) > EXPONENT:
        raise OversizeError
    return _bounded(decimal(found[1]).value * Fraction(10) ** int(found[2]))


def _tokens(text: str) -> list[tuple[str, str]] | None:
    tokens: list[tuple[str, str]] = []
    at = 0
    while at < len(text):
        found = TOKEN.match(text, at)
        if found is None or found.end() == at:
            return None
        kind = next(name for name in ("scientific", "number", "command", "sign") if found[name] is not None)
        tokens.append((kind, found[kind]))
        at = found.end()
    return tokens


def rational(text: str) -> Numeral | None:
    """The value of a numeral or of arithmetic with numerals, None for any other text. Raises OversizeError."""
    if text.isascii() and text.isdigit() and len(text) <= LONGEST:
        return Numeral(Fraction(int(text)))
    if len(text) > LONGEST or not ARITHMETIC.fullmatch(text):
        return None
    pointed = POINT_GROUPED.fullmatch(text.lstrip("+- "))
    if pointed:
        sign = -1 if text.lstrip().startswith("-") else 1
        number = decimal((pointed[1] or pointed[3]).replace(".", "") + "." + (pointed[2] or ""))
        return Numeral(sign * number.value, number.places, number.digits)
    tokens = _tokens(text.strip())
    if not tokens:
        return None
    reading = _Arithmetic(tokens)
    value = reading.whole()
    if value is None:
        return None
    single = reading.single if len(tokens) <= 2 else None
    return Numeral(value, single.places, single.digits) if single else Numeral(value)


def decimal_comma(text: str) -> Numeral | None:
    """`3,14` as 3.14; None where the comma separates thousands, or for any other text."""
    if not COMMA_DECIMAL.fullmatch(text) or THOUSANDS.fullmatch(text.lstrip("+- ")):
        return None
    sign = -1 if text.startswith("-") else 1
    number = decimal(text.lstrip("+- ").replace(",", "."))
    return Numeral(sign * number.value, number.places, number.digits)


def is_rounding(short: Numeral, exact: Fraction) -> bool:
    """Whether a decimal of at least six significant digits is `exact`, rounded or cut to its places."""
    return short.digits >= 6 and short.places > 0 and abs(short.value - exact) < Fraction(1, 10**short.places)


def same(reference: Numeral, found: Numeral) -> bool:
    """Whether two numbers are equal, or one is a decimal of six or more significant digits and rounds the other."""
    if reference.value == found.value:
        return True
    return any(
        is_rounding(one, other.value) and (other.places > one.places or not _terminates(other.value))
        for one, other in ((found, reference), (reference, found))
    )


def _terminates(value: Fraction) -> bool:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def based(text: str) -> BasedNumeral | None:
    """`101_2`, `(101)_{two}`, `101 in base 2`, `0b101`; None for any other text."""
    prefixed = PREFIXED.fullmatch(text)
    if prefixed is not None:
        return based(f"{prefixed[2]}_{PREFIXES[prefixed[1].lower()]}")
    found = BASED.fullmatch(text)
    if found is None:
        return None
    named = (found[3] or found[4] or found[5]).lower()
    base = int(named) if named.isdigit() and len(named) < 3 else BASES.get(named)
    digits = re.sub(r"[, ]", "", found[2]).upper()
    if base is None or not 2 <= base <= 36 or not digits[0].isalnum():
        return None
    if any(int(digit, 36) >= base for digit in digits) or not any(digit.isdigit() for digit in digits):
        return None
    return BasedNumeral(digits.lstrip("0") or "0", base)


def repeating(text: str) -> Numeral | None:
    """`0.\\overline{3}` and `0.333...` as 1/3."""
    found = (OVERLINED.fullmatch(text) or REPEATED.fullmatch(text)) if len(text) <= REPEATING_LONGEST else None
    if found is None:
        return None
    sign, whole, fixed, repeated = found[1], found[2], found[3], found[4]
    scale = 10 ** len(fixed)
    value = Fraction(int(whole + fixed or "0"), scale) + Fraction(int(repeated), scale * (10 ** len(repeated) - 1))
    return Numeral(-value if sign else value)
