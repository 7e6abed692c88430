"""Owns numbers in words: cardinals, ordinals, fractions, and digits with a scale (`2 million`).

Must not read digits by itself.
"""

from __future__ import annotations

import re
from fractions import Fraction

from verifier.verifiers.math.reading.numerals import rational
from verifier.verifiers.math.values import Numeral, Ordinal

UNITS_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
UNITS = dict(
    zip(
        UNITS_WORDS.split(),
        range(20),
        strict=True,
    )
)
TENS_WORDS = "twenty thirty forty fifty sixty seventy eighty ninety"
TENS = dict(zip(TENS_WORDS.split(), range(20, 100, 10), strict=True))
SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
PARTS = {"half": 2, "halves": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7}
PARTS |= {"eighth": 8, "ninth": 9, "tenth": 10, "twelfth": 12, "hundredth": 100}
ORDINALS = {"first": 1, "second": 2, "twentieth": 20, "thirtieth": 30} | {
    word: value for word, value in PARTS.items() if word not in ("half", "halves", "quarter")
}
ORDINALS |= {"eleventh": 11, "thirteenth": 13, "fourteenth": 14, "fifteenth": 15, "sixteenth": 16}
ORDINALS |= {"seventeenth": 17, "eighteenth": 18, "nineteenth": 19}
NUMBER_WORDS = frozenset(UNITS) | frozenset(TENS) | frozenset(SCALES) | {"half"}
ORDINAL = re.compile(r"(\d{1,9})(?:st|nd|rd|th)")


def _cardinal(words: list[str]) -> int | None:
    total, group = 0, None
    for word in words:
        if word in UNITS or word in TENS:
            value = UNITS.get(word, TENS.get(word, 0))
            if group is not None and not ((group % 10 == 0 and value < 10 and group % 100 >= 20) or group % 100 == 0):
                return None
            group = (group or 0) + value
        elif word in ("hundred", "dozen"):
            group = (1 if group is None else group) * SCALES[word]
        elif word in SCALES:
            total += (1 if group is None else group) * SCALES[word]
            group = 0
        else:
            return None
    return None if group is None else total + group


def in_words(text: str) -> Numeral | None:
    """`eighteen`, `minus two thirds`, `five and a half`, `3rd`, `2 million`; None for any other text."""
    if len(text) > 100:
        return None
    words = text.lower().lstrip("-").replace("-", " ").split()
    named = bool(words) and words[0] in ("minus", "negative")
    negative = named != text.startswith("-")
    rest = words[named:]
    digits = rational(rest[0]) if negative and len(rest) == 1 else None
    value = digits.value if digits else _phrase(rest)
    return None if value is None else Numeral(-value if negative else value)


def ordinal(text: str) -> Ordinal | None:
    """`18th`, `third`; None for any other text."""
    lowered = text.lower().removeprefix("in ").removeprefix("the ")
    lowered = lowered.removesuffix(" place").removesuffix(" position")
    found = ORDINAL.fullmatch(lowered)
    if found:
        return Ordinal(int(found[1]))
    tens, _, last = lowered.rpartition("-")
    place = ORDINALS.get(last)
    if place is None or (tens and (tens not in TENS or place > 9)):
        return None
    return Ordinal(TENS.get(tens, 0) + place)


def _phrase(words: list[str]) -> Fraction | None:
    if words[:2] == ["half", "a"] or (words[:1] in (["a"], ["an"]) and words[1:2] and words[1] in SCALES):
        value = _phrase(words[1:])
        return value / 2 if value is not None and words[0] == "half" else value
    if len(words) == 2 and words[1] in SCALES and (number := rational(words[0])) is not None:
        return number.value * SCALES[words[1]]
    if "and" in words:  # "five and a half", "two hundred and five"
        at = words.index("and")
        upper, lower = _phrase(words[:at]), _phrase([word for word in words[at + 1 :] if word != "a"])
        if upper is None or lower is None or not (lower < 1 or (lower < 100 and upper % 100 == 0)):
            return None
        return upper + lower
    last = words[-1].removesuffix("s") if words and words[-1] not in ("halves",) else (words[-1] if words else "")
    if last in PARTS and (len(words) > 1 or last in ("half", "quarter")):
        above = [word for word in words[:-1] if word not in ("a", "an")] or ["one"]
        parts = (
            int(above[0])
            if last != "quarter" and len(above) == 1 and re.fullmatch(r"\d{1,9}", above[0])
            else _cardinal(above)
        )
        return None if parts is None else Fraction(parts, PARTS[last])
    cardinal = _cardinal(words)
    return None if cardinal is None else Fraction(cardinal)
