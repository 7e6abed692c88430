"""Owns the record of one training of the comparison: when each rollout step ended, and what evaluations scored.

Must not import TRL or torch, so that the project's own tests cover it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


class Spent(NamedTuple):
    """Seconds: on the wall clock, and of processor time in all threads and ended children of this process."""

    wall: float
    cpu: float

    def less(self, other: Spent) -> Spent:
        """What was spent since `other`."""
        return Spent(self.wall - other.wall, self.cpu - other.cpu)


def spent() -> Spent:
    """What this process has spent; the wall clock starts anywhere."""
    of = os.times()
    return Spent(time.monotonic(), of.user + of.system + of.children_user + of.children_system)


class TrainingRecord:
    """Counts from the start of the process, less what is spent in `aside`: evaluations and saved weights.

    `started`: Unix seconds. `before`: what the process had spent before the record was made.
    """

    def __init__(self, started: float, before: Spent, now: Callable[[], Spent] = spent) -> None:
        self.started = started
        self._now = now
        # The zero of the count, on the clocks of `now`.
        self._zero = now().less(before)
        self._startup: Spent | None = None
        self._steps: list[dict[str, float]] = []
        self._evaluations: list[dict[str, float]] = []

    def _counted(self) -> Spent:
        return self._now().less(self._zero)

    def begin(self) -> None:
        """The first rollout starts now, and the start-up ends. Later calls do nothing."""
        if self._startup is None:
            self._startup = self._counted()

    def end_step(self, step: int) -> dict[str, float]:
        """Rollout step `step` ends now: its entry, in seconds since the first rollout started."""
        assert self._startup is not None, "the first rollout has not started"
        since = self._counted().less(self._startup)
        self._steps.append({"step": step, "seconds": since.wall, "cpu_seconds": since.cpu})
        return self._steps[-1]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is spent inside is not counted."""
        before = self._now()
        try:
            yield
        finally:
            meanwhile = self._now().less(before)
            self._zero = Spent(self._zero.wall + meanwhile.wall, self._zero.cpu + meanwhile.cpu)

    def evaluated(self, step: int, accuracy: float) -> None:
        """The policy after rollout step `step` (0: before the first) scored `accuracy`."""
        self._evaluations.append({"step": step, "accuracy": accuracy})

    def document(self, **more: Any) -> dict[str, Any]:
        """The record as JSON can hold it, with `more` fields at its end."""
        startup = self._startup or self._counted()
        return {
            "started": self.started,
            "startup_seconds": startup.wall,
            "startup_cpu_seconds": startup.cpu,
            "steps": self._steps,
            "evaluations": self._evaluations,
            **more,
        }


def write(path: Path, document: dict[str, Any]) -> None:
    """Write a record, and the folder it lies in. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def average_at(correct: Sequence[bool], samples: int) -> float:
    """avg@k with k = `samples`: the mean over prompts of the share of correct answers, k answers per prompt in a row.

    Raises ValueError if the answers are not k per prompt.
    """
    if not correct or len(correct) % samples:
        raise ValueError(f"{len(correct)} answers are not valid: expected {samples} per prompt")
    return sum(correct) / len(correct)


def due(step: int, every: int, last: int) -> bool:
    """Whether something is done after rollout step `step` (0: before the first), each `every` steps and after `last`.

    With `every` 0, never.
    """
    return every > 0 and (step % every == 0 or step == last)
