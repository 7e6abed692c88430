"""Owns the connection to Redis: one checked client per process, which waits while Redis is unavailable.

Must not hold keys or messages.

Every command, pipeline, script and connection attempt is retried with exponential back-off for RECONNECT_S s while
Redis is unavailable, or rejects it for a reason that passes (see `answers`). With Sentinels, each attempt asks them for
the master's address. A command whose answer was lost may therefore run twice. Every command that Penstock sends
tolerates this: sets and deletes have the same result; a fence that is raised twice still rejects every previous owner;
the second run of an effect finds the first and changes nothing (and replies False, which need not mean that another
process was first); entries delivered by a lost read stay pending and are delivered again when their lease lapses; an
event may be logged twice. A transaction that watches keys is not
retried here: its caller handles WatchError.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, TypeAlias, TypeVar

from redis import asyncio as redis_asyncio
from redis import exceptions as redis_errors
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from services.streams.connection.answers import Answer, answer_to
from services.streams.connection.credentials import RedisSettingError
from services.streams.connection.outages import Outage
from services.streams.connection.pools import make_pool
from services.streams.connection.url import parse_redis_url, redacted

log = logging.getLogger(__name__)

T = TypeVar("T")

# redis-py types each reply as a union over both protocols and both decodings. `client` fixes both (RESP2, bytes),
# which its types cannot express.
Redis: TypeAlias = Any

OLDEST_SERVER = (7, 0)
RECONNECT_S = 60.0
"""How long a command waits while Redis is unavailable: a restart, and the loading of a large append-only file."""
ANSWER_S = 15.0
"""How long one answer may take. Longer than any BLOCK, else a blocking read would count as a dead connection; far
shorter than RECONNECT_S, so that a connection that died silently leaves time for another one."""
CONNECT_S = 5.0
BACKOFF_S = (0.05, 1.0)
LOG_S = 5.0
CONNECTIONS = 12
"""The most connections of one client. A blocking read holds one while it waits; other commands wait for their turn."""
# By the mode that a server reports: why it cannot be used.
_UNUSABLE = {
    "cluster": "is part of a Redis Cluster, which is not supported: expected one server, or one that Sentinels watch",
    "sentinel": "is a Sentinel: expected redis+sentinel://host:port,host:port/SERVICE/db",
}


class RedisUnavailableError(RuntimeError):
    """Redis is unreachable, rejects the client, or is too old. The text names the address, never a password."""


class RedisOutageError(redis_errors.ConnectionError, RedisUnavailableError):
    """Redis has been unavailable for longer than a command waits."""


_within: ContextVar[bool] = ContextVar("_within", default=False)
_waited_since: ContextVar[float | None] = ContextVar("_waited_since", default=None)
"""Since when (monotonic seconds) the command that now got a connection waited for it; None if it did not wait."""


class OutageRetry(Retry):
    """The retry policy of all connections of one client: retry until Redis has been unavailable for `limit_s` seconds.

    redis-py nests its retries: a command connects, and a connection tests itself, each with the same object. Only the
    outermost call retries, else the limits would multiply.
    """

    def __init__(self, address: str, limit_s: float) -> None:
        super().__init__(NoBackoff(), -1)
        self.address = address
        self._limit_s = limit_s
        self.outage = Outage()
        self._logged_at = float("-inf")
        self._has_answered = False
        self.reason = "no answer"

    def __deepcopy__(self, _: dict[int, Any]) -> OutageRetry:
        # Each connection copies its retry; all of them share what is known about the server.
        return self

    async def call_with_retry(
        self,
        do: Callable[[], Awaitable[T]],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        """The result of `do`. Raises RedisOutageError, and at once any error that waiting cannot cure."""
        if _within.get():
            return await do()
        token = _within.set(True)
        try:
            return await self._retry(do, fail, with_failure_count)
        finally:
            _within.reset(token)

    async def _retry(self, do: Callable[[], Awaitable[T]], fail: Callable[..., Any], counted: bool) -> T:
        failures, ends = 0, float("inf")
        if (since := _waited_since.get()) is not None:
            _waited_since.set(None)
            ends = since + self._limit_s
        while True:
            try:
                result = await do()
            except (redis_errors.RedisError, OSError) as error:
                if not self._waits_for(error):
                    raise
                now = time.monotonic()
                failures, ends = failures + 1, min(ends, now + self._limit_s)
                await fail(*((error, failures) if counted else (error,)))
                if now >= ends:
                    raise RedisOutageError(
                        f"Redis at {self.address} has been unavailable for {self._limit_s:g} s: {error}"
                    ) from None
                self._log_failure(error, ends - now)
                await asyncio.sleep(min(_pause(failures), ends - now))
            else:
                self._log_answer()
                return result

    async def wait_for_turn(self, turns: asyncio.Semaphore) -> float | None:
        """Wait for a free connection. Since when (monotonic seconds); None if one was free. Raises RedisOutageError."""
        if not turns.locked():
            await turns.acquire()
            return None
        since = time.monotonic()
        try:
            async with asyncio.timeout(self._limit_s):
                await turns.acquire()
        except TimeoutError:
            raise RedisOutageError(
                f"Redis at {self.address} has been unavailable for {self._limit_s:g} s: all connections "
                f"of this client were in use ({self.reason})"
            ) from None
        return since

    def count_from(self, since: float | None) -> None:
        """Let the wait of this task's next command count from `since`."""
        _waited_since.set(since)

    def _log_failure(self, error: Exception, left_s: float) -> None:
        now = time.monotonic()
        self.reason = str(error).rstrip(".") or type(error).__name__
        self.outage.failed()
        if now - self._logged_at >= LOG_S:
            self._logged_at = now
            log.warning(
                "Redis at %s is unavailable: %s; retrying for another %.0f s", self.address, self.reason, left_s
            )

    def _waits_for(self, error: Exception) -> bool:
        """Whether waiting may help: the server is unreachable or unable, or a password or certificate changes."""
        answer = answer_to(error)
        return answer is Answer.WAIT or (answer is Answer.WAIT_IF_KNOWN and self._has_answered)

    def _log_answer(self) -> None:
        self._has_answered = True
        if self.outage.since is not None:
            log.warning("Redis at %s answers again after %.1f s", self.address, self.outage.over())
            self._logged_at = float("-inf")


