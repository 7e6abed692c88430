"""Owns waiting for room on a full disk: what has to be written is tried again until there is some.

Must not decide what is written, nor delete anything to make room.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from services.waits import Waits

log = logging.getLogger(__name__)

R = TypeVar("R")

WAIT = "disk"
RETRY_S = 2.0
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


async def written(write: Callable[[], R], what: str, waits: Waits, patience_s: float) -> R:
    """The result of `write`, called in a thread, and again every RETRY_S seconds while the disk is full.

    Raises OSError once it has been full for `patience_s` seconds, and at once whatever else goes wrong.
    """
    ends = time.monotonic() + patience_s
    try:
        while True:
            try:
                return await asyncio.to_thread(write)
            except OSError as error:
                if error.errno not in FULL or time.monotonic() > ends:
                    raise
                log.warning("%s: %s; trying again in %g s", what, error, RETRY_S)
                waits.pending(WAIT, f"room on the disk for {what}: {error}", patience_s)
            await asyncio.sleep(RETRY_S)
    finally:
        waits.done(WAIT)
