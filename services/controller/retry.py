"""Owns retries of requests to the cluster: a failure is reported and retried after a pause, a limited number of times.

Must not know what was requested, nor repeat the request itself; its caller does.
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
"""Failures in a row of one request after which the run fails."""
PAUSE_S = (1.0, 30.0)
"""The first pause before a retry, and the longest: each is twice the previous one. Ten attempts that fail at once take
two and a half minutes, enough for Serve's controller or Ray's control store to restart."""
GRACE_S = 180.0
"""How late a retry may be: another request may keep the run's controller busy until that request's deadline."""
REASON_CHARACTERS = 300


class RunFailedError(RuntimeError):
    """The run cannot continue; the text is the reason that users see."""


class RetriedRequest:
    """One kind of request to the cluster. Its body, `async with`, may fail ATTEMPTS times in a row.

    `phase`: the event that reports a failure; `failure`: what failed, as a sentence; `wait`: the name of the wait for
    the next attempt. A time-out of the infrastructure is no fault of the run: an error of the body is reported and
    suppressed, and `retry_pending` reports that the request has to be repeated as soon as it is `due`. Leaving the body
    raises RunFailedError with the reason after the last attempt; RedisUnavailableError and FencedError pass through,
    because they end the run's controller, not the run.
    """

    def __init__(self, event_log: EventLog, waits: Waits, *, phase: str, failure: str, wait: str) -> None:
        self._event_log = event_log
        self._waits = waits
        self._phase = phase
        self._failure = failure
        self._wait = wait
        self._failures = 0
        self._not_before = 0.0

    @property
    def retry_pending(self) -> bool:
        """Whether the last attempt failed."""
        return self._failures > 0

    @property
    def due(self) -> bool:
        """Whether an attempt may be made now: a failure is followed by a pause."""
        return time.monotonic() >= self._not_before

    def reset(self) -> None:
        """Forget failures: the request succeeded, or is no longer needed."""
        self._failures, self._not_before = 0, 0.0
        self._waits.done(self._wait)

    async def __aenter__(self) -> None:
        self._waits.done(self._wait)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> bool:
        if error is None:
            self.reset()
        if not isinstance(error, Exception) or isinstance(error, (RedisUnavailableError, FencedError, RunFailedError)):
            return False
        await self._report(error)
        return True

    async def _report(self, error: Exception) -> None:
        self._failures += 1
        reason = f"{self._failure}: {_one_line(error)}"
        log.warning("%s (%d of %d)", reason, self._failures, ATTEMPTS, exc_info=error)
        if self._failures >= ATTEMPTS:
            raise RunFailedError(f"{reason} (failed {ATTEMPTS} times in a row)") from error
        first, longest = PAUSE_S
        pause_s = min(longest, first * 2.0 ** (self._failures - 1))
        self._not_before = time.monotonic() + pause_s
        self._waits.pending(self._wait, f"a retry; {reason}", pause_s + GRACE_S)
        text = f"{reason}; retry in {pause_s:g} s ({self._failures} of {ATTEMPTS} failures in a row)"
        await self._event_log.write(self._phase, text)


def _one_line(error: Exception) -> str:
    """The first line, at most REASON_CHARACTERS: errors of remote processes are pages long."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:REASON_CHARACTERS] if lines else type(error).__name__
