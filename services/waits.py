"""Owns waiting: the waits of this process, each with a name, a start and a deadline; and the end of tasks that wait.

Must not end a wait, which its caller does, nor report one, which the heartbeat does, nor hide an error of a task.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from services.contracts import Wait

log = logging.getLogger(__name__)

REDIS_MEMORY = "redis-memory"
"""The name of a wait for memory in Redis; in a replica: for room for a finished response."""
SHOWN_AFTER_S = 1.0
"""A shorter wait is not published."""
LONG_AFTER_S = 45.0
"""A wait that is not idle is reported after this time, so that a lack of progress is visible within a minute."""
CANCELLED_S = 30.0
"""How long cancelled tasks may take to end."""


_OFFSET_S = time.time() - time.monotonic()


def steady_time() -> float:
    """Unix seconds by the host's clock as it ran when this process started: a later jump of that clock is no wait."""
    return _OFFSET_S + time.monotonic()


@dataclass
class _Open:
    wait: Wait
    holders: int = 0
    reported: str = ""


class Waits:
    """The waits of one process; safe to use from several threads.

    A wait's name is a fixed word, because it labels a metric; its text says what exactly is waited for.
    """

    def __init__(self, clock: Callable[[], float] = steady_time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}
        self._idle_s = 0.0
        self._idle_since: float | None = None

    def pending(self, name: str, waits_for: str, deadline_s: float, idle: bool = False) -> None:
        """Start a wait of at most `deadline_s` seconds; an open one of that name keeps its start.

        `idle`: a wait for work, whose length is no fault. Raises ValueError for a deadline that is not finite.
        """
        with self._lock:
            self._start(name, waits_for, deadline_s, idle)
            self._note_idle()

    def done(self, name: str) -> None:
        """End the wait of that name, if there is one."""
        with self._lock:
            self._open.pop(name, None)
            self._note_idle()

    @contextmanager
    def on(self, name: str, waits_for: str, deadline_s: float, idle: bool = False) -> Iterator[None]:
        """Wait while the body runs. Of several bodies under one name the last one ends the wait."""
        with self._lock:
            held = self._start(name, waits_for, deadline_s, idle)
            held.holders += 1
            self._note_idle()
        try:
            yield
        finally:
            with self._lock:
                held.holders -= 1
                if held.holders == 0 and self._open.get(name) is held:
                    del self._open[name]
                    self._note_idle()

    def is_open(self, name: str) -> bool:
        """Whether there is a wait of that name."""
        with self._lock:
            return name in self._open

    def current(self, now: float) -> tuple[Wait, ...]:
        """The waits that have lasted SHOWN_AFTER_S seconds at `now` (`steady_time`), oldest first."""
        with self._lock:
            waits = [held.wait for held in self._open.values()]
        shown = (wait for wait in waits if now - wait.since >= SHOWN_AFTER_S)
        return tuple(sorted(shown, key=lambda wait: wait.since))

    def idle_s(self, now: float) -> float:
        """For how long this process had nothing to do until `now`: all its waits, at least one, were for work."""
        with self._lock:
            return self._idle_s + (0.0 if self._idle_since is None else max(0.0, now - self._idle_since))

    def news(self, now: float) -> list[tuple[str, Wait]]:
        """The waits that passed their deadline ("stalled") or became long ("waiting") since the last call."""
        found = []
        with self._lock:
            for held in self._open.values():
                long = now - held.wait.since > LONG_AFTER_S and not held.wait.idle
                word = "stalled" if held.wait.stalled(now) else "waiting" if long else ""
                if word and held.reported not in (word, "stalled"):
                    held.reported = word
                    found.append((word, held.wait))
        return found

    def _start(self, name: str, waits_for: str, deadline_s: float, idle: bool) -> _Open:
        if not 0 < deadline_s < math.inf:
            raise ValueError(f"deadline_s: {deadline_s} is not valid: expected a finite number above 0 (wait {name!r})")
        held = self._open.get(name)
        since = held.wait.since if held else self._clock()
        wait = Wait(name=name, waits_for=waits_for, since=since, deadline_s=deadline_s, idle=idle)
        if held is None:
            held = self._open[name] = _Open(wait)
        held.wait = wait
        return held

    def _note_idle(self) -> None:
        idle = bool(self._open) and all(held.wait.idle for held in self._open.values())
        if idle == (self._idle_since is not None):
            return
        now = self._clock()
        self._idle_s += 0.0 if self._idle_since is None else now - self._idle_since
        self._idle_since = now if idle else None


def describe_wait(process: str, wait: Wait, now: float) -> str:
    """A process's wait in one line."""
    return (
        f"{process}: waits for {wait.waits_for} ({wait.name}) for {max(0.0, now - wait.since):.0f} s "
        f"of at most {wait.deadline_s:g} s"
    )


def cancellation_requested() -> bool:
    """Whether this task was cancelled, even if the CancelledError was lost.

    For loops inside a TaskGroup, which cancels its tasks only once and would wait for one that never ends.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks until all have ended; errors other than the cancellation are logged.

    One cancellation is not enough: up to Python 3.11 `asyncio.wait_for`, through which redis-py sends commands, loses a
    cancellation that arrives when its wait has finished. Raises TimeoutError after 30 s, naming the remaining tasks.
    """
    pending = {task for task in tasks if not task.done()}
    ends = time.monotonic() + CANCELLED_S
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.2)
        if pending and time.monotonic() > ends:
            raise TimeoutError(f"not ended within {CANCELLED_S:g} s: {', '.join(task.get_name() for task in pending)}")
    for task in tasks:
        if not task.cancelled() and (error := task.exception()):
            log.error("%s ended with %s: %s", task.get_name(), type(error).__name__, error)
