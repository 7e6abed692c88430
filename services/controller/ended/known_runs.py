"""Owns what the controller's loop knows of all runs: the records of the active ones, and how the others ended.

Must not act on a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from services.contracts import RunState
from services.streams.connection.client import Redis
from services.streams.state.ended.standings import Standing, count_runs, standing_runs
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import RunRecords


@dataclass(frozen=True)
class EndedRuns:
    """How each run ended, by id, the newest end first; `states` counts them."""

    runs: Mapping[str, Standing]
    states: Mapping[RunState, int]

    @classmethod
    def of(cls, standings: Mapping[str, Standing]) -> EndedRuns:
        """Those of `standings` that have ended."""
        ended = [(run, standing) for run, standing in standings.items() if standing.state.ended]
        ended.sort(key=lambda item: item[1].since, reverse=True)
        return cls(dict(ended), Counter(standing.state for _, standing in ended))


class KnownRuns:
    """Every run of this Redis. A look reads the active runs, and of the others only what has changed.

    The first look, and one that finds another number of runs, reads them all and repairs the index of active runs: an
    earlier release did not keep it, and its runs must be found after an upgrade.
    """

    def __init__(self, redis: Redis, records: RunRecords) -> None:
        self._redis = redis
        self._records = records
        self._active: frozenset[str] = frozenset()
        self._count = -1
        self.ended = EndedRuns.of({})

    async def look(self) -> list[RunRecord]:
        """The records of the runs for which the controller has work, oldest first."""
        count = await count_runs(self._redis)
        records = await self._records.active()
        active = frozenset(record.id for record in records)
        if count != self._count:
            await self._audit(active)
        elif active != self._active:
            known = {**self.ended.runs, **await standing_runs(self._redis, self._active - active)}
            self.ended = EndedRuns.of({run: standing for run, standing in known.items() if run not in active})
        self._count, self._active = count, active
        return records

    async def _audit(self, active: frozenset[str]) -> None:
        """Read how all runs stand, and list those as active that should be."""
        standings = await standing_runs(self._redis)
        for run, standing in standings.items():
            if standing.active and run not in active:
                await self._records.index(run)
        self.ended = EndedRuns.of({run: standing for run, standing in standings.items() if run not in active})
