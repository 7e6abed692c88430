"""Owns the search for groups of which nothing is on its way any more, because a message was damaged beyond recognition.

Must not end a group.
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
    """Watches the groups of one lane."""

    def __init__(self, context: Context, lane: Lane) -> None:
        self._redis = context.redis
        self._keys = context.keys
        self._streams = context.keys.lane(lane)
        self._stands = ("", 0)
        self._look_at = 0.0
        self._suspects: set[str] = set()

    async def among(self, generating: Mapping[str, Group]) -> list[str]:
        """Groups under way that no stream mentions, twice in a row; looked for once the oldest has not moved for long.

        The streams are trimmed below what was taken in, so whatever is still to come of a group is an entry of one.
        Only an entry that was damaged, and became a dead letter that names no group, leaves none.
        """
        oldest = min(generating, default="")
        stands = oldest, len(generating[oldest].verdicts) if oldest else 0
        if stands != self._stands:
            self._stands, self._look_at, self._suspects = stands, time.monotonic() + ORPHANED_AFTER_S, set()
        if not oldest or time.monotonic() < self._look_at:
            return []
        self._look_at = time.monotonic() + ORPHANED_AFTER_S / 3
        missing = set(generating) - await self._mentioned()
        certain, self._suspects = missing & self._suspects, missing
        return sorted(certain)

    async def _mentioned(self) -> set[str]:
        tasks = await read_all(self._redis, self._keys, self._streams.tasks, Task)
        samples = await read_all(self._redis, self._keys, self._streams.samples, Sample)
        verdicts = await read_all(self._redis, self._keys, self._streams.verdicts, Verdict)
        named = ({one.group for _, one in tasks}, {one.group for _, one in samples}, {one.group for _, one in verdicts})
        return set().union(*named)
