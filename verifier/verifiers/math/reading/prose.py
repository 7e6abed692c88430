"""Owns the reading of an answer that is a sentence: the one value that it states without doubt.

Must not pick one of several different numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from verifier.verifiers.math.reading import hedges
from verifier.verifiers.math.reading.formulas import GREEK, is_formula
from verifier.verifiers.math.reading.notation import LONGEST, balanced, clean, lacks_operand, words
from verifier.verifiers.math.reading.number_words import NUMBER_WORDS
from verifier.verifiers.math.reading.numerals import PLAIN, OversizeError, rational
from verifier.verifiers.math.reading.units import UNREAD_SCALES, as_money, leading_currency, parse_unit
from verifier.verifiers.math.reading.whole import readings
from verifier.verifiers.math.values import Formula, Numeral, Quantity, Unclear, Value, Words

APPROXIMATE = re.compile(r"^(?:\\approx|approximately|approx\.?|≈)\s*", re.IGNORECASE)
LEAD = re.compile(
    r"^(?:(?:is|are|was|equals?|=|be|would be|will be|that|there (?:are|is)|it is|it's|we have|we get"
    r"|simply|just"
    r"|exactly|indeed|therefore|thus|so|hence|equal to|given by"
    r"|i (?:choose|chose|pick|select)|still|now|then|also|precisely|only)[\s,:]+)+",
    re.IGNORECASE,
)
AMOUNT = re.compile(
    rf"(?<![\w.\\])(?:(?:US)?[$€£¥₹]\s*)?[-+]?(?:{PLAIN.pattern})(?:\s*/\s*\d+|/\d+)?(?!\w)|[-+]?\\frac\{{\d+\}}\{{\d+\}}"
)
SEGMENT = re.compile(r"\\\((.+?)\\\)|\\\[(.+?)\\\]|\$\$(.+?)\$\$|(?<!\\)\$([^$\n]+?)\$(?!\d)", re.DOTALL)
PARENTHESIS = re.compile(r"^(.*\S)\s+\(([^()]*)\)$", re.DOTALL)
COMPUTED = re.compile(
    r"\b(?:twice|thrice|doubled?|tripled?|squared|cubed|minus|negative|plus|times(?=\s+\w)|divided|multiplied|half"
    r"|quarter|root|factorial|hundreds|thousands|millions)\b",
    re.IGNORECASE,
)
DANGLING = re.compile(r"\b(?:and|or|an?|the|of|plus|minus|but|if|to|with|than|and also)$", re.IGNORECASE)
"""A last word behind which something has to follow."""

STRUCK = re.compile(r"~~[^~\n]{1,200}~~")
MENTIONS = 8  # of the same number in a sentence
SCALED = re.compile(
    rf"\s*-?\s*(?:{'|'.join(sorted(UNREAD_SCALES))})s?\b|\s*(?:score|grand)\b(?!\s+[a-z]{{3}})", re.IGNORECASE
)
CHANGED = re.compile(
    r"\s*(?:\\?%|‰|percent|per ?mille)\s*(?:age)?\s*(?:points?\s*)?(?:more|less|fewer|greater|higher|lower|larger"
    r"|smaller|over|under|above|below|better|worse)\b|\s*(?:\S{1,20}\s)?off\b|\s*(?:in|as) (?:binary|octal|hex)"
    rf"|\s*\\?(?:{'|'.join(GREEK)})s?\b",
    re.IGNORECASE,
)
"""What directly follows a number and makes another value of it."""

ADDED = re.compile(
    r"(?:\band|,) (?:an?|one|another|several|many|a few|some)\b|\b(?:an?|one|another) \w+ and\b", re.IGNORECASE
)
"""Another thing beside those that are counted."""
ABOUT = re.compile(r"(?:^|[\s($*])~\s?-?\\?\$?[\d.]")
"""A tilde directly before a number."""

WORD = re.compile(r"[A-Za-z]{2,}")


@dataclass(frozen=True)
class Understood:
    """What an answer's text says: its possible values, likeliest first, and the word by which it hedges, if any."""

    values: tuple[Value, ...]
    hedge: str = ""


def understand(content: str, sentence: bool) -> Understood:
    """The value of a response's answer text. `sentence`: its last exclamation marks may be no factorial."""
    if len(content) > LONGEST:
        return Understood((Unclear(f"longer than {LONGEST} characters"),))
    content = STRUCK.sub(" ", content)
    text = clean(content)
    if not balanced(text):
        return Understood((Unclear("truncated: unbalanced braces"),))
    if lacks_operand(text, text):
        return Understood((Unclear("truncated: an operand is missing"),))
    if ABOUT.search(content):
        return Understood(readings(text, glued_units=True), "~")
    if sentence:
        text = re.sub(r"!{2,}$", "", text)
    text = APPROXIMATE.sub("", text)
    hedge = hedges.hedge(text)
    if hedge:
        certain = hedges.without_reason(text)
        if rest := hedges.hedge(certain):
            return Understood(_only_words(readings(text, glued_units=True), text), rest)
        text = certain
    concluded = hedges.conclusion(text)
    values = readings(concluded, glued_units=True) if concluded != text else ()
    values = values or readings(text, glued_units=True)
    if not values:
        values = _searched(content, text)
    elif isinstance(values[0], Words):
        plain = hedges.without_reason(text)
        values += readings(plain, glued_units=True) + readings(LEAD.sub("", plain), glued_units=True)
    if sentence and text.endswith("!"):
        exclaimed = readings(text.rstrip("! "), glued_units=True)
        values += tuple(value for value in exclaimed if not isinstance(value, Formula))
    return Understood(values)


