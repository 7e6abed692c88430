"""Owns units and currencies: their names, dimensions and factors, and how a unit is split from its number.

Must not convert between currencies.
"""

from __future__ import annotations

import re
from fractions import Fraction

from verifier.verifiers.math.reading.formulas import GREEK
from verifier.verifiers.math.reading.number_words import NUMBER_WORDS, PARTS
from verifier.verifiers.math.values import Unit

Dimensions = tuple[tuple[str, int], ...]

LENGTH, MASS, TIME, ANGLE = (("m", 1),), (("kg", 1),), (("s", 1),), (("degree", 1),)
NOTHING: Dimensions = ()


def _powers(base: str, factors: dict[str, str]) -> dict[str, tuple[Dimensions, Fraction]]:
    return {name: (((base, 1),), Fraction(factor)) for names, factor in factors.items() for name in names.split()}


NAMES: dict[str, tuple[Dimensions, Fraction]] = {
    **_powers(
        "m",
        {
            "m meter metre": "1",
            "km kilometer kilometre": "1000",
            "cm centimeter centimetre": "1/100",
            "dm decimeter": "1/10",
            "mm millimeter millimetre": "1/1000",
            "µm μm micrometer": "1/1000000",
            "nm nanometer": "1/1000000000",
            "inch inche": "0.0254",
            "ft foot feet": "0.3048",
            "yd yard": "0.9144",
            "mi mile": "1609.344",
        },
    ),
    **_powers(
        "kg",
        {
            "kg kilogram kilo": "1",
            "g gram gm": "1/1000",
            "mg milligram": "1/1000000",
            "lb pound": "0.45359237",
            "oz ounce": "0.028349523125",
            "ton tonne": "1000",
        },
    ),
    **_powers(
        "s",
        {
            "s sec second": "1",
            "ms millisecond": "1/1000",
            "min minute": "60",
            "h hr hour": "3600",
            "day": "86400",
            "week": "604800",
        },
    ),
    **_powers("month", {"month": "1", "yr year": "12", "decade": "120", "century centurie": "1200"}),
    **_powers("degree", {"° deg degree": "1"}),
    **_powers("radian", {"rad radian": "1"}),
    **_powers("celsius", {"°c celsius": "1"}),
    **_powers("fahrenheit", {"°f fahrenheit": "1"}),
    **_powers("kelvin", {"k kelvin": "1"}),
    **_powers("dollar", {"$ us$ dollar usd buck": "1", "cent ¢": "1/100"}),
    **_powers("euro", {"€ euro eur": "1"}),
    **_powers("sterling", {"£ gbp": "1"}),
    **_powers("yen", {"¥ yen jpy": "1"}),
    **_powers("rupee", {"₹ rupee rs inr": "1"}),
    **_powers("percent", {"% percent percentage pct": "1", "‰ permille promille": "1/10"}),
    **_powers("newton", {"n newton": "1"}),
    **_powers("joule", {"j joule": "1", "kj kilojoule": "1000"}),
    **_powers("watt", {"w watt": "1", "kw kilowatt": "1000"}),
    **_powers("volt", {"v volt": "1"}),
    **_powers("ampere", {"amp ampere": "1"}),
    **_powers("hertz", {"hz hertz": "1"}),
    **_powers("pascal", {"pa pascal": "1", "kpa": "1000"}),
    **_powers("mole", {"mol mole": "1"}),
    "l": ((("m", 3),), Fraction(1, 1000)),
    "liter": ((("m", 3),), Fraction(1, 1000)),
    "litre": ((("m", 3),), Fraction(1, 1000)),
    "ml": ((("m", 3),), Fraction(1, 1000000)),
    "milliliter": ((("m", 3),), Fraction(1, 1000000)),
    "millilitre": ((("m", 3),), Fraction(1, 1000000)),
    "gallon": ((("gallon", 1),), Fraction(1)),
    "gal": ((("gallon", 1),), Fraction(1)),
    "quart": ((("gallon", 1),), Fraction(1, 4)),
    "pint": ((("gallon", 1),), Fraction(1, 8)),
    "mph": ((("m", 1), ("s", -1)), Fraction("1609.344") / 3600),
    "kph": ((("m", 1), ("s", -1)), Fraction(1000, 3600)),
    "kmph": ((("m", 1), ("s", -1)), Fraction(1000, 3600)),
    "unit": ((("unit", 1),), Fraction(1)),
}
"""By lower-case singular: base units with their powers, and the factor to them (SI brochure; NIST SP 811)."""

