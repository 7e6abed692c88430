"""Owns times of day and dates: which texts are one.

Must not compare. A date in digits alone stays text: `5/6/2020` has two readings.
"""

from __future__ import annotations

import re

from verifier.verifiers.math.values import ClockTime, Words

CLOCK = re.compile(r"(\d{1,2})(?::([0-5]\d)(?::00)?)?\s*([ap])\.? ?m\b\.?|(\d{1,2}):([0-5]\d)", re.IGNORECASE)
NAMED_TIMES = {"noon": ClockTime(12, 0, "pm"), "midday": ClockTime(12, 0, "pm"), "midnight": ClockTime(12, 0, "am")}
SPOKEN = {
    re.compile(r"(?<=\d) o'?clock", re.IGNORECASE): ":00",
    re.compile(r" in the morning$", re.IGNORECASE): " am",
    re.compile(r" (?:in the (?:afternoon|evening)|at night)$", re.IGNORECASE): " pm",
}
MONTHS_WORDS = "january february march april may june july august september october november december"
MONTHS = {name[:length]: name for name in MONTHS_WORDS.split() for length in (3, 4, len(name))}
MONTH_FIRST = re.compile(r"(?P<month>[a-z]{3,9})\.? (?P<day>\d{1,2})(?:st|nd|rd|th)?(?:,? (?P<year>\d{4}))?")
DAY_FIRST = re.compile(
    r"(?:the )?(?P<day>\d{1,2})(?:st|nd|rd|th)?(?: of)? (?P<month>[a-z]{3,9})\.?(?:,? (?P<year>\d{4}))?"
)


def clock(text: str) -> ClockTime | None:
    """`3:45 pm`, `15:45`, `3 pm`, `noon`; None for any other text."""
    if (named := NAMED_TIMES.get(text.lower().removeprefix("12 "))) is not None:
        return named
    text = text.removeprefix("at ")
    for spoken, written in SPOKEN.items():
        text = spoken.sub(written, text)
    found = CLOCK.fullmatch(text)
    if found is None:
        return None
    if found[4] is not None:
        return ClockTime(int(found[4]), int(found[5]))
    hour, minute, half = int(found[1]), int(found[2] or 0), found[3].lower() + "m"
    return ClockTime(hour, minute, half)


def date(text: str) -> Words | None:
    """A date with its month in letters, in one spelling: `5 May 2020` and `May 5th, 2020` as `may 5 2020`."""
    if len(text) > 40 or not text[-1:].isalnum():
        return None
    found = MONTH_FIRST.fullmatch(text.lower()) or DAY_FIRST.fullmatch(text.lower())
    month = MONTHS.get(found["month"]) if found else None
    if found is None or month is None or not 1 <= int(found["day"]) <= 31:
        return None
    return Words(" ".join(part for part in (month, str(int(found["day"])), found["year"]) if part))
