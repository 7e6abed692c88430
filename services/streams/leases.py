"""Owns delivery: reading a stream as a consumer group, leases and their renewal, dead letters.

Must not know what a message means beyond its type.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Generic, TypeVar

from pydantic import ValidationError
from redis.exceptions import ResponseError

from services.cancellation import end
from services.contracts import Cause, DeadLetter, Message
from services.streams.connection import Redis
from services.streams.keys import RunKeys

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Lease:
    """The right to work on one entry, until it is acked or the lease lapses unrenewed."""

    stream: str
    consumer_group: str
    consumer: str
    entry: str


@dataclass(frozen=True)
class Delivery(Generic[M]):
    """A message under lease. `deliveries` counts this one; above 1 a former consumer did not ack it."""

    lease: Lease
    message: M
    deliveries: int


class Consumer(Generic[M]):
    """One member of a consumer group on one stream.

    An entry whose lease lapsed is taken over; one delivered more than `max_deliveries` times, or that is not
    a valid `model`, goes to the dead-letter stream with its reason.
    """

    def __init__(
        self, redis: Redis, keys: RunKeys, stream: str, group: str, name: str, model: type[M],
        lease_s: float, max_deliveries: int,
    ) -> None:  # fmt: skip
        self._redis = redis
        self._keys = keys
        self._stream = stream
        self._group = group
        self._name = name
        self._model = model
        self._lease_ms = int(lease_s * 1000)
        self._max_deliveries = max_deliveries
        self._next_reclaim = 0.0
        lua = files("services.streams").joinpath("lua")
        self._renew = redis.register_script(lua.joinpath("renew.lua").read_text())
        self._give_up = redis.register_script(lua.joinpath("give_up.lua").read_text())

    async def open(self) -> None:
        """Create the consumer group at the stream's beginning, unless it exists."""
        try:
            await self._redis.xgroup_create(self._stream, self._group, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    async def read(self, count: int, block_s: float) -> list[Delivery[M]]:
        """Up to `count` messages: lapsed leases first, then new entries; waits at most `block_s` seconds."""
        if time.monotonic() >= self._next_reclaim:
            reclaimed = await self._reclaim(count)
            if reclaimed:
                return reclaimed
            self._next_reclaim = time.monotonic() + self._lease_ms / 3000
        block = max(1, int(block_s * 1000))
        reply = await self._redis.xreadgroup(self._group, self._name, {self._stream: ">"}, count=count, block=block)
        found = []
        for _, entries in reply or []:
            for entry, fields in entries:
                delivery = await self._open_entry(entry.decode(), fields, 1)
                if delivery:
                    found.append(delivery)
        return found

    async def _reclaim(self, count: int) -> list[Delivery[M]]:
        reply = await self._redis.xautoclaim(
            self._stream, self._group, self._name, min_idle_time=self._lease_ms, count=count
        )
        found = []
        for entry, fields in reply[1]:
            pending = await self._redis.xpending_range(self._stream, self._group, entry, entry, 1)
            deliveries = int(pending[0]["times_delivered"]) if pending else 1
            log.warning("%s: entry %s taken over (delivery %d)", self._stream, entry.decode(), deliveries)
            delivery = await self._open_entry(entry.decode(), fields, deliveries)
            if delivery:
                found.append(delivery)
        return found

    async def _open_entry(self, entry: str, fields: dict[bytes, bytes], deliveries: int) -> Delivery[M] | None:
        body = fields.get(b"m", b"")
        lease = Lease(self._stream, self._group, self._name, entry)
        if deliveries > self._max_deliveries:
            reason = f"delivered {deliveries - 1} times without an ack"
            await self.give_up(lease, body, reason, deliveries, Cause.DELIVERIES)
            return None
        try:
            return Delivery(lease, self._model.model_validate_json(body), deliveries)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            reason = f"not a valid {self._model.__name__}: {where}: {first['msg']}"
            await self.give_up(lease, body, reason, deliveries, Cause.INVALID)
            return None

    async def give_up(self, lease: Lease, body: bytes, reason: str, deliveries: int, cause: Cause) -> None:
        """Move an entry to the dead-letter stream, with its reason."""
        text = body.decode(errors="replace")
        group, prompt = _origin(self._model, body)
        letter = DeadLetter(
            stream=self._stream, entry=lease.entry, reason=reason, deliveries=deliveries, cause=cause, group=group,
            prompt=prompt, body=text[:65536],
        )  # fmt: skip
        log.error("%s: entry %s is given up: %s", self._stream, lease.entry, reason)
        await self._give_up(
            keys=[self._stream, self._keys.dead], args=[self._group, lease.entry, letter.model_dump_json()]
        )

    async def ack(self, lease: Lease) -> None:
        """Be done with an entry that called for no effect."""
        await self._redis.xack(self._stream, self._group, lease.entry)

    async def still_owned(self, lease: Lease) -> bool:
        """Renew the lease once; False when another consumer owns the entry or it was acked."""
        return bool(await self._renew(keys=[lease.stream], args=[lease.consumer_group, lease.consumer, lease.entry]))

    @asynccontextmanager
    async def renewing(self, lease: Lease) -> AsyncIterator[None]:
        """Keep the lease alive, three times per lease, while the body works."""

        async def renew() -> None:
            while True:
                await asyncio.sleep(self._lease_ms / 3000)
                if not await self.still_owned(lease):
                    return

        task = asyncio.create_task(renew(), name=f"renewal of {lease.entry} on {lease.stream}")
        try:
            yield
        finally:
            await end(task)


def _origin(model: type[Message], body: bytes) -> tuple[str | None, str | None]:
    """The group and the prompt's id that a message is about, as far as it can be read and names them."""
    try:
        message = model.model_validate_json(body)
    except ValidationError:
        return None, None
    return getattr(message, "group", None), getattr(getattr(message, "prompt", None), "id", None)


async def tail(
    redis: Redis, stream: str, after: str, count: int = 100, block_s: float = 0.0
) -> list[tuple[str, bytes]]:
    """Entries behind `after` as (id, message), for readers that each need all of them; no group, no ack."""
    if block_s:
        reply = await redis.xread({stream: after}, count=count, block=int(block_s * 1000))
        entries = reply[0][1] if reply else []
    else:
        entries = await redis.xrange(stream, min=f"({after}", count=count)
    return [(entry.decode(), fields.get(b"m", b"")) for entry, fields in entries]
