"""Owns the connection to Redis: one checked client per process, with bounded retries.

Must not hold keys or messages.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from redis import asyncio as redis_asyncio
from redis import exceptions as redis_errors
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

log = logging.getLogger(__name__)

# redis-py types each reply as a union over both protocols and both decodings. `client` fixes both (RESP2, bytes),
# which its types cannot express.
Redis: TypeAlias = Any

OLDEST_SERVER = (7, 0)


class RedisUnavailableError(RuntimeError):
    """Redis cannot be used: unreachable, refused, or too old. The text names the address, never a password."""


def redacted(url: str) -> str:
    """The address without its password, fit for a log."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}:{parts.port or 6379}{parts.path}"


def client(url: str) -> Redis:
    """A client that retries a broken connection five times with back-off (at most about 5 s)."""
    try:
        return redis_asyncio.Redis.from_url(
            url,
            protocol=2,
            socket_connect_timeout=5,
            socket_timeout=30,
            health_check_interval=15,
            retry=Retry(ExponentialBackoff(cap=2, base=0.1), 5),
            retry_on_error=[redis_errors.ConnectionError, redis_errors.TimeoutError],
        )
    except ValueError as error:
        raise RedisUnavailableError(
            f"--redis: {redacted(url)} is not accepted ({error}); redis://host:port/db is"
        ) from None


async def connect(url: str, deadline_s: float = 10.0) -> Redis:
    """Open a connection and check the server. Raises RedisUnavailableError after `deadline_s` seconds."""
    redis = client(url)
    ends = time.monotonic() + deadline_s
    while True:
        try:
            async with asyncio.timeout(deadline_s):
                info = await redis.info("server")
            break
        except redis_errors.AuthenticationError as error:
            await redis.aclose()
            raise RedisUnavailableError(f"Redis at {redacted(url)} refused the credentials: {error}") from None
        except (redis_errors.RedisError, OSError, TimeoutError) as error:
            if time.monotonic() >= ends:
                await redis.aclose()
                raise RedisUnavailableError(
                    f"Redis at {redacted(url)} cannot be reached within {deadline_s:g} s: {error}"
                ) from None
            log.warning("Redis at %s is not ready (%s); trying again", redacted(url), error)
            await asyncio.sleep(0.3)
    version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if version < OLDEST_SERVER:
        await redis.aclose()
        raise RedisUnavailableError(
            f"Redis at {redacted(url)} is version {info['redis_version']}; 7.0 or newer (or Valkey) is needed"
        )
    return redis


async def trouble(redis: Redis, deadline_s: float = 5.0) -> str | None:
    """Why Redis does not answer within `deadline_s` seconds, or None when it does."""
    try:
        async with asyncio.timeout(deadline_s):
            await redis.ping()
    except (redis_errors.RedisError, OSError) as error:
        return str(error) or f"no answer within {deadline_s:g} s"
    return None
