"""Owns what every verifier is: a function from a response and its reference to a judgement.

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
    """Whether the response is correct, a score in [0, 1], and the answer that was judged.

    `answer` is in a normal form, so that responses with the same answer have the same string; '' when there is none.
    """

    correct: bool
    score: float
    answer: str = ""


def bounded(answer: str) -> str:
    """`answer` in at most 200 characters. Of a longer one a digest takes the place of its end, so that two long
    answers stay different."""
    if len(answer) <= ANSWER_CHARACTERS:
        return answer
    digest = hashlib.sha256(answer.encode(errors="replace")).hexdigest()[:16]
    return f"{answer[: ANSWER_CHARACTERS - len(digest) - 1]} {digest}"


Judge = Callable[[str, Mapping[str, Any]], Judgement]
"""Judges a response's text against a prompt's reference. Raises ValueError for a reference it cannot use; a
response that cannot be read is wrong, not an error."""
