"""Owns what the oracle says: findings by kind.

Must not decide what is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a finding is about. Any of them fails a run; LOST and DUPLICATED are what the whole suite is for."""

    LOST = "lost"
    DUPLICATED = "duplicated"
    GAP = "gap"
    COUNTERS = "counters"
    HISTORY = "history"
    ARCHIVE = "archive"
    RULE = "rule"
    STALENESS = "staleness"


@dataclass(frozen=True)
class Finding:
    """One thing that must not be: of which kind, what it is about (a group, a step, a stream), and what is wrong."""

    kind: Kind
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.subject}: {self.text}"
