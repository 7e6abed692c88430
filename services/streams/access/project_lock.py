"""Owns the lock of a project: between counting what its runs use and adding a run, no other one is added.

Must not be held longer than HELD_S: a process that died with it blocks others no longer than that.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.streams.connection.client import Redis
from services.streams.connection.functions import call

log = logging.getLogger(__name__)

HELD_S = 30.0
RELEASE_S = 0.4
"""For the release by a request whose time is over: one more wait for a Redis that hangs would double it."""
WAIT_S = 3.0
LOOK_S = 0.05


class ProjectBusyError(RuntimeError):
    """Another run is being added to the project, for longer than WAIT_S."""


@asynccontextmanager
async def project_lock(redis: Redis, project: str) -> AsyncIterator[None]:
    """Hold the lock of a project. Raises ProjectBusyError after WAIT_S seconds."""
    key, owner = f"penstock:lock:project:{project}", secrets.token_hex(16)
    ends = asyncio.get_running_loop().time() + WAIT_S
    while not await call(redis, "take_lock", lock_key=key, owner=owner, lifetime_ms=int(HELD_S * 1000)):
        if asyncio.get_running_loop().time() > ends:
            raise ProjectBusyError(f"another run is being added to project {project!r}; retry in {HELD_S:g} s")
        await asyncio.sleep(LOOK_S)
    try:
        yield
    finally:
        await _release(redis, project, key, owner)


async def _release(redis: Redis, project: str, key: str, owner: str) -> None:
    task = asyncio.current_task()
    assert task is not None
    try:
        async with asyncio.timeout(RELEASE_S if task.cancelling() else None):
            if not await call(redis, "release_lock", lock_key=key, owner=owner):
                log.warning("the lock of project %s was held for longer than %g s", project, HELD_S)
    except TimeoutError:
        log.warning("the lock of project %s cannot be released, and ends in %g s at most", project, HELD_S)
