"""Owns the interface of verifiers: a function from a response and its reference to a judgement.

Must not know any verifier.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

ANSWER_CHARACTERS = 200


@dataclass(frozen=True)
class Judgement:
    """Whether the response is correct, a score in [0, 1], the judged answer, and why it was decided so.

    `answer` is normalised, so that equal answers are equal strings; '' when the response has none. `reason`: one line,
    with what was taken from the response and what it was compared with.
    """

    correct: bool
    score: float
    answer: str = ""
    reason: str = ""


class UndecidedError(Exception):
    """A response cannot be judged, and is not wrong for it: the verdict is `unknown`. The text says why."""


@dataclass(frozen=True)
class Candidate:
    """A response with what is needed to judge it: the prompt's reference, its chat and its row's metadata."""

    text: str
    reference: Mapping[str, Any]
    messages: tuple[Mapping[str, str], ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bare_reference(self) -> Any:
        """The reference as your own rewards get it: the row's answer alone, or the object that the row gives."""
        return self.reference["answer"] if list(self.reference) == ["answer"] else dict(self.reference)


def bounded(answer: str) -> str:
    """`answer` in at most 200 characters: a digest replaces the end of a longer one, so long answers stay distinct."""
    if len(answer) <= ANSWER_CHARACTERS:
        return answer
    digest = hashlib.sha256(answer.encode(errors="replace")).hexdigest()[:16]
    return f"{answer[: ANSWER_CHARACTERS - len(digest) - 1]} {digest}"


Judge = Callable[[str, Mapping[str, Any], Mapping[str, Any]], Judgement]
"""Judges a response's text against a prompt's reference, with the verifier's options (empty: all defaults).

Raises ValueError for an unusable reference or option, UndecidedError when there is no verdict; a response that cannot
be parsed is wrong, not an error."""
