"""Owns retries of storage operations while the disk is full or the store is unavailable.

Must not decide what is written, nor delete anything to free space.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from services.storage.errors import StoreOutageError
from services.waits import Waits

log = logging.getLogger(__name__)

R = TypeVar("R")

DISK_WAIT, STORE_WAIT = "disk", "store"
RETRY_S = 2.0
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


async def retry_storage(operation: Callable[[], R], what: str, waits: Waits, patience_s: float) -> R:
    """Run blocking `operation` in a thread and return its result.

    Retries every RETRY_S seconds while the disk is full or the store is unavailable; `what` names the operation in the
    wait. Raises OSError after `patience_s` seconds of that, and any other error at once.
    """
    ends = time.monotonic() + patience_s
    try:
        while True:
            try:
                return await asyncio.to_thread(operation)
            except OSError as error:
                wait = _wait_for(error)
                if wait is None or time.monotonic() > ends:
                    raise
                name, resource = wait
                log.warning("%s: %s; retrying in %g s", what, error, RETRY_S)
                waits.pending(name, f"{resource} for {what}: {error}", patience_s)
            await asyncio.sleep(RETRY_S)
    finally:
        waits.done(DISK_WAIT)
        waits.done(STORE_WAIT)


def _wait_for(error: OSError) -> tuple[str, str] | None:
    """The name of the wait, and the resource to wait for. None if a retry does not help."""
    if isinstance(error, StoreOutageError):
        return STORE_WAIT, "the store"
    return (DISK_WAIT, "room on the disk") if error.errno in DISK_FULL else None
