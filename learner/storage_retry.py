"""Owns retries of storage operations while the disk is full or the store is unavailable.

Must not decide what is written, nor delete anything to free space.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import TypeVar

from services.retry import Retry
from services.storage.errors import StoreOutageError
from services.waits import Waits

R = TypeVar("R")

DISK_WAIT, STORE_WAIT = "disk", "store"
RETRY_S = 2.0
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


async def retry_storage(operation: Callable[[], R], what: str, waits: Waits, patience_s: float) -> R:
    """Run blocking `operation` in a thread and return its result.

    Retries every RETRY_S seconds while the disk is full or the store is unavailable; `what` names the operation in the
    wait. Raises OSError after `patience_s` seconds of that, and any other error at once.
    """

    def report(error: Exception) -> None:
        name, resource = _wait_for(error) or ("", "")
        waits.pending(name, f"{resource} for {what}: {error}", patience_s)

    passing = Retry(lambda error: _wait_for(error) is not None, RETRY_S, patience_s, on_failure=report)
    try:
        return await passing.run_async(lambda: asyncio.to_thread(operation))
    finally:
        waits.done(DISK_WAIT)
        waits.done(STORE_WAIT)


def _wait_for(error: Exception) -> tuple[str, str] | None:
    """The name of the wait, and the resource to wait for. None if a retry does not help."""
    if isinstance(error, StoreOutageError):
        return STORE_WAIT, "the store"
    full = isinstance(error, OSError) and error.errno in DISK_FULL
    return (DISK_WAIT, "room on the disk") if full else None
