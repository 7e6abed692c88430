"""Owns the verdict on a response's last "Answer:" line, by string equality after normalisation: DAPO's published rule.

Must not compute: an equal answer in another notation is wrong here (`math` judges by value).

The rule (verl's math_dapo.py, after the Minerva paper's normal form, arXiv 2206.14858 appendix D.1): in the
last 300 characters, the text after the last "Answer:" on its line, normalised, must equal the normalised reference.
Each step scans the text a fixed number of times: the published scorer's patterns backtrack, and one response
can stop a run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from verifier.verifiers.base import Judgement

TAIL = 300  # characters; the longest answer of MATH-500 has 159
LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

REWRITTEN: tuple[tuple[str, str], ...] = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
"""Applied first, in this order: articles, spacing, and synonymous commands."""

REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue"),
    *("points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals"),
    *("edges", "students", "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}"),
    *("\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;"),
    *(",\\!", "{,}", '"', "\\dots"),
)
"""Removed next, in this order: units, nouns from questions, and decorations of a number."""

WRAPPERS = ("\\text{", "\\textbf{", "\\overline{")

BARE_FRACTION = re.compile(r"frac([^{])(.)")
BARE_ROOT = re.compile(r"sqrt([^{])")


def answer_line(text: str) -> str:
    """The text after the last "Answer:" (in any case) up to the line's end; '' when there is none.

    White space, line breaks included, may precede and follow the colon.
    """
    found = LINE.findall(text[-TAIL:])
    return str(found[-1]).strip() if found else ""


def normalised(answer: str) -> str:
    """The answer in the form that is compared. Takes time proportional to its length."""
    text = answer.rpartition("=")[2]
    for old, new in REWRITTEN:
        text = text.replace(old, new)
    for word in REMOVED:
        text = text.replace(word, "")
    text = _first_formula(text)
    for wrapper in WRAPPERS:
        text = _unwrapped(text, wrapper)
    text = _unboxed(text)
    text = BARE_FRACTION.sub(r"frac{\1}{\2}", text)
    text = BARE_ROOT.sub(r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


def _first_formula(text: str) -> str:
    """The first $...$ alone, if there is one."""
    _, opened, rest = text.partition("$")
    inside, closed, _ = rest.partition("$")
    return f"${inside}$" if opened and closed else text


def _unwrapped(text: str, opening: str) -> str:
    """The text without `opening` and the next "}" after each; an opening without a closing brace stays."""
    kept: list[str] = []
    at = 0
    while (start := text.find(opening, at)) >= 0 and (end := text.find("}", start)) >= 0:
        kept += (text[at:start], text[start + len(opening) : end])
        at = end + 1
    return "".join(kept) + text[at:]


def _unboxed(text: str) -> str:
    """The text without its first "\\boxed{" and its last "}"."""
    before, opened, rest = text.partition("\\boxed{")
    inside, closed, after = rest.rpartition("}")
    return before + inside + after if opened and closed else text


def judge(text: str, reference: Mapping[str, Any], options: Mapping[str, Any]) -> Judgement:
    """`reference` holds `answer`; correct iff the response's last "Answer:" line equals it, both normalised."""
    gold = normalised(str(reference["answer"]))
    if not gold:
        raise ValueError(
            f"reference answer: {str(reference['answer'])[:80]!r} is not valid: expected text after normalisation"
        )
    found = normalised(answer_line(text))
    correct = found == gold
    reason = f"the last answer line reads {found[:100]!r}, the reference {gold[:100]!r}" if found else "no answer line"
    return Judgement(correct=correct, score=float(correct), answer=found, reason=reason)
