"""Owns the closing of many ended runs with one request: which they are, and what became of each.

Must not delete anything; the controller does.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from services.contracts import Closing, RunState
from services.streams.connection.client import Redis
from services.streams.state.ended.closing import check_left, close_run
from services.streams.state.ended.standings import ended_before, unclosed_before
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import RecordReader, RunStateError, UnknownRunError

CLOSED_AT_ONCE = 200
"""The most runs of one request."""
CLOSED_WITHIN_S = 2.0
"""How long a request closes runs, on a busy server; within the deadline of a request's work in Redis."""
READ_AT_ONCE = 200


@dataclass(frozen=True)
class RunSelection:
    """Which ended runs: those whose end was `older_than` seconds ago or earlier, in one of `states`, and `admitted`."""

    older_than: float
    states: frozenset[RunState]
    admitted: Callable[[RunRecord], bool]


@dataclass
class ClosedRuns:
    """`runs`: those that were closed, or would be; `refused`: why not, by id; `more`: there are others."""

    runs: list[RunRecord] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    more: bool = False


async def close_runs(
    redis: Redis, closing: Closing, wanted: RunSelection, *, files: bool = False, dry_run: bool = False
) -> ClosedRuns:
    """Close up to CLOSED_AT_ONCE runs, for about CLOSED_WITHIN_S, the oldest ends first; with `dry_run` only find them.

    At least one is closed if there is one, so that the repeated request comes to an end.
    """
    done, until = ClosedRuns(), time.monotonic() + CLOSED_WITHIN_S
    async for record in _chosen(redis, closing, wanted):
        tried = len(done.runs) + len(done.refused)
        if tried == CLOSED_AT_ONCE or (done.runs and not dry_run and time.monotonic() > until):
            done.more = True
            break
        if dry_run:
            done.runs.append(record)
            continue
        try:
            if closing is Closing.DELETING:
                await check_left(redis, record.id)
            done.runs.append(await close_run(redis, record.id, closing, files=files))
        except UnknownRunError:
            continue  # it was deleted meanwhile
        except RunStateError as error:
            done.refused[record.id] = str(error)
    return done


async def _chosen(redis: Redis, closing: Closing, wanted: RunSelection) -> AsyncIterator[RunRecord]:
    """The runs, in the order of their ends. What is closed on the way may leave the index, so it is read first."""
    seconds, microseconds = await redis.time()
    before = seconds + microseconds / 1e6 - wanted.older_than
    ends_before = ended_before if closing is Closing.DELETING else unclosed_before
    ends = [end.run for end in await ends_before(redis, before, 0, -1)]
    for start in range(0, len(ends), READ_AT_ONCE):
        for record in (await RecordReader(redis).shown_together(ends[start : start + READ_AT_ONCE])).values():
            meets = record.state.ended and (not wanted.states or record.state in wanted.states)
            if meets and record.closing is not Closing.DELETING and wanted.admitted(record):
                yield record
