"""Owns the verdict on mathematical answers, by the library math-verify (symbolic equality).

Must not set alarms of its own; the sandbox bounds the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verifier.verifiers.base import Judgement

TAIL = 2000  # characters; a longer response is judged by its end, where the answer stands
PLAIN = 1e30  # numbers from its inverse to it are written out as fractions


def canonical(parsed: list[Any]) -> str:
    """What `parse` found, as a string: its first reading's, with decimals as fractions (0.5 is 1/2).

    Cheap on purpose: nothing is simplified, for a hostile answer must not cost a verdict its time.
    """
    import sympy

    first = parsed[0] if parsed else ""
    if isinstance(first, sympy.Float) and 1 / PLAIN < abs(float(first)) < PLAIN:
        return str(sympy.Rational(str(first)))
    return str(first)


def judge(text: str, reference: Mapping[str, Any]) -> Judgement:
    """`reference` holds `answer`, LaTeX or plain; correct iff math-verify finds the response's answer equal.

    Every correct response is given the reference's answer, however it was written; a wrong one its own.
    """
    from math_verify import parse, verify  # heavy: only in the process that judges

    gold = parse(f"${reference['answer']}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"reference answer {reference['answer']!r} cannot be parsed")
    found = parse(text[-TAIL:], parsing_timeout=None)
    correct = bool(verify(gold, found, timeout_seconds=None))
    return Judgement(correct=correct, score=float(correct), answer=canonical(gold if correct else found))
