"""Owns what the sandbox finds about a text: an outcome, or why there is none.

Must not interpret an unknown outcome.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass, field

from services.contracts import Outcome, SandboxFault
from services.settings.rewards.reward import Reward
from verifier.sandbox.process import Reply
from verifier.verifiers.base import Candidate, Judgement

REASON_CHARACTERS = 500


@dataclass(frozen=True)
class Finding:
    """An outcome and its score, why it was decided so, and the judged answer (at most 200 characters).

    `fault`: why there is no judgement; None when there is one. `rewards`: the score of each part of a combined reward.
    """

    outcome: Outcome
    score: float
    reason: str = ""
    answer: str = ""
    fault: SandboxFault | None = None
    rewards: dict[str, float] = field(default_factory=dict)


def finding_of(judgement: Judgement | Reply) -> Finding:
    """What a judgement, or a judging process's reply, says."""
    if judgement.correct is None:
        return no_judgement(judgement.reason, SandboxFault.ERROR)
    outcome = Outcome.CORRECT if judgement.correct else Outcome.WRONG
    return Finding(outcome, judgement.score, judgement.reason[:REASON_CHARACTERS], judgement.answer)


def no_judgement(reason: str, fault: SandboxFault) -> Finding:
    """An unknown outcome."""
    return Finding(Outcome.UNKNOWN, 0.0, reason[:REASON_CHARACTERS], fault=fault)


def damaged_payload(damage: str) -> Finding:
    """An unknown outcome for a text that could not be read. It is no fault of the sandbox."""
    return Finding(Outcome.UNKNOWN, 0.0, damage[:REASON_CHARACTERS])


class FindingsBatch:
    """The findings of texts that were given together; other threads add them, one event loop takes them."""

    def __init__(self, size: int) -> None:
        self._loop, self._whole = asyncio.get_running_loop(), asyncio.Event()
        self._lock, self._left = threading.Lock(), size
        self._found: deque[tuple[int, Finding]] = deque()
        self.cancelled = False

    def add(self, place: int, finding: Finding) -> None:
        """Add the finding of the text at `place`. From one thread at a time per text."""
        self._found.append((place, finding))
        with self._lock:
            self._left -= 1
            whole = self._left == 0
        if whole and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._whole.set)

    async def take(self, within_s: float) -> tuple[list[tuple[int, Finding]], bool]:
        """The findings since the last call, when all are there or after `within_s` seconds; and whether all are."""
        try:
            async with asyncio.timeout(within_s):
                await self._whole.wait()
        except TimeoutError:
            pass  # the caller asks again
        whole = self._whole.is_set()
        return [self._found.popleft() for _ in range(len(self._found))], whole


@dataclass
class PendingText:
    """A text that waits for a judging process.

    `retried`: its process has died; `deferred`: it takes long, and there was no room for it.
    """

    place: int
    reward: Reward
    candidate: Candidate
    batch: FindingsBatch
    retried: bool = False
    deferred: bool = False

    def found(self, finding: Finding) -> None:
        """Hand over its finding."""
        self.batch.add(self.place, finding)
