"""Owns a simulated rollout replica: the sequences that it generates side by side, and how fast each of them grows.

Must not know what a group is worth; the pipeline judges it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Engine:
    """The speed of a replica. With n sequences it generates `peak` x n / (n + `half`) tokens per second together.

    `max_sequences`: how many it generates side by side; others wait. `start_s`: seconds until a new one is ready;
    `pause_s`: seconds that applying new weights stops it.
    """

    peak: float
    half: float
    max_sequences: int
    start_s: float
    pause_s: float


@dataclass
class Group:
    """A simulated group. `lengths`: response tokens of its samples; `oldest`: the rollout step of its oldest token."""

    number: int
    lengths: tuple[int, ...]
    survives: bool
    oldest: int = -1
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = len(self.lengths)

    @property
    def tokens(self) -> int:
        """The response tokens of all samples."""
        return sum(self.lengths)


class Replica:
    """One replica at a time that its caller moves forward. `stamp` changes with its next event."""

    _order = itertools.count()

    def __init__(self, engine: Engine, at: float) -> None:
        self._engine = engine
        self._at = at
        self._grown = 0.0  # tokens that a sequence has gained since the start, were it there from the start
        self._running: list[tuple[float, int, Group]] = []
        self._waiting: deque[tuple[int, Group]] = deque()
        self.paused_until = at
        self.groups = 0
        self.stamp = 0
        self.draining = False

    def _speed(self) -> float:
        """Tokens per second of each sequence."""
        return self._engine.peak / (len(self._running) + self._engine.half)

    def forward(self, now: float) -> None:
        """Let the time pass until `now`, before which no sequence ends."""
        begins = max(self._at, min(self.paused_until, now))
        if self._running:
            self._grown += (now - begins) * self._speed()
        self._at = now

    def next_end(self) -> float:
        """When the next sequence ends if nothing changes; infinity without any."""
        if not self._running:
            return float("inf")
        begins = max(self._at, self.paused_until)
        return begins + max(0.0, self._running[0][0] - self._grown) / self._speed()

    def add(self, group: Group, policy_step: int) -> None:
        """Take a group whose samples start as sequences become free."""
        self.groups += 1
        self._waiting.extend((length, group) for length in group.lengths)
        self._fill(policy_step)

    def end_one(self, policy_step: int) -> Group | None:
        """End the next sequence; its group, if that was the last of it."""
        self._grown, _, group = heapq.heappop(self._running)
        self._fill(policy_step)
        group.left -= 1
        if group.left:
            return None
        self.groups -= 1
        return group

    def _fill(self, policy_step: int) -> None:
        while self._waiting and len(self._running) < self._engine.max_sequences:
            length, group = self._waiting.popleft()
            group.oldest = policy_step if group.oldest < 0 else min(group.oldest, policy_step)
            heapq.heappush(self._running, (self._grown + length, next(self._order), group))
