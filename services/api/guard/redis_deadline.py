"""Owns the deadline of a request's work in Redis: a server that hangs is answered with 503, by whatever route.

Must not bound the reading of a body, nor the sending of a response.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request

from services.api.dependencies import PlatformOf
from services.streams.connection.client import RedisUnavailableError

DEADLINE_S = 4.0
"""Shorter than what clients wait for, and far shorter than a command waits for Redis elsewhere."""
READS = frozenset({"GET", "HEAD", "OPTIONS"})


class RedisSilentError(RedisUnavailableError):
    """Redis has not answered within a request's deadline; the text names its address and what waited."""


async def redis_deadline(request: Request, platform: PlatformOf) -> AsyncIterator[None]:
    """A dependency around the route and all that it depends on. Raises RedisSilentError after DEADLINE_S seconds.

    A route that reads files when it has what it needs of Redis calls `beyond_redis`.
    """
    deadline = asyncio.timeout(DEADLINE_S)
    request.state.redis_deadline = deadline
    try:
        async with deadline:
            yield
    except TimeoutError:
        if not deadline.expired():
            raise
        known = platform.redis.get_retry()
        route = getattr(request.scope.get("route"), "path", request.url.path)
        unsure = "" if request.method in READS else "; whether the change was made is not known: look before you repeat"
        raise RedisSilentError(
            f"{request.method} {route} waited for Redis at {known.address}, which has not answered within "
            f"{DEADLINE_S:g} s ({known.reason}){unsure}"
        ) from None


def beyond_redis(request: Request) -> None:
    """The rest of the request's work needs no Redis: its deadline ends."""
    request.state.redis_deadline.reschedule(None)


@asynccontextmanager
async def without_redis(request: Request) -> AsyncIterator[None]:
    """Work amid a request that needs files instead of Redis: the deadline starts again behind it."""
    beyond_redis(request)
    yield
    request.state.redis_deadline.reschedule(asyncio.get_running_loop().time() + DEADLINE_S)
