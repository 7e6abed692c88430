"""Owns when a lane's texts that take long run, and when they are stopped for other texts.

Must not judge, nor end a process.

Such a text hangs, or its judgement is only longer than others: only its end tells. So texts that were not seen to take
long go first, then those that have used the least CPU time (multi-level feedback: each level ends at twice the CPU time
of the previous one). Processes are stopped and continued. Priorities would not do: Linux compares them only within a
session or a control group, and a process that has lowered its own may not raise it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from verifier.sandbox.deadline import LEAST_SLOW_S
from verifier.sandbox.process import JudgingProcess, Reply

MOST_SLOW = 64
"""How many texts that take long a lane may have beside its processes."""
LOOK_S, LOOK_STOPPED_S = 0.05, 0.2
"""The pause between two looks at a text that takes long."""
TURN_S, REST_S = 0.002, 0.078
"""How a text that takes long runs, and stops, while others need all processes: it gets some CPU time in any case."""


class Foreground:
    """How many of a sandbox's `processes` judge texts that were not seen to take long. Any thread may use it."""

    def __init__(self, processes: int) -> None:
        self._processes, self._busy = processes, 0
        self._lock = threading.Lock()

    @contextmanager
    def judging(self) -> Iterator[None]:
        """While a process judges such texts."""
        with self._lock:
            self._busy += 1
        try:
            yield
        finally:
            with self._lock:
                self._busy -= 1

    @property
    def idle(self) -> int:
        """How many do not."""
        return self._processes - self._busy


@dataclass(eq=False)
class SlowText:
    """A text that takes long, by its process. `slow_s`: the CPU seconds from which it did."""

    process: JudgingProcess
    slow_s: float
    level: int = 0
    stopped: bool = False


class Background:
    """The texts of one lane that take long; `running` of them run at once. Any thread may use it."""

    def __init__(self, foreground: Foreground, running: int) -> None:
        self._foreground, self._running = foreground, running
        self._lock = threading.Lock()
        self._texts: list[SlowText] = []

    def enter(self, process: JudgingProcess, slow_s: float) -> SlowText | None:
        """Add a text, until `leave`; None if there are MOST_SLOW. Its process stops until `reply`."""
        text = SlowText(process, slow_s)
        with self._lock:
            if len(self._texts) >= MOST_SLOW:
                return None
            self._texts.append(text)
        self._stop(text, True)
        return text

    def leave(self, text: SlowText) -> None:
        """Remove a text, before its process is closed. Its process runs."""
        with self._lock:
            self._texts.remove(text)
        self._stop(text, False)

    def reply(self, text: SlowText) -> Reply:
        """Wait for the reply of a text. Its process runs then. Raises ProcessFailedError, JudgementTimeoutError."""
        while True:
            for stopped, pause_s in self._turn(text):
                self._stop(text, stopped)
                reply = text.process.reply_within(pause_s)
                if reply is not None:
                    self._stop(text, False)
                    return reply

    def _turn(self, text: SlowText) -> tuple[tuple[bool, float], ...]:
        """What the process of a text does next: whether it is stopped, and for how many seconds."""
        cpu_s = text.process.cpu_seconds
        text.level = int(math.log2(max(1.0, cpu_s / text.slow_s)))
        if text.level == 0:
            return ((False, max(LEAST_SLOW_S, 2 * text.slow_s - cpu_s)),)
        with self._lock:
            before = sum(each.level < text.level for each in self._texts)
            before += sum(each.level == text.level for each in self._texts[: self._texts.index(text)])
        if before < self._foreground.idle:
            return ((False, LOOK_S),)
        if before < self._running:
            return ((False, TURN_S), (True, REST_S))
        return ((True, LOOK_STOPPED_S),)

    def _stop(self, text: SlowText, stop: bool) -> None:
        if stop != text.stopped:
            text.stopped = stop
            (text.process.suspend if stop else text.process.wake)()
