"""Owns how connections are opened: to one server, or to the master that Sentinels name.

Must not decide how long a command waits for Redis: each connection's `retry` does.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast
from weakref import WeakKeyDictionary

from redis import asyncio as redis_asyncio
from redis import exceptions as redis_errors
from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import NoBackoff
from redis.connection import HiredisRespSerializer

from services.streams.connection.credentials import TrustedCertificates, sentinel_credentials, server_credentials
from services.streams.connection.url import RedisUrl

SENTINEL_S = 1.0
"""How long one Sentinel may take to answer before the next one is asked."""
FRESH_S = 0.3
"""How long all connections use one answer of the Sentinels: a fleet that reconnects must not overload them."""
IDLE_S = 15.0
"""How long a connection may be idle."""
LOOK_S = 1.0
"""How often the Sentinels are asked in normal operation. After a failover the previous master still runs, and for about
ten seconds it accepts writes that are lost afterwards."""


class _Trusting:
    """A TLS connection that shares the SSL context of its pool: creating one blocks the event loop for 25 ms."""

    ssl_context: Any

    def __init__(self, *, trust: TrustedCertificates, **options: Any) -> None:
        super().__init__(**options)
        self.ssl_context = trust


class _Packing:
    """A connection that packs commands in C. redis-py's asynchronous one does so in Python, argument by argument.

    It also loses no cancellation: redis-py sends with asyncio.wait_for, which in Python 3.11 returns, as if there had
    been none, when a deadline ends in the same turn of the loop as the sending. The command would then wait on.
    """

    _serializer = HiredisRespSerializer()

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        await super().send_packed_command(command, check_health)  # type: ignore[misc]
        if task.cancelling() > before:
            await self.disconnect(nowait=True)  # type: ignore[attr-defined]  # its answer is no later command's
            raise asyncio.CancelledError

    def pack_command(self, *args: Any) -> list[bytes]:
        packed: list[bytes] = self._serializer.pack(*args)
        return packed


class _Connection(_Packing, Connection):
    pass


class _TlsConnection(_Trusting, _Packing, SSLConnection):
    pass


class _MasterConnection(_Packing, SentinelManagedConnection):
    """A connection that asks the Sentinels whenever it connects.

    redis-py's own class does so only when the connection is taken from the pool: a retried command would go to the
    previous master.
    """

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if not self.is_connected:
            await self.connect()  # type: ignore[no-untyped-call]
        await super().send_packed_command(command, check_health)


class _TlsMasterConnection(_Trusting, _MasterConnection, SentinelManagedSSLConnection):
    pass


class _ServerPool(ConnectionPool):
    """redis-py's pool with a queue: a command waits for its turn when all connections are in use.

    That wait, and the preparation of a connection, end like a command's wait for Redis. Idle connections are closed.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._turns = asyncio.Semaphore(self.max_connections)
        self._idle_since: WeakKeyDictionary[Any, float] = WeakKeyDictionary()

    async def get_connection(self, command_name: str | None = None, *keys: Any, **options: Any) -> Any:
        """A connected connection. Raises what `retry` raises when none becomes free, or Redis stays unavailable."""
        retry = self.connection_kwargs["retry"]
        since = await retry.wait_for_turn(self._turns)
        connection = cast(Any, super()).get_available_connection()
        try:
            retry.count_from(since)
            await self.ensure_connection(connection)
        except BaseException:
            await self.release(connection)
            raise
        retry.count_from(since)  # for the command that gets the connection
        return connection

    async def release(self, connection: Any) -> None:
        """Return a connection, and close those that were idle for IDLE_S."""
        try:
            await super().release(connection)
            self._idle_since[connection] = time.monotonic()
        finally:
            self._turns.release()
        await self._close_idle(time.monotonic() - IDLE_S)

    async def _close_idle(self, since: float) -> None:
        # The connection that was returned last is taken first, so the first in the list is the longest idle one.
        while self._available_connections and self._idle_since.get(self._available_connections[0], since) < since:
            await self._available_connections.pop(0).disconnect(nowait=True)

    async def ensure_connection(self, connection: Any) -> None:
        await connection.retry.call_with_retry(
            lambda: super(_ServerPool, self).ensure_connection(connection), lambda _: connection.disconnect(nowait=True)
        )


