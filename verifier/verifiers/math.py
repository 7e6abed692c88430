"""Owns the verdict on mathematical answers, by the library math-verify (symbolic equality).

Must not set its own alarms; the sandbox limits the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verifier.verifiers.base import Judgement

TAIL = 2000  # characters; of a longer response only the end is judged, which has the answer
PLAIN = 1e30  # numbers between its inverse and it are written as fractions


def canonical(parsed: list[Any]) -> str:
    """The first result of `parse` as a string, with decimals as fractions (0.5 is 1/2).

    Nothing is simplified: a hostile answer could make that exceed the verdict's deadline.
    """
    import sympy

    first = parsed[0] if parsed else ""
    if isinstance(first, sympy.Float) and 1 / PLAIN < abs(float(first)) < PLAIN:
        return str(sympy.Rational(str(first)))
    return str(first)


def judge(text: str, reference: Mapping[str, Any]) -> Judgement:
    """`reference` holds `answer`, LaTeX or plain; correct iff math-verify finds the response's answer equal.

    The judged answer of every correct response is the reference's, of a wrong response its own.
    """
    from math_verify import parse, verify  # slow to import: only in the judging process

    gold = parse(f"${reference['answer']}$", parsing_timeout=None)
    if not gold:
        raise ValueError(
            f"reference answer: {reference['answer']!r} is not valid: expected an expression that math-verify parses"
        )
    found = parse(text[-TAIL:], parsing_timeout=None)
    correct = bool(verify(gold, found, timeout_seconds=None))
    return Judgement(correct=correct, score=float(correct), answer=canonical(gold if correct else found))
