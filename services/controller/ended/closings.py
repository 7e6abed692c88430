"""Owns the closing of runs that have ended: deletes what a deleted or expired run leaves, until nothing is left.

Must not decide that a run is closed; users and `expiry` do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from pathlib import Path

from services.contracts import Closing
from services.storage.mirror import places_here
from services.storage.removal import delete_run_files
from services.streams.connection.client import Redis
from services.streams.keys import RunKeys
from services.streams.runs.ledger import close_ledger
from services.streams.state.ended.cleanup import erase
from services.streams.state.ended.closing import CLOSED, check_left, close_run, delete_record
from services.streams.state.events import EventLog
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import OWNER, RunRecords, RunStateError, UnknownRunError

log = logging.getLogger(__name__)

PAUSE_S = (1.0, 60.0)
"""The first pause before a retry, and the longest: each is twice the previous one."""


class Closings:
    """Closes runs, one at a time, because each closing scans all keys. `runs` is the folder of the runs' folders.

    Every step may be repeated: what one controller has begun, the next one ends.
    """

    def __init__(self, redis: Redis, runs: Path) -> None:
        self._redis = redis
        self._records = RunRecords(redis)
        self._runs = runs
        self._turn = asyncio.Lock()

    async def close(self, run: str, stopping: asyncio.Event) -> None:
        """Close the run; a failure is reported and retried until it succeeds, or `stopping`.

        Retried without end: a run that is half deleted cannot be left so.
        """
        pause_s, longest_s = PAUSE_S
        while not stopping.is_set():
            try:
                await check_left(self._redis, run)  # outside of the turn, because it may look twice
                async with self._turn:
                    if not stopping.is_set():
                        await self._close(run)
                return
            except UnknownRunError:
                return  # another controller has deleted it
            except Exception as error:  # noqa: BLE001 - whatever it is, the next attempt must wait
                await self._report(run, f"{str(error) or type(error).__name__}; retry in {pause_s:g} s")
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await stopping.wait()
            pause_s = min(longest_s, 2 * pause_s)

    async def _report(self, run: str, text: str) -> None:
        log.warning("run %s is not closed yet: %s", run, text)
        try:
            await EventLog(self._redis, RunKeys(run), OWNER).write("closing-failed", text)
        except Exception as error:  # noqa: BLE001 - Redis may be what failed; the log has the text
            log.warning("run %s: the event of it could not be written: %s", run, error)

    async def _close(self, run: str) -> None:
        record = await self._records.get(run)
        if record.closing is Closing.DELETING:
            await self._delete(record)
        elif record.closing in CLOSED:
            await self._empty(record, record.closing)

    async def _delete(self, record: RunRecord) -> None:
        await self._check_place(record)
        await close_ledger(self._redis, record, Closing.DELETING)
        # Redis first, because its memory is short before the store's is. The event of a failure is deleted next time.
        if not await erase(self._redis, RunKeys(record.id), Closing.DELETING):
            return
        record = await self._records.get(record.id)  # the files may have been asked for meanwhile
        await self._check_place(record)
        if record.delete_files:
            await asyncio.to_thread(delete_run_files, self._runs, record.id)
        if await delete_record(self._redis, record.id, files=record.delete_files):
            log.info("run %s is deleted%s", record.id, ", and its files" if record.delete_files else "")

    async def _check_place(self, record: RunRecord) -> None:
        """Raises RunStateError for a run whose files are to be deleted, and are with another platform."""
        if record.delete_files and record.place:
            here = await asyncio.to_thread(places_here, self._runs)
            if record.place not in here:
                own = ", ".join(sorted(here))
                raise RunStateError(
                    f"its files are in {record.place}, and those of this controller's runs in {own}; a controller of "
                    f"that place deletes them, and `penstock delete {record.id}` without --files deletes the rest"
                )

    async def _empty(self, record: RunRecord, closing: Closing) -> None:
        keys, closed = RunKeys(record.id), CLOSED[closing]
        await close_ledger(self._redis, record, closing)
        if await erase(self._redis, keys, closing):
            ended = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(record.history[-1].at))
            text = f"{record.state.value} at {ended}: its groups are deleted, and it can no longer be resumed"
            # With one time, the event is the same if this is cut off here and repeated.
            await EventLog(self._redis, keys, OWNER).write(closed.value, text, at=record.closed_at)
            await close_run(self._redis, record.id, closed)