class _MasterPool(SentinelConnectionPool, _ServerPool):
    """The pool of connections to a service's master, at the address that the Sentinels report."""

    _asked: asyncio.Task[tuple[str, int]] | None = None
    _asked_at = 0.0

    async def get_master_address(self) -> tuple[str, int]:
        """The Sentinels' answer. Raises redis-py's MasterNotFoundError.

        redis-py would close the idle connections to a previous master here, although another task may have taken one of
        them meanwhile; this pool closes them when they are taken.
        """
        return await asyncio.shield(self._ask(FRESH_S))

    async def ensure_connection(self, connection: Any) -> None:
        if connection.is_connected:
            self._ask(LOOK_S)  # for the next command: this one does not wait for the answer
            if (connection.host, connection.port) != self.master_address:
                await connection.disconnect(nowait=True)
        await super().ensure_connection(connection)

    def _ask(self, age_s: float) -> asyncio.Task[tuple[str, int]]:
        """Ask for the master, unless that was done in the last `age_s` seconds or a request is in flight."""
        now = time.monotonic()
        if self._asked is None or (self._asked.done() and now - self._asked_at > age_s):
            self._asked_at = now
            self._asked = asyncio.create_task(self.sentinel_manager.discover_master(self.service_name))
            self._asked.add_done_callback(self._store_answer)
        return self._asked

    def _store_answer(self, asked: asyncio.Task[tuple[str, int]]) -> None:
        if not asked.cancelled() and asked.exception() is None:
            self.master_address = asked.result()

    async def aclose(self) -> None:
        """Close the connections to the master and to the Sentinels."""
        if self._asked is not None:
            self._asked.cancel()
            await asyncio.wait([self._asked])
        await super().aclose()
        await self.sentinel_manager.aclose()


class _UnansweredError(redis_errors.ConnectionError):
    def __repr__(self) -> str:  # redis-py logs this of a Sentinel that it could not ask
        return str(self)


class _SentinelClient(redis_asyncio.Redis):
    """A client of one Sentinel, whose errors say which Sentinel did not answer, and why."""

    def __repr__(self) -> str:
        options = self.connection_pool.connection_kwargs
        return f"Sentinel {options['host']}:{options['port']}"

    async def sentinel_masters(self, *arguments: Any, **options: Any) -> Any:
        """What the Sentinel knows of each master, by name. Raises redis-py's ConnectionError."""
        try:
            return await super().sentinel_masters(*arguments, **options)
        except (redis_errors.ConnectionError, redis_errors.TimeoutError) as error:
            raise _UnansweredError(str(error)) from None


def make_pool(address: RedisUrl, **options: Any) -> ConnectionPool:
    """A pool of connections to the address. `options` are those of redis-py's connections to Redis.

    Raises RedisSettingError for credentials and certificates that cannot be used.
    """
    trust = {"trust": TrustedCertificates()} if address.tls else {}
    options = {**options, **trust, **server_credentials(address), "db": address.db}
    if address.service is None:
        [(host, port)] = address.hosts
        kind: Any = _TlsConnection if address.tls else _Connection
        return _ServerPool(connection_class=kind, host=host, port=port, **options)
    kind = _TlsMasterConnection if address.tls else _MasterConnection
    make: Any = _MasterPool  # redis-py leaves it untyped
    return cast(ConnectionPool, make(address.service, _sentinels(address, trust), connection_class=kind, **options))


def _sentinels(address: RedisUrl, trust: dict[str, TrustedCertificates]) -> Any:
    kind: Any = _TlsConnection if address.tls else Connection
    options = {
        **trust,
        **sentinel_credentials(),
        "protocol": 2,
        "driver_info": None,
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": SENTINEL_S,
        "socket_timeout": SENTINEL_S,
        "connection_class": kind,
    }
    make: Any = Sentinel
    found = make([])
    found.sentinels = [
        _SentinelClient.from_pool(ConnectionPool(host=host, port=port, **options)) for host, port in address.hosts
    ]
    return found