CASED = {"N", "J", "W", "V", "K", "L", "kJ", "kW", "Hz", "Pa", "kPa", "mL", "Pct", "MPH"}
GLUED = frozenset(["m", "g", "s", "h", "l"])
"""Single letters that are more often variables: `2m` in a reference is twice m, `2 m` is a length."""

MONEY = frozenset(("dollar", "euro", "sterling", "yen", "rupee"))
COUNTED = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
MULTIPLIERS = frozenset(("million", "billion", "thousand", "hundred", "trillion", "dozen"))
NOT_NOUNS_WORDS = (
    "or and if when unless squared cubed doubled plus minus not maybe perhaps possibly "
    "about at least most more than less times over to sin "
    "cos tan log ln exp sqrt mod base is are was the because so then thus hence where with for of is equals am pm max "
    "min gcd lcm per a an never upwards upward ish thereabouts too estimated maximum minimum either assuming above "
    "below under beyond false off binary octal hexadecimal modulo counting onward onwards est hopefully"
)
SCALES_WORDS = "lakh lac crore gross ten halve factorial th k mil bn mn"
UNREAD_SCALES = frozenset(SCALES_WORDS.split()) | frozenset(PARTS) - {"quarter", "half", "halves"}
"""What multiplies or divides the number before it, and is no unit."""

NOT_NOUNS = frozenset(NOT_NOUNS_WORDS.split()) | UNREAD_SCALES | frozenset(name.lower() for name in GREEK)
ALONE_NO_NOUN = frozenset(("score", "grand", "divided", "multiplied", "increased", "decreased", "raised"))
"""By itself behind a number no thing: `5 score` is 100, `5 scores` are five of them."""

COMPARATIVES = frozenset(("higher", "lower", "greater", "larger", "smaller", "fewer", "better", "worse", "points"))
"""Behind a percentage they make it a change: `5% higher`."""

PREPOSITIONS_WORDS = "of per in for each every a an on at by to from from that altogether total left"
PREPOSITIONS = frozenset(PREPOSITIONS_WORDS.split())
HARMLESS = re.compile(
    r"(?:\s*(?:(?:of|for) (?:them|these|those|it|all)|in (?:total|all)|total|left|altogether|only|exactly"
    r"|each(?: [A-Za-z]{3,20})?|(?:per|every|a|an) [A-Za-z]{3,20})\b[ .]*){1,4}",
    re.IGNORECASE,
)
ANOTHER_THING = re.compile(r",\s*(?:an?|one|another|some|several)\b", re.IGNORECASE)
VARIABLE = re.compile(r"\b[b-z]\b")
PER = re.compile(r"(?:per|an?|each|every)\s+|/\s*")
INCHES = re.compile(r"((?:(?:sq|square|cu|cubic)\.? )?)in\.?(?=\s*\^\s*\{?\s*\d\s*\}?$|$)", re.IGNORECASE)
DEGREES_OF = re.compile(r"(?:\bdeg(?:ree)?s?\.? |°\s?)([CF])(?:elsius|ahrenheit)?\b", re.IGNORECASE)
PER_MILLE = re.compile(r"per mill?e?\b", re.IGNORECASE)
POUNDS = re.compile(r"(?<!-)\bpounds?\b(?:\s+sterling\b)?", re.IGNORECASE)
TOKEN = re.compile(
    r"\s*(?:([A-Za-zµμ]+\.?)|(°\s?[CFcf](?![A-Za-z])|US\$|[°%‰$€£¥₹¢])|(\^\s*\{?\s*(-?\d)\s*\}?)|([/*·\-]|\\cdot))"
)
LEADING = re.compile(
    r"(?P<sign>[-+]?)\s*(?P<unit>US\$|AU\$|[$€£¥₹]|(?:USD|EUR|GBP|JPY|INR|Rs)\.?(?=[\s\d]))\s*(?P<rest>\S.*)", re.DOTALL
)
START = re.compile(r"(?<![A-Za-z\\])(?:[A-Za-zµμ]|US\$|[°%‰$€£¥₹¢])")
LONGEST = 120  # characters of a unit


