"""Owns a verifier that judges by the first word in its own process: the real loop around a stub sandbox.

Must not be used outside benchmarks of the streams. `python -m tests.harness.stubs.verifier --run ID --redis URL`
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import verifier.service
from services.contracts import Lane, Outcome
from services.process.hosting import main
from services.settings.rewards.reward import Reward
from verifier.sandbox.finding import Finding
from verifier.verifiers.base import Candidate


class StubSandbox:
    """Stands in for verifier.sandbox.pool.Sandbox."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._findings = {
            True: Finding(Outcome.CORRECT, 1.0, answer="right"),
            False: Finding(Outcome.WRONG, 0.0, answer="wrong"),
        }

    def __enter__(self) -> StubSandbox:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing was started."""

    async def start(self) -> tuple[str, ...]:
        """No gaps in the confinement: there is nothing to confine."""
        return ()

    async def judge(self, reward: Reward, candidate: Candidate, *, lane: Lane = Lane.TRAIN) -> Finding:
        """Whether the text starts with the right word."""
        return self._findings[candidate.text.startswith("right")]

    async def judge_all(
        self, texts: Sequence[tuple[Reward, Candidate]], *, lane: Lane = Lane.TRAIN
    ) -> AsyncGenerator[list[tuple[int, Finding]], None]:
        """The place and the finding of each text, all at once."""
        yield [(place, await self.judge(*text)) for place, text in enumerate(texts)]


if __name__ == "__main__":
    stub: Any = StubSandbox
    verifier.service.Sandbox = stub
    sys.exit(main(verifier.service.VerifierService))
