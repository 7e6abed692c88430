"""Owns a simulated rollout replica: the sequences that it generates side by side, and how fast each of them grows.

Must not know what a group is worth; the pipeline judges it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from services.contracts import Prompt, Sampling, Task
from services.sampler.groups import Group

_SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=1)
NO_PROMPT = Prompt(id="", messages=(), verifier="", reference={})


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

    @property
    def fastest(self) -> float:
        """Tokens per second with all sequences in use."""
        return self.peak * self.max_sequences / (self.max_sequences + self.half)

    @property
    def per_sequence(self) -> float:
        """Tokens per second of each sequence with all of them in use."""
        return self.peak / (self.max_sequences + self.half)


class SimulatedGroup(Group):
    """A group of the sampler's table whose samples have only lengths, in tokens; a policy version is a rollout step.

    `oldest`: by sample the rollout step of its oldest token, -1 before it; `left`: requested samples that are not
    finished; `requested`: how many of the samples were requested so far.
    """

    def __init__(self, number: int, lengths: tuple[int, ...], prompt: Prompt = NO_PROMPT) -> None:
        name = f"g{number:08d}"
        super().__init__(Task.model_construct(group=name, prompt=prompt, samples=len(lengths), sampling=_SAMPLING))
        self.name = name
        self.lengths = lengths
        self.oldest = [-1] * len(lengths)
        self.left = self.requested = 0

    @property
    def judged(self) -> bool:
        """Whether no requested sample is missing, once any was requested."""
        return self.requested > 0 and self.left == 0

    @property
    def oldest_version(self) -> int:
        """The rollout step of its oldest token."""
        return min(step for step in self.oldest if step >= 0)

    @property
    def tokens(self) -> int:
        """The response tokens of the samples that were requested."""
        return sum(self.lengths[: self.requested])


class Piece(NamedTuple):
    """What is missing of a sample: its group, its index, and the tokens that are left to draw."""

    group: SimulatedGroup
    sample: int
    left: float


class Replica:
    """One replica that its caller moves forward in time. `stamp` changes with its next event.

    `drawn`: tokens so far; `groups`: leased tasks with a sample that is not finished.
    """

    _order = itertools.count()

    def __init__(self, engine: Engine, at: float) -> None:
        self._engine = engine
        self._at = at
        self._grown = 0.0  # tokens that a sequence has gained since the start, were it there from the start
        self._running: list[tuple[float, int, SimulatedGroup, int]] = []
        self._waiting: deque[Piece] = deque()
        self.paused_until = at
        self.drawn = 0.0
        self.groups = 0
        self.stamp = 0
        self.draining = False

    @property
    def unfinished(self) -> int:
        """How many samples it has to finish."""
        return len(self._running) + len(self._waiting)

    def _speed(self) -> float:
        """Tokens per second of each sequence."""
        return self._engine.peak / (len(self._running) + self._engine.half)

    def forward(self, now: float) -> None:
        """Let the time pass until `now`, before which no sequence ends."""
        if self._running and now > self.paused_until:
            gained = (now - max(self._at, self.paused_until)) * self._speed()
            self._grown += gained
            self.drawn += gained * len(self._running)
        self._at = now

    def next_end(self) -> float:
        """When the next sequence ends if nothing changes; infinity without any."""
        if not self._running:
            return float("inf")
        begins = max(self._at, self.paused_until)
        return begins + max(0.0, self._running[0][0] - self._grown) / self._speed()

    def add(self, pieces: Iterable[Piece], policy_step: int) -> None:
        """Take the samples of a task, which start as sequences become free."""
        self.groups += 1
        self._waiting.extend(pieces)
        self._fill(policy_step)

    def end_one(self, policy_step: int) -> SimulatedGroup | None:
        """End the next sequence; its group, if that was the last of its requested samples."""
        ends, _, group, _ = heapq.heappop(self._running)
        self.drawn += (ends - self._grown) * (len(self._running) + 1)  # a rounding
        self._grown = ends
        self._fill(policy_step)
        group.left -= 1
        if group.left:
            return None
        self.groups -= 1
        return group

    def left(self) -> list[Piece]:
        """What is missing of each sample, those that wait included."""
        return [Piece(group, index, ends - self._grown) for ends, _, group, index in self._running] + [*self._waiting]

    def _fill(self, policy_step: int) -> None:
        while self._waiting and len(self._running) < self._engine.max_sequences:
            group, index, left = self._waiting.popleft()
            if group.oldest[index] < 0:
                group.oldest[index] = policy_step
            heapq.heappush(self._running, (self._grown + left, next(self._order), group, index))
