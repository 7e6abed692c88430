"""Owns the words by which an answer says that it is not sure, not exact, or not the answer.

Must not judge values: `5 or 6` is read as a list elsewhere.
"""

from __future__ import annotations

import re

HEDGE = re.compile(
    r"\b(?:maybe|perhaps|possibly|probably|presumably|likely|neither|nor|about|around|roughly|nearly|almost|circa"
    r"|at least|at most|(?:more|less|fewer|greater|larger|smaller|other) than|up to|not|cannot|can't|isn't|unknown"
    r"|unsure|(?:might|could|may|should) be(?= [\d$\\(-])|i think|i guess|guess(?:ing)?|i believe|unclear|depends"
    r"|undetermined|or (?:so|more|less|fewer|greater|higher|lower)|give or take|between|any of|one of|except|unless"
    r"|but|wrong|incorrect|impossible|wait|actually|hmm|none of|all of the above)\b|\?",
    re.IGNORECASE,
)
RETRACTION = re.compile(
    r"(?:^|[\s,;.(\-])(?:wait|actually|no,|hmm|correction|scratch that|i mean|sorry|alternatively"
    r"|or (?:maybe|perhaps|rather)|(?:or|maybe|perhaps|possibly) (?:it(?:'s| is)\s)?[\d$\\]|on second thought"
    r"|let me re|but (?:it )?(?:could|might|may))",
    re.IGNORECASE,
)
TRAILING_REFUSAL = re.compile(
    r"(?:,|\s[-(]|;)\s*(?:and )?(?:not|rather than|instead of)\s.*$", re.IGNORECASE | re.DOTALL
)
REASON = re.compile(
    r"(?:\s*[,;(]\s*|\s+)(?:because|since|as (?:it|he|she|they|the|we|shown|required|desired|requested)|which|where"
    r"|given that|due to|for a total|in total|altogether)\b(?P<rest>.*)$",
    re.IGNORECASE | re.DOTALL,
)
CONCLUSION = re.compile(
    r"(?:[,;.]\s*|\s+)(?:(?:and\s+)?(?:so|therefore|thus|hence|then|which (?:gives|means|is|equals)|giving|this gives"
    r"|that is|i\.e\.)(?:\s*,)?\s|\\implies\s|=>)",
    re.IGNORECASE,
)


def hedge(text: str) -> str:
    """The first word that hedges, '' if there is none."""
    found = HEDGE.search(text)
    return found[0] if found else ""


def retraction(text: str) -> str:
    """The first words that take back what was said before, '' if there are none."""
    found = RETRACTION.search(text)
    return found[0].strip() if found else ""


def without_reason(text: str) -> str:
    """The text before `because ...`, `, which ...` or `, not 6`, all of it if that would leave nothing."""
    for pattern in (TRAILING_REFUSAL, REASON):
        found = pattern.search(text)
        if found and text[: found.start()].strip():
            text = text[: found.start()].strip(" ,;")
    return text


def conclusion(text: str) -> str:
    """The text behind the last `so`, `therefore` or arrow, all of it if there is none."""
    found = None
    for match in CONCLUSION.finditer(text):
        found = match
    rest = text[found.end() :].strip() if found else ""
    return rest or text
