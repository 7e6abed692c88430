"""Owns the end of asyncio tasks: cancel until they have ended, and know when one was.

Must not hide what a task raised.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

log = logging.getLogger(__name__)

DEADLINE_S = 30.0


def cancellation_requested() -> bool:
    """Whether this task was cancelled, even if the cancellation was lost on its way.

    For loops inside of a TaskGroup: that cancels its tasks only once, and would wait for one that goes on for ever.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks until all have ended; an error that is not the cancellation is logged.

    Once is not enough: up to Python 3.11 `asyncio.wait_for`, which redis-py sends commands through, loses a
    cancellation that meets a finished wait. Raises TimeoutError after 30 s, naming what does not end.
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