def singular(word: str) -> str:
    """The word without the ending of its plural."""
    word = word.lower().rstrip(".")
    if word in NAMES:
        return word
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("shes", "ches", "xes", "sses", "oes")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 2 else word


def _named(word: str) -> tuple[Dimensions, Fraction] | None:
    name = singular(word)
    if len(name) == 1 and word.isalpha() and word.isupper() and word not in CASED:
        return None
    if len(name) == 1 and name in "njwvk" and word.islower():
        return None
    return NAMES.get(name)


def _product(parts: list[tuple[Dimensions, Fraction, int]]) -> Unit:
    total: dict[str, int] = {}
    factor = Fraction(1)
    for dimensions, size, power in parts:
        factor *= size**power
        for base, exponent in dimensions:
            total[base] = total.get(base, 0) + exponent * power
    return Unit(tuple(sorted((base, power) for base, power in total.items() if power)), factor)


def _compound(text: str) -> tuple[Unit, int] | None:
    """The longest unit at the start, and where it ends: `km/h`, `square meters`, `m/s^2`, `dollars`."""
    parts: list[tuple[Dimensions, Fraction, int]] = []
    at, end, sign, power = 0, 0, 1, 1
    while (found := TOKEN.match(text, at)) is not None and found.end() > at:
        word, symbol, script, exponent, operator = found[1], found[2], found[3], found[4], found[5]
        if script is not None:
            if not parts or power != 1:
                break
            dimensions, size, old = parts[-1]
            parts[-1] = (dimensions, size, old * int(exponent))
            end = found.end()
        elif operator is not None:
            if not parts:
                break
            sign = -1 if operator == "/" else 1
        elif word is not None and word.lower() in ("per", "a", "an", "each", "every"):
            if not parts:
                break
            sign = -1
        elif word is not None and word.lower().rstrip(".") in COUNTED:
            power = COUNTED[word.lower().rstrip(".")]
        elif word is not None and word.lower() in ("squared", "cubed") and parts:
            dimensions, size, old = parts[-1]
            parts[-1] = (dimensions, size, old * (2 if word.lower() == "squared" else 3))
            end = found.end()
        else:
            named = _named(word) if word is not None else NAMES.get(symbol.lower().replace(" ", ""))
            if named is None:
                break
            if parts and parts[-1][0] == named[0] == (("dollar", 1),):  # "$18 dollars"
                return None
            parts.append((named[0], named[1], sign * power))
            sign, power, end = 1, 1, found.end()
        at = found.end()
    return (_product(parts), end) if parts else None


def is_money(unit: Unit) -> bool:
    """Whether the unit is a currency, or a price per something."""
    return any(base in MONEY and power > 0 for base, power in unit.dimensions)


def _nouns(text: str) -> frozenset[str] | None:
    """The words of what is counted, without what follows a preposition; None if it is not a phrase of nouns.

    Empty only for `in total`, `each` and the like, which count nothing in particular.
    """
    words = re.findall(r"[A-Za-z][A-Za-z'-]*", text)
    if HARMLESS.fullmatch(text) and not NUMBER_WORDS.intersection(map(str.lower, words)):
        return frozenset()
    if not words or len(words) > 8 or re.sub(r"[A-Za-z'\- ,.()]", "", text):
        return None
    lowered = [word.lower() for word in words]
    counted: list[str] = []
    for word in lowered:
        if word in PREPOSITIONS:
            break
        counted.append(word)
    rest = lowered[len(counted) :]
    if any({word, singular(word)} & (NOT_NOUNS | NUMBER_WORDS) for word in counted):
        return None
    if (counted[:1] == lowered and counted[0] in ALONE_NO_NOUN) or ANOTHER_THING.search(text):
        return None
    if {"odd", "even", "case", "cases"}.intersection(rest) or VARIABLE.search(" ".join(words[len(counted) :])):
        return None
    if rest[:1] == ["in"] and {"binary", "octal", "hexadecimal", "hex"} & set(rest):
        return None
    if any(word in NUMBER_WORDS or word in ("or", "not", "maybe", "if", "least", "most") for word in rest):
        return None
    if not counted or any(len(word) < 3 for word in counted):
        return None
    return frozenset(singular(word) for word in counted)