def _only_words(whole: tuple[Value, ...], text: str) -> tuple[Value, ...]:
    kept = tuple(value for value in whole if isinstance(value, Words))
    return kept or ((Words(words(text)),) if text.strip() else ())


def _searched(content: str, text: str) -> tuple[Value, ...]:
    """Shorter and shorter parts of a sentence, until one is a value as a whole."""
    for shorter in _shortened(text):
        found = readings(shorter, glued_units=True)
        if found:
            return found
    segments = [clean(next(group for group in match.groups() if group)) for match in SEGMENT.finditer(content)]
    outside = SEGMENT.sub(" ", content)
    if len(set(segments)) == 1 and not re.search(r"\d", outside) and not _number_words(outside):
        found = readings(segments[0], glued_units=True)
        if found:
            return found
    return tuple(_only_amount(meant) for meant in dict.fromkeys((text, as_money(text))))


def _shortened(text: str) -> list[str]:
    """The sentence's ends that may be the answer, the most careful first."""
    found: list[str] = []
    enclosed = PARENTHESIS.match(text)
    if enclosed is not None:
        same = _remark(enclosed[1], enclosed[2])
        if same is not None:
            found.append(same)
    plain = hedges.without_reason(text)
    led = LEAD.sub("", plain)
    found += [plain, led]
    concluded = hedges.conclusion(plain)
    found += [concluded, LEAD.sub("", concluded)]
    if "=" in concluded and not re.search(r"\b(?:and|or)\b|,|;", concluded.rpartition("=")[0]):
        found.append(concluded.rpartition("=")[2].strip())
    return [shorter for shorter in found if shorter and shorter != text]


def _remark(before: str, inside: str) -> str | None:
    """The text before a remark in parentheses that says the same or gives no value; None if it says something else."""
    inner = readings(inside, glued_units=True)
    if hedges.hedge(inside) or hedges.retraction(" " + inside):
        return None
    if not re.search(r"\d", inside) and not any(isinstance(value, Numeral) for value in inner):
        return before
    outer = readings(before, glued_units=True)
    first = {value.magnitude if isinstance(value, Quantity) else value for value in outer[:1]}
    second = {value.magnitude if isinstance(value, Quantity) else value for value in inner[:1]}
    values = [value.value for value in (*first, *second) if isinstance(value, Numeral)]
    return before if len(values) == 2 and len(set(values)) == 1 else None


def _number_words(text: str) -> set[str]:
    return {word for word in re.findall(r"[a-z]+", text.lower()) if word in NUMBER_WORDS - {"one", "zero"}}


def _only_amount(text: str) -> Value:
    """The one number of a sentence, with the unit that follows it; Unclear if there are several, or none."""
    if "..." in text:
        return Unclear("an ellipsis: the answer is not complete")
    amounts = list(AMOUNT.finditer(text))
    outside = AMOUNT.sub(" ", text)
    if re.search(r"\d", outside) or (amounts and (_number_words(outside) or COMPUTED.search(outside))):
        return Unclear("a sentence with more than one number, or with a formula")
    if not amounts:
        return Words(words(text)) if WORD.search(text) else Unclear("no value")
    if not WORD.search(outside) or re.search(r"[=<>^_+*\\#@&|]|\(\s*\)|\w{2}\(", outside) or is_formula(text):
        return Unclear("no expression that can be read")
    if DANGLING.search(text):
        return Unclear("a sentence without its end")
    values = {_amount(amount[0]) for amount in amounts}
    if len(values) != 1 or None in values:
        return Unclear("a sentence with several different numbers")
    if len(amounts) > MENTIONS or any(hedges.another_value(text, one.start(), one.end()) for one in amounts):
        return Unclear("a sentence whose number may not be the answer")
    after = text[amounts[-1].end() :]
    if SCALED.match(after):
        return Unclear("a number with a scale that is not read")
    if any(CHANGED.match(text[one.end() :]) for one in amounts) or ADDED.search(text):
        return Unclear("a sentence that makes another value of its number")
    value = values.pop()
    assert value is not None
    for length in range(4, 0, -1):
        unit = parse_unit(" ".join(after.split()[:length]), things=False)
        if unit is not None and isinstance(value, Numeral):
            return Quantity(value, unit) if unit.dimensions else value
    return value


def _amount(text: str) -> Numeral | Quantity | None:
    currency = leading_currency(text)
    try:
        number = rational(currency[0] if currency else text)
    except OversizeError:
        return None
    return Quantity(number, currency[1]) if number is not None and currency else number
