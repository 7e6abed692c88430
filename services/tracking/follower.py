"""Owns one sink's copy of a run's log: it opens the sink, gives it what follows, and opens it again after a failure.

Must not let a failure of the sink leave this module, except as an event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from services.metrics import TRACKED_ROWS, TRACKING_FAILURES
from services.process.hosting import Context
from services.tracking.feed import RunLog
from services.tracking.rows import RunEnding, TrackCursor, TrackedFacts, TrackedRow, rewind_row
from services.tracking.sink import Sink, SinkError, SinkThread

log = logging.getLogger(__name__)

R = TypeVar("R")

POLL_S = 2.0
"""How often the log is read."""
OPEN_S, LOG_S, CLOSE_S = 120.0, 60.0, 10.0
"""Deadlines of a sink's calls. A library is imported, and a store created, when a sink is opened."""
ATTEMPTS = 100
"""Failures in a row after which a sink is left alone."""
PAUSE_S = (1.0, 300.0)
"""The first pause before a sink is opened again, and the longest: each is twice the previous one. 100 attempts take
eight hours, enough for a server to be mended."""
REPORTS = 20
"""Different failures of one sink that become events."""


class SinkFollower:
    """Copies the log to one sink. `check`: raises FencedError once another tracker of the run has started."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Sink],
        context: Context,
        facts: TrackedFacts,
        check: Callable[[], Awaitable[None]],
    ) -> None:
        self.name = name
        self._make = make
        self._context = context
        self._facts = facts
        self._check = check
        self._log = RunLog(context.redis, context.keys)
        self._thread = SinkThread(name)
        self._failures = 0
        self._reported: set[str] = set()

    @property
    def hangs(self) -> bool:
        """Whether a call of the sink has not returned."""
        return self._thread.busy

    async def run(self) -> None:
        """Copy until the run has ended, this process stops, or the sink has failed too often.

        Raises FencedError, RedisUnavailableError, UnknownRunError.
        """
        while True:
            try:
                await self._follow()
                return
            except SinkError as error:
                self._failures += 1
                TRACKING_FAILURES.labels(self._facts.run, self.name).inc()
                last = self._context.stopping.is_set() or error.lasting or self._failures >= ATTEMPTS
                await self._report(str(error), last)
                if last:
                    return
            await self._pause()

    async def _follow(self) -> None:
        sink = self._make()
        try:
            cursor = await self._opened(sink)
            ending = await self._copy(sink, cursor)
        except SinkError:
            await self._abandon(sink)
            raise
        await self._call("close", sink.close, ending, deadline_s=CLOSE_S)

    async def _opened(self, sink: Sink) -> TrackCursor:
        """Open the sink; the cursor after what it holds. What it holds of an earlier run with this id is rewound."""
        held = await self._call("open", sink.open, self._facts, deadline_s=OPEN_S)
        cursor = held or TrackCursor(created_at=self._facts.created_at)
        if cursor.created_at != self._facts.created_at:
            empty = TrackCursor(created_at=self._facts.created_at, rewinds=cursor.rewinds)
            cursor = await self._give(sink, [rewind_row(0, self._facts.created_at, empty)])
        text = f"{self.name}: continues after rollout step {cursor.step}" if held else f"{self.name}: starts"
        await self._context.event_log.write("tracking-started", text)
        return cursor

    async def _copy(self, sink: Sink, cursor: TrackCursor) -> RunEnding | None:
        """Copy to the end of the log, and wait for more until the run ends or this process stops."""
        stopping = self._context.stopping
        while True:
            last = stopping.is_set()
            page = await self._log.page(cursor)
            if page.rows:
                await self._check()
                cursor = await self._give(sink, page.rows)
                continue
            if last or page.record.state.ended:
                return page.ending
            await self._until_stopping(POLL_S)

    async def _give(self, sink: Sink, rows: Sequence[TrackedRow]) -> TrackCursor:
        await self._call("log", sink.log, rows, deadline_s=LOG_S)
        self._failures = 0
        for row in rows:
            TRACKED_ROWS.labels(self._facts.run, self.name, row.kind.value).inc()
        return rows[-1].cursor

    async def _abandon(self, sink: Sink) -> None:
        """Release what a failed sink holds, if it can; a thread that hangs is left alone."""
        try:
            await self._call("close", sink.close, None, deadline_s=CLOSE_S)
        except SinkError as error:
            log.warning("%s: %s, after a failure", self.name, error)

    async def _call(self, what: str, function: Callable[..., R], *arguments: object, deadline_s: float) -> R:
        # The call's own deadline is reported; the wait's would be a second report of the same.
        with self._context.waits.on(f"sink-{self.name}", f"the sink's {what} to return", deadline_s + POLL_S):
            return await self._thread.call(what, function, *arguments, deadline_s=deadline_s)

    async def _report(self, text: str, last: bool) -> None:
        """Write an event, for each text once; the log has every failure."""
        log.warning("%s: %s (%d in a row)", self.name, text, self._failures)
        if last:
            text += "; not tried again until the tracker restarts"
        else:
            text += "; the run continues, and its rows are written when the sink works again"
        if text not in self._reported and len(self._reported) < REPORTS:
            self._reported.add(text)
            await self._context.event_log.write("tracking-failed", f"{self.name}: {text}")

    async def _pause(self) -> None:
        first, longest = PAUSE_S
        pause_s = min(longest, first * 2.0 ** min(self._failures - 1, 20))
        with self._context.waits.on(f"sink-{self.name}", "the sink to be opened again", pause_s + POLL_S, idle=True):
            await self._until_stopping(pause_s)

    async def _until_stopping(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._context.stopping.wait()
        except TimeoutError:
            return
