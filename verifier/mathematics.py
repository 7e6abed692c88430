"""Owns the verdict on mathematical answers, by the library math-verify (symbolic equality).

Must not set alarms of its own; the sandbox bounds the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verifier.judgement import Judgement

TAIL = 2000  # characters; a longer response is judged by its end, where the answer stands


def judge(text: str, reference: Mapping[str, Any]) -> Judgement:
    """`reference` holds `answer`, LaTeX or plain; correct iff math-verify finds the response's answer equal."""
    from math_verify import parse, verify  # heavy: only in the process that judges

    gold = parse(f"${reference['answer']}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"reference answer {reference['answer']!r} cannot be parsed")
    found = parse(text[-TAIL:], parsing_timeout=None)
    correct = bool(verify(gold, found, timeout_seconds=None))
    return Judgement(correct=correct, score=float(correct))
