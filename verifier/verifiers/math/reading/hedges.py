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
    r"|some(?= \\?\$?\d)|in excess of|hopefully"
    r"|with \d{1,3} ?% (?:confidence|certainty)|ballpark|order of"
    r"|and (?:counting|rising|more|over|above|change|then some|beyond|others?|so (?:on|forth))|etc"
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
    r"(?:,|\s[-(]|;)\s*(?:and )?(?:not(?!\s(?:sure|certain|confident|really|exactly|quite|always|necessarily|only))"
    r"|rather than|instead of)\s.*$",
    re.IGNORECASE | re.DOTALL,
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


POLAR = re.compile(
    r"(?:(?:it|it's|that|that's|this|(?:the|this) (?:statement|claim|answer))\s+(?:is\s+)?)?(yes|no|true|false)"
    r"(?P<rest>|[\s]*[,.;:!(\-].*|\s+(?:because|since|as|it|they|he|she|we|this|that|the)\s.*)",
    re.IGNORECASE | re.DOTALL,
)
NEGATIONS = r"no|not|cannot|\w+n't|never|false|impossible|neither|nor"
OPPOSITES = dict.fromkeys(("yes", "true"), NEGATIONS) | dict.fromkeys(("no", "false"), "yes|true")
CONDITION = re.compile(
    r"\b(?:if|when|sometimes|usually|often|mostly|not (?:sure|always|certain|necessarily)|don't know)\b"
)
DOUBT = re.compile(
    r"\b(?:far|never|no longer|false|mistaken|\w{2,12}n't|(?:is|ca|wo|does|do|are|was|did|should|would|could)nt"
    r"|close to|ish|thereabouts|upwards|estimated?|suspect|suppose|unlikely"
    r"|something like|plausible|onwards?|est|and up|either|if|when|assuming|unless|too)\b",
    re.IGNORECASE,
)
"""Words of a sentence by which its one number may not be the answer."""

OTHER_VALUE = re.compile(
    r"(?:\b(?:above|under|below|over|beyond|past|exceed(?:s|ing)?|max(?:imum)?|min(?:imum)?|before|after"
    r"|(?<!rose )(?<!risen )(?<!increased )(?<!decreased )(?<!increases )(?<!decreases )(?<!grew )(?<!fell )"
    r"(?<!dropped )(?<!changed )(?<!won )by|from"
    r"|without|(?:first|last|next)|(?:lower|upper) bound"
    r"|(?:problem|step|equation|question|figure|part|case|exercise|example|section|theorem)"
    r"|remove|add|subtract|half|twice)"
    r"|(?<!total)(?<!value)(?<!amount)(?<!result)(?<!answer)(?<!profit)(?<!cost)(?<!price)(?<!average)(?<!speed)"
    r"(?<!area)(?<!length)(?<!width)(?<!height)(?<!weight)(?<!distance)(?<!age)(?<!score)(?<!rate)(?<!earnings)"
    r"(?<!discount)(?<!increase)(?<!tip)(?<!tax)(?<!raise)(?<!percentage)(?<!probability)"
    r"(?<!chance)(?<!volume)(?<!perimeter)(?<!balance)(?<!income)(?<!salary)\sof)"
    r"(?:\sof)?\s*\Z|^of\s*\Z",
    re.IGNORECASE,
)
"""What stands directly before a number that another value is made of: `square of 5`, `above 5`."""

BOUND = re.compile(
    r"\b(?:max(?:imum)?|min(?:imum)?|above|below|beyond|over|under|at (?:best|worst)|was my"
    r"|for (?:odd|even|large|small|some|most|[b-hj-z])(?= |$)|in (?:the|this|that|one|either|some) (?:\w{1,12} )?cases?"
    r")\b(?! the\b)",
    re.IGNORECASE,
)
"""What stands behind a number that is a bound or was withdrawn."""


def polar(text: str) -> str:
    """`yes`, `no`, `true` or `false`, if a text says it first and takes nothing of it back; else ''."""
    found = POLAR.fullmatch(text.strip())
    if found is None:
        return ""
    word, rest = found[1].lower(), found["rest"].lower()
    if re.search(rf"\b(?:{OPPOSITES[word]})\b", rest) or CONDITION.search(rest):
        return ""
    if word in ("no", "false"):
        rest = re.sub(rf"\b(?:{NEGATIONS})\b", "", rest)
    return "" if hedge(rest) or retraction(rest) else word


def another_value(text: str, start: int, end: int) -> bool:
    """Whether a sentence's words make its one number, at start:end, a bound, a part or a doubt, not the answer."""
    before, after = text[:start], text[end:]
    return bool(
        DOUBT.search(before) or DOUBT.search(after) or OTHER_VALUE.search(before.rstrip(" ($")) or BOUND.search(after)
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
