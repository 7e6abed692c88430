"""Owns leases: the right to work on an entry, its renewal, and the end of work whose lease was lost.

Must not read a stream or ack an entry; the consumer does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from redis.exceptions import RedisError, ResponseError

from services.streams.connection.answers import code_of
from services.streams.connection.client import Redis
from services.streams.connection.functions import call

log = logging.getLogger(__name__)

CHECKED_AT_ONCE = 500
RETURNED = "returned"
"""The consumer that holds entries which were returned, until another one takes them."""


@dataclass(frozen=True)
class Lease:
    """The right to work on one entry, until it is acked or the lease lapses unrenewed."""

    stream: str
    consumer_group: str
    consumer: str
    entry: str


class LeaseLostError(RuntimeError):
    """Another consumer took the entry over, or it was acked or deleted: work on it has no effect any more."""


async def renew_lease(redis: Redis, lease: Lease) -> bool:
    """Renew a lease once; False if another consumer owns the entry or it was acked."""
    renewed = await call(
        redis,
        "renew_lease",
        stream_key=lease.stream,
        consumer_group=lease.consumer_group,
        consumer=lease.consumer,
        entry=lease.entry,
    )
    return bool(renewed)


async def return_lease(redis: Redis, lease: Lease, lease_s: float) -> bool:
    """Return an entry that this consumer cannot finish: others take it at once, and the delivery is not counted.

    False if another consumer owns the entry or it was acked.
    """
    returned = await call(
        redis,
        "return_lease",
        stream_key=lease.stream,
        consumer_group=lease.consumer_group,
        consumer=lease.consumer,
        entry=lease.entry,
        returned=RETURNED,
        idle_ms=int(lease_s * 1000) + 1,
    )
    return bool(returned)


async def restart_leases(redis: Redis, stream: str, consumer_group: str) -> None:
    """Let those leases of a stream begin now that seem to begin in the future: the server's clock was set back since.

    Otherwise that of a dead process would lapse only when the clock has caught up. A lease of this very millisecond
    looks the same, and keeps its time.
    """
    after = "-"
    try:
        while leases := await redis.xpending_range(stream, consumer_group, after, "+", CHECKED_AT_ONCE):
            held = [(lease["consumer"].decode(), lease["message_id"].decode()) for lease in leases]
            ages = [lease["time_since_delivered"] for lease in leases]
            young = [Lease(stream, consumer_group, *each) for each, age in zip(held, ages, strict=True) if age == 0]
            await asyncio.gather(*(renew_lease(redis, lease) for lease in young))
            after = f"({held[-1][1]}"
    except ResponseError as error:
        if code_of(error) != "NOGROUP":  # no consumer has opened the stream yet, or a rewind deleted it
            raise


class LeaseRenewal:
    """Renews the held leases of one consumer, three times within the duration of a lease, all in one command."""

    def __init__(self, redis: Redis, lease_s: float) -> None:
        self._redis = redis
        self._every_s = lease_s / 3
        self._held: dict[Lease, Callable[[Lease], None]] = {}
        self._renewing: asyncio.Task[None] | None = None

    @contextmanager
    def watching(self, leases: Iterable[Lease], on_loss: Callable[[Lease], None]) -> Iterator[None]:
        """Renew leases while the body runs; `on_loss` is called once with each that is lost meanwhile."""
        mine = dict.fromkeys(leases, on_loss)
        self._held |= mine
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew(), name="lease renewal")
        try:
            yield
        finally:
            self._release(mine)

    @asynccontextmanager
    async def holding(self, lease: Lease) -> AsyncIterator[None]:
        """Renew the lease while the body runs; once it is lost, cancel the body and raise LeaseLostError."""
        try:
            async with asyncio.timeout(None) as body:
                with self.watching([lease], lambda _: body.reschedule(asyncio.get_running_loop().time())):
                    yield
        except TimeoutError:
            if not body.expired():
                raise
            raise LeaseLostError(f"the lease of {lease.entry} on {lease.stream} was lost") from None

    def _release(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self._held.pop(lease, None)
        if not self._held and self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            leases = list(self._held)
            try:
                renewed = await asyncio.gather(*(renew_lease(self._redis, lease) for lease in leases))
            except (RedisError, OSError) as error:
                log.warning("%d leases were not renewed and may lapse: %s", len(leases), error)
                continue
            for lease, kept in zip(leases, renewed, strict=True):
                if not kept and (on_loss := self._held.pop(lease, None)):
                    on_loss(lease)
