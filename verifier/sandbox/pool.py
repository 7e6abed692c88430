"""Owns the sandbox: it judges responses in confined processes, each lane in its own.

Must not interpret an unknown outcome.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from types import TracebackType

from services.contracts import Lane
from services.settings.rewards.reward import Reward
from verifier.sandbox.background import Foreground
from verifier.sandbox.finding import Finding, FindingsBatch, PendingText
from verifier.sandbox.lane import JudgingLane
from verifier.sandbox.parents import WarmParents
from verifier.sandbox.warm_parent import WarmParentError
from verifier.verifiers.base import Candidate

START_S = 120.0
HANDED_OVER_S = 0.05
"""The longest that a finding waits for those after it. Handing over each one costs more than a fast judgement."""
MOST_PROCESSES = 9


class SandboxError(Exception):
    """A warm parent does not start, cannot be confined, or cannot load a function of the user's."""


def default_processes() -> int:
    """How many texts of a lane are judged at once by default: one more than cores, at most MOST_PROCESSES.

    The one more has work for a core while others wait: for their next text, or for one that may take long.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_PROCESSES, cores + 1)


class Sandbox:
    """Confined processes that judge `processes` responses of each lane at once.

    `timeout_s`: the CPU seconds of a judgement. `rewards`: the single rewards whose verifiers `start` loads; others are
    loaded when they are first needed. `files`: the user's files, by name. `start_s`: the longest start of a warm
    parent. `program`: the module that warm parents run.
    """

    def __init__(
        self,
        processes: int,
        timeout_s: float,
        rewards: Iterable[Reward] = (),
        *,
        files: Mapping[str, str] | None = None,
        start_s: float = START_S,
        program: str = "verifier.sandbox.server",
    ) -> None:
        self._rewards = list(rewards)
        self._parents = WarmParents(files or {}, start_s, program)
        foreground = Foreground(processes)
        self._lanes = {lane: JudgingLane(self._parents, foreground, processes, timeout_s) for lane in Lane}

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for lane in self._lanes.values():
            lane.stop()
        self._parents.stop()
        for lane in self._lanes.values():
            lane.close()
        self._parents.close()

    async def start(self) -> tuple[str, ...]:
        """Load all rewards; returns the gaps of their confinement on this platform, one sentence each.

        Raises SandboxError when a verifier cannot be loaded or confined, or is not ready in time.
        """
        return await asyncio.to_thread(self._start)

    async def judge(self, reward: Reward, candidate: Candidate, *, lane: Lane = Lane.TRAIN) -> Finding:
        """Judge a response; a timeout, a crash or an unusable reference is `unknown`, never wrong."""
        async for findings in self.judge_all([(reward, candidate)], lane=lane):
            for _, finding in findings:
                return finding
        raise AssertionError("a judged text has a finding")

    async def judge_all(
        self, texts: Sequence[tuple[Reward, Candidate]], *, lane: Lane = Lane.TRAIN
    ) -> AsyncGenerator[list[tuple[int, Finding]], None]:
        """Judge several responses by single rewards; see `judge`.

        Yields findings, each with its place in `texts`: every HANDED_OVER_S those since the last time, and the rest.
        """
        batch = FindingsBatch(len(texts))
        self._lanes[lane].add([PendingText(n, reward, candidate, batch) for n, (reward, candidate) in enumerate(texts)])
        try:
            whole = not texts
            while not whole:
                found, whole = await batch.take(HANDED_OVER_S)
                if found:
                    yield found
        finally:
            batch.cancelled = True

    def _start(self) -> tuple[str, ...]:
        try:
            for reward in self._rewards:
                self._parents.launch(reward)
            return tuple(sorted({gap for reward in self._rewards for gap in self._parents.ready(reward).gaps}))
        except WarmParentError as error:
            raise SandboxError(f"a verifier could not be started: {error}") from None
