"""Owns when a lane's texts that take long run, and when they are stopped for other texts.

Must not judge, nor end a process.

Such a text hangs, or its judgement is only longer than others: only its end tells. So texts that were not seen to take
long go first, then those that have used the least CPU time (multi-level feedback: a level ends at eight times the CPU
time of the previous one, and within a level the first comes first). Processes are stopped and continued. Priorities
would not do: Linux compares them only within a session or a control group, and a process that has lowered its own may
not raise it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from verifier.sandbox.deadline import LEAST_SLOW_S
from verifier.sandbox.process import JudgingProcess, Reply

MOST_SLOW = 64
"""How many texts that take long a lane may have beside its processes."""
LOOK_S, LOOK_STOPPED_S = 0.05, 0.2
"""The pause between two looks at a text that takes long."""
SOMEWHAT, LEVELS = 2, 8
"""Below so many times the bound a text runs like any other; each level ends at so many times the previous one."""
TURN_S, REST_S = 0.002, 0.078
"""How the first text that takes long runs, and stops, while others need all processes: there is some progress."""


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


class Step(NamedTuple):
    """What a process does for some seconds; with `until_changed`, at most until another text's level changes."""

    stopped: bool
    seconds: float
    until_changed: bool = False


class Background:
    """The texts of one lane that take long. Any thread may use it."""

    def __init__(self, foreground: Foreground) -> None:
        self._foreground = foreground
        self._changed = threading.Condition()
        self._texts: list[SlowText] = []

    def enter(self, process: JudgingProcess, slow_s: float) -> SlowText | None:
        """Add a text, until `leave`; None if there are MOST_SLOW. Its process stops until `reply`."""
        text = SlowText(process, slow_s)
        with self._changed:
            if not self.room:
                return None
            self._texts.append(text)
        self._stop(text, True)
        return text

    @property
    def room(self) -> bool:
        """Whether there are fewer than MOST_SLOW."""
        return len(self._texts) < MOST_SLOW

    def leave(self, text: SlowText) -> None:
        """Remove a text, before its process is closed. Its process runs."""
        with self._changed:
            self._texts.remove(text)
            self._wake_others()
        self._stop(text, False)

    def reply(self, text: SlowText) -> Reply:
        """Wait for the reply of a text. Its process runs then. Raises ProcessFailedError, JudgementTimeoutError."""
        while True:
            for step in self._steps(text):
                self._stop(text, step.stopped)
                if step.until_changed:
                    with self._changed:
                        self._changed.wait(step.seconds)
                reply = text.process.reply_within(0.0 if step.until_changed else step.seconds)
                if reply is not None:
                    self._stop(text, False)
                    return reply

    def _steps(self, text: SlowText) -> tuple[Step, ...]:
        """What the process of a text does next."""
        cpu_s = text.process.cpu_seconds
        if cpu_s < SOMEWHAT * text.slow_s:
            return (Step(False, max(LEAST_SLOW_S, SOMEWHAT * text.slow_s - cpu_s)),)
        level = 1 + int(math.log(cpu_s / text.slow_s, LEVELS))
        with self._changed:
            if level != text.level:
                text.level = level
                self._wake_others()
            before = sum(each.level < level for each in self._texts)
            before += sum(each.level == level for each in self._texts[: self._texts.index(text)])
        if before < self._foreground.idle:
            return (Step(False, LOOK_S),)
        if before == 0:
            return (Step(False, TURN_S), Step(True, REST_S))
        return (Step(True, LOOK_STOPPED_S, until_changed=True),)

    def _wake_others(self) -> None:
        """Let texts that are stopped see at once whether a process is idle for them; else they look in a while."""
        if self._foreground.idle > 0:
            self._changed.notify_all()

    def _stop(self, text: SlowText, stop: bool) -> None:
        if stop != text.stopped:
            text.stopped = stop
            (text.process.suspend if stop else text.process.wake)()
