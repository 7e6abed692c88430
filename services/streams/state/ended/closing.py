"""Owns how a run that has ended is closed: it expires, is archived or is deleted, in steps that may be repeated.

Must not delete files.
"""

from __future__ import annotations

import time

from services.contracts import Closing
from services.streams.connection.client import Redis
from services.streams.connection.functions import call
from services.streams.keys import DELETED_RUNS, INDEX, RunKeys
from services.streams.retention import DELETIONS_KEPT
from services.streams.state.heartbeat import surviving_processes
from services.streams.state.run_record import RecordChange, RunRecord
from services.streams.state.runs import ENDED, RunRecords, RunStateError

CLOSINGS: dict[Closing, tuple[str, ...]] = {
    Closing.DELETING: ("", *Closing),
    Closing.EXPIRING: ("", Closing.EXPIRING),
    Closing.EXPIRED: (Closing.EXPIRING, Closing.EXPIRED),
    Closing.ARCHIVING: ("", *(closing for closing in Closing if closing is not Closing.DELETING)),
    Closing.ARCHIVED: (Closing.ARCHIVING, Closing.ARCHIVED),
}
"""By closing: the closings so far of a run that may be closed so ("": none)."""
CLOSED: dict[Closing, Closing] = {
    Closing.EXPIRING: Closing.EXPIRED,
    Closing.ARCHIVING: Closing.ARCHIVED,
}
"""What follows once nothing is left to delete of a run that keeps what users read."""


async def close_run(redis: Redis, run: str, closing: Closing, *, files: bool = False) -> RunRecord:
    """Close a run that has ended, which the controller then carries out; see Closing. May be repeated.

    `files`: a deletion includes the run's files; the last request counts. Raises UnknownRunError, RunStateError.
    """
    fields = {"closing": closing.value, "closed_at": repr(time.time()), **({"delete_files": "1"} if files else {})}
    change = RecordChange(fields=fields, drop=("delete_files",), closings=CLOSINGS[closing])
    return await RunRecords(redis).change(run, ENDED, change, refusal="cancel it first")


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
        deleted_key=DELETED_RUNS,
        run=run,
        closing=Closing.DELETING.value,
        delete_files="1" if files else "",
        deletions_kept=DELETIONS_KEPT,
        **INDEX,
    )
    return bool(done)
