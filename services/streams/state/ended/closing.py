"""Owns how a run that has ended is closed: it expires or is deleted, in steps that may be cut off and repeated.

Must not delete files.
"""

from __future__ import annotations

import time

from services.contracts import Closing, RunState
from services.streams.connection.client import Redis
from services.streams.connection.functions import call
from services.streams.keys import ACTIVE_RUNS, DELETED_RUNS, RUNS, RunKeys
from services.streams.retention import DELETIONS_KEPT
from services.streams.state.heartbeat import surviving_processes
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import RESUMABLE, RecordChange, RunRecords, RunStateError

ENDED = frozenset(state for state in RunState if state.ended)
CLOSINGS: dict[Closing, tuple[frozenset[RunState], tuple[str, ...]]] = {
    Closing.DELETING: (ENDED, ("", *Closing)),
    Closing.EXPIRING: (RESUMABLE, ("", Closing.EXPIRING)),
    Closing.EXPIRED: (RESUMABLE, (Closing.EXPIRING, Closing.EXPIRED)),
}
"""By closing: the states of a run that may be closed so, and its closings so far ("": none)."""


async def close_run(redis: Redis, run: str, closing: Closing, *, files: bool = False) -> RunRecord:
    """Close a run that has ended, which the controller then carries out; see Closing. May be repeated.

    `files`: a deletion includes the run's files; the last request counts. Raises UnknownRunError, RunStateError.
    """
    states, before = CLOSINGS[closing]
    fields = {"closing": closing.value, "closed_at": repr(time.time()), **({"delete_files": "1"} if files else {})}
    change = RecordChange(fields=fields, drop=("delete_files",), closings=before)
    return await RunRecords(redis).change(run, states, change, refusal="cancel it first")


async def check_left(redis: Redis, run: str) -> None:
    """Raises RunStateError while processes of the run are alive: they would write what was deleted again."""
    if live := [process.id for process in await surviving_processes(redis, run)]:
        raise RunStateError(f"run {run!r} still has live processes ({', '.join(live)}); retry when they have ended")


async def delete_record(redis: Redis, run: str, *, files: bool) -> bool:
    """Delete the record of a run that is being deleted, as the last of its keys; whether none is left.

    Not if its deletion meanwhile includes its files, or no longer does: `files` says what has been done.
    """
    done = await call(
        redis,
        "delete_record",
        record_key=RunKeys(run).record,
        runs_key=RUNS,
        active_key=ACTIVE_RUNS,
        deleted_key=DELETED_RUNS,
        run=run,
        closing=Closing.DELETING.value,
        delete_files="1" if files else "",
        deletions_kept=DELETIONS_KEPT,
    )
    return bool(done)
