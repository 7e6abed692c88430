"""Owns how rank 0 waits: it sends the other ranks idle commands meanwhile, and a wait ends when the learner stops.

Must not know what the wait is for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from learner.rank.commands import Command
from learner.rank.worker import RankWorker
from services.process.hosting import Context

R = TypeVar("R")

TICK_S = 4.0
"""The longest time, in seconds, between two commands of rank 0; `idle` fills the gaps."""
POLL_S = 1.0


class LearnerStoppingError(RuntimeError):
    """`stopping` was set during a rollout step. The next learner trains that step."""


async def idle_during(worker: RankWorker, work: Coroutine[Any, Any, R]) -> R:
    """The result of rank 0's own `work`. Meanwhile the other ranks receive idle commands, so that none times out."""
    task = asyncio.create_task(work)
    try:
        while not (await asyncio.wait({task}, timeout=TICK_S))[0]:
            await worker.send(Command(do="idle"))
    finally:
        task.cancel()
    return task.result()


async def wait_until_stopping(
    context: Context, work: Coroutine[Any, Any, R], name: str, what: str, deadline_s: float
) -> R:
    """The result of `work`, listed as the wait `name` for `what`.

    Raises LearnerStoppingError once `stopping` is set, and TimeoutError, naming the wait, after `deadline_s` seconds.
    """
    stopping = asyncio.create_task(context.stopping.wait())
    task = asyncio.create_task(work)
    try:
        with context.waits.on(name, what, deadline_s):
            await asyncio.wait({task, stopping}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if stopping.done():
            raise LearnerStoppingError
        raise TimeoutError(f"waited {deadline_s:g} s for {what} ({name})")
    finally:
        task.cancel()
        stopping.cancel()
