"""Owns the virtual clock: events at times, each of which happens once, in the order of their times.

Must not know what happens.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class Clock:
    """Seconds since the start. Events of the same time happen in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        """Let `action(*arguments)` happen at `time`, which is not in the past."""
        heapq.heappush(self._events, (time, next(self._order), action, arguments))

    def tick(self) -> None:
        """Go on to the next event. Raises IndexError if nothing will happen any more."""
        self.now, _, action, arguments = heapq.heappop(self._events)
        action(*arguments)
