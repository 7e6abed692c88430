"""Owns the rewards and texts of the sandbox's tests, and what they ask about its processes.

Must not be used outside tests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import psutil

from services.contracts import Lane, Outcome
from services.settings.rewards.reward import Reward, parse_text
from tests.harness.process_trees import alive
from verifier.sandbox.finding import Finding
from verifier.sandbox.pool import Sandbox
from verifier.verifiers.base import Candidate

PROGRAM = "tests.verifier.sandbox.hostile"
HOSTILE, EVALUATED = Reward("hostile"), Reward("evaluated")
"""Verifiers of PROGRAM that run the text: in a shared process, and in a process per text."""
PATTERN, MATH, GYM = map(parse_text, ("pattern", "math", "reasoning-gym"))
BACKTRACKING = Candidate("a" * 40 + "b", {"pattern": "(a+)+$"})
"""A text that `pattern` does not judge within hours."""
SLEEPING = "import time\nwhile True: time.sleep(1)"
"""Code that takes no CPU time."""
PATIENCE_S = 60.0


def matching(text: str, pattern: str = "a") -> tuple[Reward, Candidate]:
    """A text for `pattern`."""
    return PATTERN, Candidate(text, {"pattern": pattern})


async def found_in(sandbox: Sandbox, code: str, by: Reward = HOSTILE, lane: Lane = Lane.TRAIN, **scope: Any) -> Finding:
    """The finding on code; `scope` are its variables."""
    return await sandbox.judge(by, Candidate(code, scope), lane=lane)


async def ran(sandbox: Sandbox, code: str, by: Reward = HOSTILE, lane: Lane = Lane.TRAIN, **scope: Any) -> str:
    """The result of the code in the judging process."""
    found = await found_in(sandbox, code, by, lane, **scope)
    assert found.outcome is Outcome.CORRECT, found
    return found.answer


async def pid_of(sandbox: Sandbox, by: Reward = HOSTILE, lane: Lane = Lane.TRAIN) -> int:
    """The process that judges the next text."""
    return int(await ran(sandbox, "import os; found = os.getpid()", by, lane))


def warm_parents() -> list[psutil.Process]:
    """All warm parents that run, those of other tests included."""
    return [child for child in psutil.Process().children() if alive(child)]


def judging_processes() -> list[int]:
    """All judging processes that run."""
    return sorted(each.pid for parent in warm_parents() for each in parent.children() if alive(each))


async def until(true: Callable[[], bool], what: str) -> None:
    """Wait for a fact."""
    ends = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < ends, f"it did not become true: {what}"
        await asyncio.sleep(0.01)
