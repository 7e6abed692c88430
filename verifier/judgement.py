"""Owns what every verifier is: a function from a response and its reference to a judgement.

Must not know any verifier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Judgement:
    """Whether the response is correct, and a score in [0, 1]."""

    correct: bool
    score: float


Judge = Callable[[str, Mapping[str, Any]], Judgement]
"""Judges a response's text against a prompt's reference. Raises ValueError for a reference it cannot use; a
response that cannot be read is wrong, not an error."""
