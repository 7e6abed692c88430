"""Owns the cancellation of asyncio tasks: cancel them until they have ended, and detect a lost cancellation.

Must not hide an error that a task raised.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

log = logging.getLogger(__name__)

DEADLINE_S = 30.0


def cancellation_requested() -> bool:
    """Whether this task was cancelled, even if the CancelledError was lost.

    For loops inside a TaskGroup, which cancels its tasks only once and would wait for one that never ends.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks until all have ended; errors other than the cancellation are logged.

    One cancellation is not enough: up to Python 3.11 `asyncio.wait_for`, through which redis-py sends commands, loses a
    cancellation that arrives when its wait has finished. Raises TimeoutError after 30 s, naming the remaining tasks.
    """
    pending = {task for task in tasks if not task.done()}
    ends = time.monotonic() + DEADLINE_S
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.2)
        if pending and time.monotonic() > ends:
            raise TimeoutError(f"not ended within {DEADLINE_S:g} s: {', '.join(task.get_name() for task in pending)}")
    for task in tasks:
        if not task.cancelled() and (error := task.exception()):
            log.error("%s ended with %s: %s", task.get_name(), type(error).__name__, error)