def _pause(failures: int) -> float:
    """Seconds before the next attempt; random, so that not all clients reconnect at once."""
    first, longest = BACKOFF_S
    return min(longest, first * 2.0 ** min(failures, 30)) * random.uniform(0.5, 1.0)


def client(url: str, patience_s: float = RECONNECT_S, answer_s: float = ANSWER_S) -> Redis:
    """A client whose commands wait up to `patience_s` seconds while Redis is unavailable, then raise RedisOutageError.

    A connection whose answer takes longer than `answer_s` seconds is replaced. Raises RedisUnavailableError for an
    address, a password file or a certificate that cannot be used.
    """
    try:
        address = parse_redis_url(url)
        pool = make_pool(
            address,
            protocol=2,
            driver_info=None,  # sending it needs another permission, which Redis 7.0 does not have
            socket_connect_timeout=min(CONNECT_S, answer_s),
            socket_timeout=answer_s,
            health_check_interval=15,
            max_connections=CONNECTIONS,
            retry=OutageRetry(str(address), patience_s),
        )
    except ValueError as error:
        raise RedisUnavailableError(str(error)) from None
    return redis_asyncio.Redis.from_pool(pool)


async def connect(url: str, deadline_s: float = RECONNECT_S) -> Redis:
    """A client of a server that answered and can be used. Raises RedisUnavailableError after `deadline_s` seconds."""
    _check(f"Redis at {redacted(url)}", await _facts(url, deadline_s))
    return client(url)


async def _facts(url: str, deadline_s: float, *sections: str) -> dict[str, Any]:
    """INFO of the server, over a connection of its own. Raises RedisUnavailableError after `deadline_s` seconds."""
    probe = client(url, deadline_s, min(ANSWER_S, deadline_s))
    try:
        async with asyncio.timeout(deadline_s):
            found: dict[str, Any] = await probe.info(*sections)
            return found
    except RedisSettingError as error:
        raise RedisUnavailableError(str(error)) from None
    except redis_errors.AuthenticationError as error:
        raise RedisUnavailableError(f"Redis at {redacted(url)} rejected the credentials: {error}") from None
    except (RedisOutageError, TimeoutError):
        raise RedisUnavailableError(
            f"Redis at {redacted(url)} cannot be reached within {deadline_s:g} s: {probe.get_retry().reason}"
        ) from None
    except redis_errors.RedisError as error:
        raise RedisUnavailableError(f"Redis at {redacted(url)} cannot be used: {error}") from None
    finally:
        await probe.aclose()


def _check(server: str, info: dict[str, Any]) -> None:
    """Raises RedisUnavailableError for a server that cannot be used, judged by its INFO."""
    mode = info.get("redis_mode") or info.get("server_mode", "standalone")  # the field's name in Redis, and in Valkey
    if mode in _UNUSABLE:
        raise RedisUnavailableError(f"{server} {_UNUSABLE[mode]}")
    version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if version < OLDEST_SERVER:
        raise RedisUnavailableError(
            f"{server} is version {info['redis_version']}; 7.0 or newer (or Valkey) is required"
        )
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        log.warning("%s has the maxmemory-policy %s and may evict data of runs; set noeviction", server, policy)


async def connection_problem(redis: Redis, deadline_s: float = 5.0) -> str | None:
    """Why Redis does not answer within `deadline_s` seconds, or None when it does."""
    try:
        async with asyncio.timeout(deadline_s):
            await redis.ping()
    except TimeoutError:
        # The command was cancelled, so that its own attempt has not failed yet.
        redis.get_retry().outage.failed()
        return f"no answer within {deadline_s:g} s: {redis.get_retry().reason}"
    except (redis_errors.RedisError, OSError) as error:
        return str(error)
    return None


async def server_id(url: str, deadline_s: float) -> str:
    """Which server a new connection reaches: it has another id after a restart, and after a failover to a replica.

    Empty where a server does not say. Raises RedisUnavailableError after `deadline_s` seconds.
    """
    return str((await _facts(url, deadline_s, "server")).get("run_id", ""))
