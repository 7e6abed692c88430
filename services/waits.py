"""Owns what this process waits for: named waits, each with a beginning and a deadline.

Must not end a wait, nor write about one; whoever waits does the one, heartbeat the other.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from services.contracts import Wait

SHOWN_AFTER_S = 1.0
"""A wait shorter than this is not worth announcing."""
LONG_AFTER_S = 45.0
"""After so long a wait that is not idle is told, so that what cannot make progress says so within a minute."""


@dataclass
class _Open:
    wait: Wait
    holders: int = 0
    told_long: bool = False
    told_stalled: bool = False


class Waits:
    """The waits of one process; safe to use from several threads.

    A wait's name is a fixed word, for it labels a metric; what exactly is waited for goes into its text.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}

    def pending(self, name: str, waits_for: str, deadline_s: float, idle: bool = False) -> None:
        """Begin a wait of at most `deadline_s` seconds; one of that name that is open keeps its beginning.

        `idle`: it is for work, and that it lasts is no fault. Raises ValueError for a deadline that never comes.
        """
        with self._lock:
            self._begin(name, waits_for, deadline_s, idle)

    def done(self, name: str) -> None:
        """End a wait, if there is one of that name."""
        with self._lock:
            self._open.pop(name, None)

    @contextmanager
    def on(self, name: str, waits_for: str, deadline_s: float, idle: bool = False) -> Iterator[None]:
        """Wait while the body runs. Where several bodies wait under one name, it lasts until the last one ends."""
        with self._lock:
            held = self._begin(name, waits_for, deadline_s, idle)
            held.holders += 1
        try:
            yield
        finally:
            with self._lock:
                held.holders -= 1
                if held.holders == 0 and self._open.get(name) is held:
                    del self._open[name]

    def current(self, now: float) -> tuple[Wait, ...]:
        """The waits that have lasted SHOWN_AFTER_S seconds at `now` (Unix seconds), oldest first."""
        with self._lock:
            waits = [one.wait for one in self._open.values()]
        return tuple(sorted((one for one in waits if now - one.since >= SHOWN_AFTER_S), key=lambda one: one.since))

    def newly_stalled(self, now: float) -> list[Wait]:
        """The waits that passed their deadline since the last call; each is reported once."""
        with self._lock:
            found = [one for one in self._open.values() if one.wait.stalled(now) and not one.told_stalled]
            for one in found:
                one.told_stalled = True
            return [one.wait for one in found]

    def newly_long(self, now: float) -> list[Wait]:
        """The waits that have lasted more than LONG_AFTER_S seconds and were not reported yet, here or as stalled."""
        with self._lock:
            found = [
                one
                for one in self._open.values()
                if not (one.wait.idle or one.told_long or one.told_stalled) and now - one.wait.since > LONG_AFTER_S
            ]
            for one in found:
                one.told_long = True
            return [one.wait for one in found]

    def _begin(self, name: str, waits_for: str, deadline_s: float, idle: bool) -> _Open:
        if not 0 < deadline_s < math.inf:
            raise ValueError(f"deadline_s = {deadline_s}: not accepted for wait {name!r}; a finite number above 0 is")
        held = self._open.get(name)
        since = held.wait.since if held else self._clock()
        wait = Wait(name=name, waits_for=waits_for, since=since, deadline_s=deadline_s, idle=idle)
        if held is None:
            held = self._open[name] = _Open(wait)
        held.wait = wait
        return held


def describe_wait(process: str, wait: Wait, now: float) -> str:
    """A process's wait in one line."""
    return (
        f"{process}: waits for {wait.waits_for} ({wait.name}) for {max(0.0, now - wait.since):.0f} s "
        f"of at most {wait.deadline_s:g} s"
    )
