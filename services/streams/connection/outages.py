"""Owns the metric of Redis' outages, as this process's clients see them.

Must not end an outage or wait for its end; `client` does.
"""

from __future__ import annotations

import threading
import time
import weakref

from services.metrics import REDIS_OUTAGE

STALE_S = 120.0
"""A client that has not tried for so long is no longer in use; a command gives its last attempt after 60 s at most."""

_lock = threading.Lock()


class Outage:
    """The present outage of one client's server, if any. The metric shows the longest of all clients in use."""

    def __init__(self) -> None:
        self.since: float | None = None
        self._failed_at = float("-inf")
        with _lock:
            _outages.add(self)

    def failed(self) -> None:
        """An attempt failed now."""
        self._failed_at = time.monotonic()
        self.since = self._failed_at if self.since is None else self.since

    def over(self) -> float:
        """The server has answered. How long the outage took, in seconds."""
        since, self.since = self.since, None
        return 0.0 if since is None else time.monotonic() - since

    def seconds(self, now: float) -> float:
        """How long it has lasted at `now` (monotonic seconds); 0 without one, and for a client that is not in use."""
        since = self.since
        return 0.0 if since is None or now - self._failed_at > STALE_S else now - since


_outages: weakref.WeakSet[Outage] = weakref.WeakSet()


def longest_outage_s() -> float:
    """The longest present outage of all clients of this process, in seconds."""
    now = time.monotonic()
    with _lock:
        return max((outage.seconds(now) for outage in _outages), default=0.0)


# Read at each scrape, by the thread that serves the metrics: it grows while nothing else happens.
REDIS_OUTAGE.set_function(longest_outage_s)
