"""Owns waiting for room on a full disk, and for a store that is away: what has to be done is tried again until it can.

Must not decide what is written, nor delete anything to make room.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from services.storage.errors import StoreAwayError
from services.waits import Waits

log = logging.getLogger(__name__)

R = TypeVar("R")

WAIT, STORE_WAIT = "disk", "store"
RETRY_S = 2.0
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


async def written(write: Callable[[], R], what: str, waits: Waits, patience_s: float) -> R:
    """The result of `write`, called in a thread, and again every RETRY_S seconds while disk or store do not take it.

    That is a full disk, and a store that is away. Raises OSError once that has lasted for `patience_s` seconds, and at
    once whatever else goes wrong.
    """
    ends = time.monotonic() + patience_s
    try:
        while True:
            try:
                return await asyncio.to_thread(write)
            except OSError as error:
                wait = _wait(error)
                if wait is None or time.monotonic() > ends:
                    raise
                name, lacking = wait
                log.warning("%s: %s; trying again in %g s", what, error, RETRY_S)
                waits.pending(name, f"{lacking} for {what}: {error}", patience_s)
            await asyncio.sleep(RETRY_S)
    finally:
        waits.done(WAIT)
        waits.done(STORE_WAIT)


def _wait(error: OSError) -> tuple[str, str] | None:
    """What an error has to be waited out for; None where that is of no use."""
    if isinstance(error, StoreAwayError):
        return STORE_WAIT, "the store"
    return (WAIT, "room on the disk") if error.errno in FULL else None
