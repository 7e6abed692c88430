"""Owns the queue: in which order runs are placed, and for what each one waits.

Must not place a run; the controller does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.contracts import RunState
from services.streams.connection.client import Redis
from services.streams.state.heartbeat import live_by_run
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import OWNER, RunRecords

PLACEMENT = "placement"
"""The name of the wait in which a run's controller says why it has no room."""
UNSEEN = "its controller to look for room"


@dataclass(frozen=True)
class QueuedRun:
    """A queued run: its place, from 1 on, and what it waits for."""

    record: RunRecord
    position: int
    waits_for: str


def rank(record: RunRecord) -> tuple[int, float, str]:
    """The place of a run among queued ones: the highest priority first, then the oldest."""
    return -record.priority, record.created_at, record.id


def queued(records: Iterable[RunRecord]) -> list[RunRecord]:
    """The queued ones of these runs, in the order in which they are placed."""
    return sorted((record for record in records if record.state is RunState.QUEUED), key=rank)


async def read_queue(redis: Redis) -> list[QueuedRun]:
    """All queued runs, in the order in which they are placed."""
    records = queued(await RunRecords(redis).active())
    live = await live_by_run(redis, [record.id for record in records])
    waits = {
        process.run: wait.waits_for
        for processes in live.values()
        for process in processes
        if process.service == OWNER
        for wait in process.waits
        if wait.name == PLACEMENT
    }
    return [
        QueuedRun(record, number, record.problem or waits.get(record.id, UNSEEN))
        for number, record in enumerate(records, 1)
    ]
