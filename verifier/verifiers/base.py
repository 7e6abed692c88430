"""Owns the interface of verifiers: a function from a response and its reference to a judgement.

Must not know any verifier.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ANSWER_CHARACTERS = 200


@dataclass(frozen=True)
class Judgement:
    """Whether the response is correct, a score in [0, 1], and the judged answer.

    `answer` is normalised, so that equal answers are equal strings; '' when the response has none.
    """

    correct: bool
    score: float
    answer: str = ""


def bounded(answer: str) -> str:
    """`answer` in at most 200 characters: a digest replaces the end of a longer one, so long answers stay distinct."""
    if len(answer) <= ANSWER_CHARACTERS:
        return answer
    digest = hashlib.sha256(answer.encode(errors="replace")).hexdigest()[:16]
    return f"{answer[: ANSWER_CHARACTERS - len(digest) - 1]} {digest}"


Judge = Callable[[str, Mapping[str, Any]], Judgement]
"""Judges a response's text against a prompt's reference. Raises ValueError for an unusable reference; a response that
cannot be parsed is wrong, not an error."""
