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
from services.storage.errors import StoreError
from services.storage.removal import delete_run_files
from services.streams.connection.client import Redis
from services.streams.keys import RunKeys
from services.streams.state.ended.cleanup import erase
from services.streams.state.ended.closing import check_left, close_run, delete_record
from services.streams.state.events import EventLog
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import OWNER, RunRecords, RunStateError, UnknownRunError

log = logging.getLogger(__name__)

PAUSE_S = (1.0, 60.0)
"""The first pause before a retry, and the longest: each is twice the previous one."""


class Closings:
    """Closes runs, one at a time, because each scans all keys. `runs` is the folder of the runs' folders.

    Every step may be repeated: what one controller has begun, the next one ends.
    """

    def __init__(self, redis: Redis, runs: Path) -> None:
        self._redis = redis
        self._runs = runs
        self._turn = asyncio.Lock()

    async def close(self, run: str, stopping: asyncio.Event) -> None:
        """Close the run; a failure is reported and retried until it succeeds, or `stopping`.

        A user asked for it, or it is needed for memory: there is no other state in which to leave the run.
        """
        pause_s, longest_s = PAUSE_S
        while not stopping.is_set():
            try:
                async with self._turn:
                    await self._close(run)
                return
            except (StoreError, RunStateError, OSError) as error:
                text = f"{error}; retry in {pause_s:g} s"
                await EventLog(self._redis, RunKeys(run), OWNER).write("closing-failed", text)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await stopping.wait()
            pause_s = min(longest_s, 2 * pause_s)

    async def _close(self, run: str) -> None:
        try:
            record = await RunRecords(self._redis).get(run)
        except UnknownRunError:
            return  # another controller has deleted it
        await check_left(self._redis, run)
        if record.closing is Closing.DELETING:
            await self._delete(record)
        elif record.closing is Closing.EXPIRING:
            await self._expire(record)

    async def _delete(self, record: RunRecord) -> None:
        # Redis first, because its memory is short before the store's is. The event of a failure is deleted next time.
        if not await erase(self._redis, RunKeys(record.id), Closing.DELETING):
            return
        if record.delete_files:
            await asyncio.to_thread(delete_run_files, self._runs, record.id)
        if await delete_record(self._redis, record.id):
            log.info("run %s is deleted%s", record.id, ", and its files" if record.delete_files else "")

    async def _expire(self, record: RunRecord) -> None:
        keys = RunKeys(record.id)
        if await erase(self._redis, keys, Closing.EXPIRING):
            at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(record.history[-1].at))
            text = f"{record.state.value} at {at}: its groups are deleted, and it can no longer be resumed"
            await EventLog(self._redis, keys, OWNER).write("expired", text)
            await close_run(self._redis, record.id, Closing.EXPIRED)
