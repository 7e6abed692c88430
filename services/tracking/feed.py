"""Owns reading a run's log after a cursor, one page at a time, in order of time.

Must not write to Redis, except that an invalid entry becomes a dead letter.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from services.contracts import EvaluationRecord, Event, RunState, StepRecord
from services.streams.connection.client import Redis
from services.streams.delivery.consumer import tail_messages
from services.streams.keys import RunKeys
from services.streams.state.events import entry_order
from services.streams.state.policy_history import read_policy
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import RunRecords
from services.tracking.rows import Logged, RunEnding, TrackCursor, TrackedRow, rewind_row, rows_after

PAGE = 100
"""Entries of each stream that are read at once."""

M = TypeVar("M", StepRecord, EvaluationRecord, Event)

Order = tuple[int, ...]


@dataclass(frozen=True)
class FeedPage:
    """The next rows of a run's log, and its record; `ending` is None while it has not ended."""

    rows: list[TrackedRow]
    record: RunRecord
    ending: RunEnding | None


class RunLog:
    """One run's log, as trackers get it."""

    def __init__(self, redis: Redis, keys: RunKeys) -> None:
        self._redis = redis
        self._keys = keys

    async def page(self, cursor: TrackCursor) -> FeedPage:
        """What follows `cursor`; no rows at the end of the log. Raises UnknownRunError."""
        record = await RunRecords(self._redis).get(self._keys.run)
        policy = await read_policy(self._redis, self._keys)
        rows: list[TrackedRow] = []
        while not rows and (logged := await self._logged(cursor, record)):
            rows, cursor = rows_after(cursor, logged, policy)
        # The log names the step to which a run was rewound only when the next one is trained.
        if not rows and policy and not policy.rewinding and policy.step < cursor.step:
            rows = [rewind_row(policy.step, time.time(), cursor)]
        return FeedPage(rows, record, _ending(record))

    async def _logged(self, cursor: TrackCursor, record: RunRecord) -> list[tuple[str, Logged]]:
        found: list[tuple[Order, str, Logged]] = []
        read: list[Order] = []
        for entries in (
            await self._tail(self._keys.steps, StepRecord, cursor.steps),
            await self._tail(self._keys.evaluations, EvaluationRecord, cursor.evaluations),
            await self._tail(self._keys.events, Event, cursor.events),
        ):
            found += [(entry_order(entry), entry, message) for entry, message in entries]
            if len(entries) == PAGE:
                read.append(entry_order(entries[-1][0]))
        for change in record.history[cursor.states :]:
            found.append(((int(change.at * 1000), -1), "", change))
        # What comes after the end of a full page waits, or it would overtake what that page does not have yet.
        until = min(read, default=None)
        kept = [item for item in found if until is None or item[0] <= until]
        kept.sort(key=lambda item: item[0])
        return [(entry, message) for _, entry, message in kept]

    async def _tail(self, stream: str, model: type[M], after: str) -> Sequence[tuple[str, M]]:
        return await tail_messages(self._redis, self._keys, stream, model, after, PAGE)


def _ending(record: RunRecord) -> RunEnding | None:
    """How the run ended. The controller stops its services after it has written the summary, and before the state."""
    export = record.export_path or ""
    if record.state.ended:
        return RunEnding(record.state, record.reason, export)
    if record.summary and "state" in record.summary:
        return RunEnding(RunState(record.summary["state"]), str(record.summary.get("reason", "")), export)
    return None
