"""Owns the search for orphaned groups: no stream holds a message of theirs, because one was damaged beyond parsing.

Must not release a group.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from services.contracts import Lane, Sample, Task, Verdict
from services.process import Context
from services.sampler.groups import Group
from services.streams.state.events import read_all

ORPHANED_AFTER_S = 30.0


class Orphans:
    """Finds the orphaned groups of one lane."""

    def __init__(self, context: Context, lane: Lane) -> None:
        self._redis = context.redis
        self._keys = context.keys
        self._streams = context.keys.lane(lane)
        self._progress = ("", 0)
        self._search_at = 0.0
        self._suspects: set[str] = set()

    async def among(self, generating: Mapping[str, Group]) -> list[str]:
        """The groups that two searches in a row found in no stream, sorted.

        A search starts when the oldest group received no verdict for ORPHANED_AFTER_S. Streams are trimmed only below
        acked entries, so every message that a group still waits for has an entry in a stream. The exception is a
        damaged entry that became a dead letter without a group id.
        """
        oldest = min(generating, default="")
        progress = oldest, len(generating[oldest].verdicts) if oldest else 0
        if progress != self._progress:
            self._progress, self._search_at, self._suspects = progress, time.monotonic() + ORPHANED_AFTER_S, set()
        if not oldest or time.monotonic() < self._search_at:
            return []
        self._search_at = time.monotonic() + ORPHANED_AFTER_S / 3
        missing = set(generating) - await self._mentioned()
        certain, self._suspects = missing & self._suspects, missing
        return sorted(certain)

    async def _mentioned(self) -> set[str]:
        tasks = await read_all(self._redis, self._keys, self._streams.tasks, Task)
        samples = await read_all(self._redis, self._keys, self._streams.samples, Sample)
        verdicts = await read_all(self._redis, self._keys, self._streams.verdicts, Verdict)
        return {message.group for stream in (tasks, samples, verdicts) for _, message in stream}
