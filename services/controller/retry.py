"""Owns what becomes of a request to the cluster that failed: it is told, made again, and given up when it never helps.

Must not know what was asked, nor ask it; whoever owes it does.
"""

from __future__ import annotations

import logging
import time
from types import TracebackType

from services.streams.connection.client import RedisUnavailableError
from services.streams.connection.functions import FencedError
from services.streams.state.events import EventLog
from services.waits import Waits

log = logging.getLogger(__name__)

ATTEMPTS = 10
"""Failures in a row of one request until the run is given up."""
PAUSE_S = (1.0, 30.0)
"""The first pause before another attempt, and the longest: each is twice the one before. Ten attempts that fail at once
last two and a half minutes, in which Serve's controller or Ray's control store has begun anew."""
GRACE_S = 180.0
"""How far an attempt may lag behind its time: another request may keep the keeper until its deadline."""
REASON_CHARACTERS = 300


class RunFailedError(RuntimeError):
    """The run cannot go on; the text is the reason people see."""


class Attempts:
    """One kind of request to the cluster. Its body, `async with`, may fail ATTEMPTS times in a row.

    `phase`: the event that tells a failure; `what`: what could not be done, as a sentence; `wait`: the name of the wait
    for the next attempt. A time-out of the infrastructure is no fault of the run: whatever the body raises is told and
    swallowed, and `owed` says that it has to be done again as soon as it is `due`. Leaving the body raises
    RunFailedError with the reason after the last attempt; RedisUnavailableError and FencedError pass through, for they
    are the keeper's.
    """

    def __init__(self, event_log: EventLog, waits: Waits, phase: str, what: str, wait: str) -> None:
        self._event_log = event_log
        self._waits = waits
        self._phase = phase
        self._what = what
        self._wait = wait
        self._failures = 0
        self._not_before = 0.0

    @property
    def owed(self) -> bool:
        """Whether the last attempt failed."""
        return self._failures > 0

    @property
    def due(self) -> bool:
        """Whether an attempt may be made now: a failure is followed by a pause."""
        return time.monotonic() >= self._not_before

    def settle(self) -> None:
        """Nothing is owed: it was done, or is no longer needed."""
        self._failures, self._not_before = 0, 0.0
        self._waits.done(self._wait)

    async def __aenter__(self) -> None:
        self._waits.done(self._wait)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> bool:
        if error is None:
            self.settle()
        if not isinstance(error, Exception) or isinstance(error, (RedisUnavailableError, FencedError, RunFailedError)):
            return False
        await self._note(error)
        return True

    async def _note(self, error: Exception) -> None:
        self._failures += 1
        reason = f"{self._what}: {_one_line(error)}"
        log.warning("%s (%d of %d)", reason, self._failures, ATTEMPTS, exc_info=error)
        if self._failures >= ATTEMPTS:
            raise RunFailedError(f"{reason} (tried {ATTEMPTS} times in a row)") from error
        first, longest = PAUSE_S
        pause_s = min(longest, first * 2.0 ** (self._failures - 1))
        self._not_before = time.monotonic() + pause_s
        self._waits.pending(self._wait, f"another attempt, for {reason}", pause_s + GRACE_S)
        told = f"{reason}; tried again in {pause_s:g} s ({self._failures} of {ATTEMPTS} failed in a row)"
        await self._event_log.write(self._phase, told)


def _one_line(error: Exception) -> str:
    """Errors of remote processes carry pages: their first line, REASON_CHARACTERS at most."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:REASON_CHARACTERS] if lines else type(error).__name__
