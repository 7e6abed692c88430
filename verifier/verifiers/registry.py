"""Owns the table of verifiers: the names that a prompt may use.

Must not contain a verifier.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verifier.verifiers import answer_line, math, reasoning_gym, regex
from verifier.verifiers.base import Judge, Judgement

VERIFIERS: dict[str, Judge] = {
    "reasoning-gym": reasoning_gym.judge,
    "math": math.judge,
    "answer-line": answer_line.judge,
    "pattern": regex.judge,
}

LIBRARIES: dict[str, str] = {"reasoning-gym": "reasoning_gym", "math": "math_verify"}
"""Libraries that take seconds to import, by verifier: loaded before the first judgement, whose time is limited."""


def judge(verifier: str, text: str, reference: Mapping[str, Any]) -> Judgement:
    """Judge by name. Raises ValueError for an unknown name or an unusable reference."""
    if verifier not in VERIFIERS:
        raise ValueError(f"verifier: {verifier!r} is not valid: expected one of {', '.join(sorted(VERIFIERS))}")
    try:
        return VERIFIERS[verifier](text, reference)
    except KeyError as error:
        raise ValueError(f"reference: a field is missing for verifier {verifier!r}: expected {error}") from None