def parse_unit(text: str, things: bool) -> Unit | None:
    """The unit that all of `text` names, or None. `things`: also accept nouns that are no units."""
    text = text.strip()
    if not text or len(text) > LONGEST:
        return None
    text = PER_MILLE.sub("‰", DEGREES_OF.sub(r"°\1", text))
    found = _compound(INCHES.sub(r"\1inch", text, count=1) if INCHES.match(text) else text)
    if found is not None and INCHES.match(text):
        return found[0]
    if found is not None:
        unit, end = found
        rest = text[end:].strip(" .,")
        if unit.dimensions == (("percent", 1),) and COMPARATIVES.intersection(rest.lower().split()):
            return None
        if not rest or (things and _nouns(rest) is not None):
            return unit
        return None
    nouns = _nouns(text) if things else None
    return None if nouns is None else Unit(NOTHING, Fraction(1), nouns)


def leading_currency(text: str) -> tuple[str, Unit] | None:
    """The text behind a currency sign, with its sign, and the currency."""
    found = LEADING.match(text)
    if found is None:
        return None
    name = found["unit"].rstrip(".").lower()
    named = NAMES.get("$" if name == "au$" else name)
    if named is None:
        return None
    return found["sign"] + found["rest"], Unit(named[0], named[1])


def as_money(text: str) -> str:
    """The text with its pounds as pounds sterling: `5 pounds` as `5 £`."""
    return POUNDS.sub("£", text)


def rate(amount: Unit, text: str) -> Unit | None:
    """The unit of an amount per the time or length that a text names: `per hour`, `a day`, `/km`; None for others."""
    found = PER.match(text)
    divisor = parse_unit(text[found.end() :], things=False) if found else None
    if divisor is None or not divisor.dimensions:
        return None
    below = tuple((base, -power) for base, power in divisor.dimensions)
    return Unit(tuple(sorted(amount.dimensions + below)), amount.factor / divisor.factor)


def splits(text: str) -> list[tuple[str, str]]:
    """The ways to split a text into what may be a number and what may be a unit, the longest unit first."""
    found: list[tuple[str, str]] = []
    for start in START.finditer(text):
        before = text[: start.start()].rstrip()
        if text[start.start() :] == "K" and before == text[:-1]:  # "18K" is 18 thousand, "18 K" a temperature
            continue
        divided = "/" if before.endswith("/") else ""  # "5/day"
        before = before.removesuffix("/").rstrip()
        if before and len(found) < 12:
            found.append((before, divided + text[start.start() :]))
    return found


def is_unnamed(unit: Unit) -> bool:
    """Whether it is `units`, `square units` or `cubic units`."""
    return len(unit.dimensions) == 1 and unit.dimensions[0][0] == "unit"


def is_one_scale(reference: Unit, found: Unit) -> bool:
    """Whether numbers in compatible units are compared as they are: one size, or one of them does not say all."""
    if reference.factor == found.factor or is_unnamed(reference) or is_unnamed(found):
        return True
    return bool(reference.dimensions != found.dimensions and is_money(reference))


def compatible(reference: Unit, found: Unit) -> bool:
    """Whether the units measure the same, so that their numbers can be compared."""
    if reference.nouns and found.nouns:
        return bool(reference.nouns & found.nouns)
    named = next((unit for unit in (reference, found) if is_unnamed(unit)), None)
    if named is not None:
        other = found if named is reference else reference
        power = named.dimensions[0][1]
        return power == 1 or named.dimensions == other.dimensions or other.dimensions == (("m", power),)
    if reference.nouns or found.nouns:
        return False
    if reference.dimensions == found.dimensions:
        return True
    money = [base for base, power in reference.dimensions if base in MONEY and power == 1]
    if not money or dict(found.dimensions).get(money[0]) != 1:
        return False
    return ((money[0], 1),) in (reference.dimensions, found.dimensions)  # the question says per what
