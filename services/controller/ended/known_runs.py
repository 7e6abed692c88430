"""Owns what the controller's loop knows of all runs: the records of the active ones, and which ended lately.

Must not act on a run.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.contracts import RunState
from services.streams.connection.client import Redis
from services.streams.runs.lists import RunLists
from services.streams.state.ended.standings import End, newest_ends, states_of
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import RunRecords

RECENT_S = 3600.0
"""How long ago a run that is among the recent ones ended."""
RECENT = 100
"""The most recent runs that are known."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EndedRuns:
    """`recent`: by id, the states of the runs that ended lately, the newest first; `states` counts all that ended."""

    recent: Mapping[str, RunState] = field(default_factory=dict)
    states: Mapping[RunState, int] = field(default_factory=dict)


class KnownRuns:
    """What a look knows costs the same beside any number of ended runs: it reads the active runs, sizes of indices, and
    the states of runs that have just ended.

    The first look brings the indices in line with all records, because an earlier release did not keep them; so does
    one that finds runs which such a release has added meanwhile.
    """

    def __init__(self, redis: Redis, records: RunRecords) -> None:
        self._redis = redis
        self._records = records
        self._lists = RunLists(redis)
        self._unlisted = -1
        self._recent: dict[End, RunState] = {}
        self.ended = EndedRuns()

    async def look(self) -> list[RunRecord]:
        """The records of the runs for which the controller has work, oldest first."""
        counts = await self._lists.states()
        # Runs that stay out of the lists, whatever they are, do not cause a repair in each look.
        if self._unlisted < 0 or (counts.unlisted and counts.unlisted != self._unlisted):
            log.debug("bringing the indices of all runs in line with their records: %d unlisted", counts.unlisted)
            await self._lists.repair()
            counts = await self._lists.states()
        self._unlisted = counts.unlisted
        states = Counter({state: number for state, number in counts.states.items() if state.ended and number})
        # Where their numbers are the same, no end was deleted or undone, and only newer ones need to be read.
        known = self._recent if states == self.ended.states else {}
        self._recent = await self._newest(known)
        self.ended = EndedRuns({end.run: state for end, state in self._recent.items()}, states)
        return await self._records.active()

    async def _newest(self, known: Mapping[End, RunState]) -> dict[End, RunState]:
        """The recent ends and the states of their runs, the newest first; `known`: those that need not be read."""
        oldest = time.time() - RECENT_S
        ends = await newest_ends(self._redis, max((end.at for end in known), default=oldest), RECENT)
        runs = {end.run for end in ends}
        ends += [end for end in known if end.run not in runs and end.at > oldest]
        new = await states_of(self._redis, [end.run for end in ends if end not in known])
        found = {end: known.get(end) or new.get(end.run) for end in ends[:RECENT]}
        return {end: state for end, state in found.items() if state and state.ended}
