"""Owns the oracle's findings and their kinds.

Must not check anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The kind of a finding. Any finding fails a run; LOST and DUPLICATED are the main purpose of the suite."""

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
    """One violation: its kind, its subject (a group, a step, a stream), and what is wrong."""

    kind: Kind
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.subject}: {self.text}"
