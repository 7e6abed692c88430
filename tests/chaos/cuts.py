"""Owns what a failover lost: the entries of each stream that only the dead primary had.

Must not import the code under test.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

EMPTY = "0-0"
"""The last id of a stream that never had an entry."""


def order(entry: str) -> tuple[int, int]:
    """The sort key of an entry's id."""
    milliseconds, number = entry.split("-")
    return int(milliseconds), int(number)


@dataclass(frozen=True)
class Cut:
    """A primary that died with writes that its replica lacked.

    `kept`: by stream, the last id that the replica had; `since`: when the replica was cut off, which holds for streams
    that it did not have, or had empty because a rewind created them again; `until`: when the primary was dead. Both in
    milliseconds of the machine's clock.
    """

    since: int
    until: int
    kept: dict[str, str]

    def lost(self, stream: str, entry: str) -> bool:
        """Whether an entry that was read from the dead primary is no part of the history."""
        last = self.kept.get(stream, EMPTY)
        begins = (self.since, -1) if last == EMPTY else order(last)
        return begins < order(entry) and order(entry)[0] <= self.until

    def as_json(self) -> dict[str, Any]:
        """Evidence for the record."""
        return asdict(self)


def lost(cuts: Iterable[Cut], stream: str, entry: str) -> bool:
    """Whether one of the failovers lost an entry."""
    return any(cut.lost(stream, entry) for cut in cuts)
