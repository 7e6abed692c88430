"""Owns what stands around an answer and changes it: a sign, digits or a unit at a box, a later retraction.

Must not compare values. Looks at a few hundred characters only.
"""

from __future__ import annotations

import re

from verifier.verifiers.math.reading.units import parse_unit

LATER = 300  # characters behind an answer in which a retraction counts
NEAR_BEFORE = 40  # characters of a box's line before it
NEAR = 80  # and behind it

WITHDRAWAL = re.compile(
    r"(?:^|[\s(*_])(?:wait|actually|hmm|correction|edit\s*:|oops|scratch that|i mean|sorry|on second thought|no,"
    r"|on reflection|just kidding|(?:it )?could also be|not sure|i(?:'m| am) (?:guessing|not sure)"
    r"|(?:that|this|it)(?:'s| is| was) (?:wrong|incorrect|not right))(?![A-Za-z])"
    r"|\A\s*(?:\n\s*or|is (?:wrong|incorrect))\b",
    re.IGNORECASE,
)
ERROR = re.compile(r"\b(?:wrong|incorrect|correction|edit|mistake|not sure|guessing)\b", re.IGNORECASE)
STATED = re.compile(r"\d+(?:[.,]\d+)*|(?<![A-Za-z'])[B-H](?![A-Za-z'])")
DOUBTED_SENTENCE = re.compile(r"\b(?:wrong|incorrect|doubt)\b|n't think|\bnot think\b", re.IGNORECASE)
CHECKED = re.compile(r"\b(?:check|verify|confirm)(?:ing)?(?: (?:the|my|our|this|final))*\s*\Z", re.IGNORECASE)
SUPPOSED = re.compile(
    r"\b(?:if|suppos(?:e|ing)|assum(?:e|ing))(?: that)?(?: (?:the|my|your|our|this|final|correct))*\s*\Z", re.I
)

MARKUP_BEFORE = re.compile(r"(?:\s|\$|\*\*|\\[(\[,;])*\Z")
MARKUP_AFTER = re.compile(r"(?:\s|\$|\*\*|\\[)\],;])*")
HEDGED_BEFORE = re.compile(
    r"(?:\b(?:not|maybe|perhaps|possibly|probably|nor|between)|n't)(?: be| is)?\Z", re.IGNORECASE
)
ALTERNATIVE_BEFORE = re.compile(r"(?:\d|\$|[})]|\b[A-H])\s*\bor\Z", re.IGNORECASE)
OPERATOR_BEFORE = re.compile(
    r"(?:[\w)}]\s*[*+/]|[\^_]\s*\{?|[\d})]\s*-|\\(?:cdot|times|div|sqrt|pm)|\\(?:frac|sqrt)\s*\{|\}\s*\{)\Z"
)
BULLET = re.compile(r"[ \t]*-[ \t]+\Z")
OPERATOR_AFTER = re.compile(
    r"(?:[+/*]|\\(?:cdot|times|div|pm)(?![A-Za-z])|-)\s*[$(]{0,2}(?:\d|\\(?:frac|sqrt|pi)|[a-z](?![A-Za-z]))"
    r"|\^(?!\s*\{?\s*\\circ)|\}\s*\{|\\[lc]?dots(?![A-Za-z])"
)
GLUED_AFTER = re.compile(r"\.\d+|\{?,?\}?\d[\d,.]*|\\(?:pi|sqrt|infty)(?![A-Za-z])[^$\n]{0,20}|π")
DOUBT_AFTER = re.compile(
    r"[,(]?\s*(?:\\text\s*\{\s*)?(?:or|maybe|perhaps|possibly|probably|not sure)\b[^.\n]{0,60}|\?", re.IGNORECASE
)
WORD_AFTER = re.compile(r"\\(?:text|mathrm)\s*\{([^{}]{1,30})\}|([A-Za-z]{1,12})(?![A-Za-z])|(°|\\?%)")
SCALE = frozenset(["hundred", "thousand", "million", "billion", "trillion", "dozen", "lakh", "crore"])


def withdrawal(answer: str, behind: str) -> str:
    """The words behind an answer that take it back: they name an error, or end with another value; else ''."""
    behind = behind[:LATER]
    found = WITHDRAWAL.search(behind)
    if found is None:
        return ""
    later = behind[found.start() :]
    stated = STATED.findall(later)
    other = bool(stated) and stated[-1] not in STATED.findall(answer)
    return found[0].strip(" (*_\n") if other or ERROR.search(later) else ""


def is_no_mark(before: str) -> bool:
    """Whether the words before `answer is` on its line deny or suppose it."""
    sentence = re.split(r"[.!?;]\s", before[-200:])[-1]
    return bool(
        DOUBTED_SENTENCE.search(sentence)
        or CHECKED.search(sentence)
        or re.search(r"\bpossible\s*\Z", sentence)
        or SUPPOSED.search(sentence)
    )


def whole_box(before: str, content: str, after: str) -> tuple[str, str]:
    """A box's content with what is glued to it on its line, and the fault if that is no answer ('' if it is)."""
    before, after = before.rpartition("\n")[2][-NEAR_BEFORE:], after.partition("\n")[0][:NEAR]
    head = MARKUP_BEFORE.sub("", before)
    doubt = HEDGED_BEFORE.search(head)
    both_ends = doubt is not None and doubt[0].lower() == "between" and " and " in content
    if (doubt is not None and not both_ends) or ALTERNATIVE_BEFORE.search(head):
        return content, "hedged: the words before the box"
    if OPERATOR_BEFORE.search(head) or re.search(r"\d\Z", before):
        return content, "the box is a part of an expression"
    tail = MARKUP_AFTER.sub("", after, count=1)
    if OPERATOR_AFTER.match(tail):
        return content, "the box is a part of an expression"
    sign = "-" if head.endswith("-") and not BULLET.fullmatch(before) and not re.search(r"\w\s+-\Z", head) else ""
    return sign + content + _glued(after, tail), ""


def _glued(after: str, tail: str) -> str:
    """The digits, constant, doubt, unit or scale that directly follows a box."""
    direct = GLUED_AFTER.match(tail)
    variable = re.match(r"[a-z](?![A-Za-z])", after)
    if variable is not None:
        return variable[0]
    if direct is not None and (tail == after or not direct[0][-1].isdigit()):
        return direct[0]
    doubt = DOUBT_AFTER.match(tail)
    if doubt is not None:
        return " " + doubt[0]
    word = WORD_AFTER.match(tail)
    if word is None:
        return ""
    name = (word[1] or word[2] or word[3]).strip(" \\")
    unit = parse_unit(name, things=False) if len(name) > 1 or word[1] or word[3] else None
    return f" {name}" if name.lower() in SCALE or (unit is not None and unit.dimensions) else ""
