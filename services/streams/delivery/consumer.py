"""Owns delivery: reading a stream as a consumer group, leases and their renewal, dead letters.

Must not know what a message means beyond its type.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from redis.exceptions import ResponseError

from services.contracts import PROMPT_FAULTS, Cause, DeadLetter, Lane, Message
from services.metrics import REDELIVERED_MESSAGES
from services.streams.connection.answers import code_of
from services.streams.connection.client import Redis
from services.streams.connection.functions import call
from services.streams.delivery.leases import RETURNED, Lease, LeaseRenewal, return_lease
from services.streams.delivery.validation import Malformed, Source, admit, make_letter, origin
from services.streams.keys import RunKeys
from services.streams.retention import DEAD_KEPT

log = logging.getLogger(__name__)

TRIMMED_BEFORE, TRIMMED_AT_ONCE, TRIM_CALLS = 20_000, 1000, 20
"""About the most entries before the oldest unacked one that one call deletes, and the most after it, because Redis
serves no other client meanwhile; and the most calls of one trim."""
RETURNED_LOOK_S = 0.5
"""How often a consumer looks for entries that another one returned."""

M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Delivery(Generic[M]):
    """A message under lease. `deliveries` includes this one; above 1, a previous consumer did not ack it."""

    lease: Lease
    message: M
    deliveries: int


class Consumer(Generic[M]):
    """One member of a consumer group on one stream.

    It takes over entries whose lease lapsed. An entry that was delivered more than `max_deliveries` times, or is not a
    `model` of this run, goes to the dead-letter stream with its reason.
    """

    def __init__(
        self,
        redis: Redis,
        keys: RunKeys,
        stream: str,
        group: str,
        name: str,
        model: type[M],
        lease_s: float,
        max_deliveries: int,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._stream = stream
        self._group = group
        self._name = name
        self._model = model
        self._lease_s = lease_s
        self._lease_ms = int(lease_s * 1000)
        self._renewal = LeaseRenewal(redis, lease_s)
        self._max_deliveries = max_deliveries
        self._next_reclaim = self._next_look = 0.0

    async def open(self) -> None:
        """Create the consumer group at the start of the stream, unless it exists.

        Raises FencedError for a run without a record, which was deleted.
        """
        await call(
            self._redis,
            "create_consumer_group",
            record_key=self._keys.record,
            stream_key=self._stream,
            consumer_group=self._group,
        )

    async def read(self, count: int, block_s: float) -> list[Delivery[M]]:
        """Up to `count` messages: lapsed leases first, then new entries; waits at most `block_s` seconds."""
        try:
            return await self._read(count, block_s)
        except ResponseError as error:
            if code_of(error) != "NOGROUP":
                raise
            # A rewind deleted the run's streams.
            log.info("%s: consumer group %s is gone; creating it again", self._stream, self._group)
            await self.open()
            return []

    async def _read(self, count: int, block_s: float) -> list[Delivery[M]]:
        if time.monotonic() >= self._next_look:
            if returned := await self._take_returned(count):
                return returned
            self._next_look = time.monotonic() + RETURNED_LOOK_S
        if time.monotonic() >= self._next_reclaim:
            reclaimed = await self._reclaim(count)
            if reclaimed:
                return reclaimed
            self._next_reclaim = time.monotonic() + self._lease_ms / 3000
        block = int(block_s * 1000) or None
        reply = await self._redis.xreadgroup(self._group, self._name, {self._stream: ">"}, count=count, block=block)
        entries = [(entry, fields, 1) for _, messages in reply or [] for entry, fields in messages]
        return await self._open_entries(entries)

    async def _take_returned(self, count: int) -> list[Delivery[M]]:
        waiting = await self._redis.xpending_range(self._stream, self._group, "-", "+", count, RETURNED)
        if not waiting:
            return []
        # Those that another consumer takes at the same time have a new lease by then.
        ids = [lease["message_id"] for lease in waiting]
        claimed = await self._redis.xclaim(self._stream, self._group, self._name, self._lease_ms, ids)
        return await self._open_claimed([each for each in claimed if each[0] is not None], returned=True)

    async def _reclaim(self, count: int) -> list[Delivery[M]]:
        # One call checks ten leases per entry wanted; live leases at the front must not hide lapsed ones behind them.
        start = b"0-0"
        claimed: list[tuple[bytes, dict[bytes, bytes]]] = []
        while not claimed:
            start, claimed, *_ = await self._redis.xautoclaim(
                self._stream, self._group, self._name, self._lease_ms, start, count
            )
            if start == b"0-0":
                break
        return await self._open_claimed(claimed)

    async def _open_claimed(
        self, claimed: list[tuple[bytes, dict[bytes, bytes]]], *, returned: bool = False
    ) -> list[Delivery[M]]:
        if not claimed:
            return []
        async with self._redis.pipeline(transaction=False) as pipe:
            for entry, _ in claimed:
                pipe.xpending_range(self._stream, self._group, entry, entry, 1, self._name)
            leases = await pipe.execute()
        entries = []
        for (entry, fields), lease in zip(claimed, leases, strict=True):
            if not lease:
                log.info("%s: entry %s was acked or taken over at once", self._stream, entry.decode())
                continue
            deliveries = int(lease[0]["times_delivered"])
            level, how = (logging.INFO, "returned and taken") if returned else (logging.WARNING, "taken over")
            log.log(level, "%s: entry %s %s (delivery %d)", self._stream, entry.decode(), how, deliveries)
            entries.append((entry, fields, deliveries))
        if not returned:
            REDELIVERED_MESSAGES.labels(self._keys.run, self._keys.stream_name(self._stream)).inc(len(entries))
        return await self._open_entries(entries)

    async def _open_entries(self, entries: list[tuple[bytes, dict[bytes, bytes], int]]) -> list[Delivery[M]]:
        opened = [await self._open_entry(entry.decode(), fields, deliveries) for entry, fields, deliveries in entries]
        return [delivery for delivery in opened if delivery]

    async def _open_entry(self, entry: str, fields: dict[bytes, bytes], deliveries: int) -> Delivery[M] | None:
        body = fields.get(b"m", b"")
        lease = Lease(self._stream, self._group, self._name, entry)
        admitted = admit(self._keys, self._model, body)
        if isinstance(admitted, Malformed):
            await self._dead_letter(lease, admitted.letter(Source(self._stream, entry, body, deliveries)))
            return None
        if deliveries > self._max_deliveries:
            reason = f"delivered {deliveries - 1} times without an ack"
            await self.dead_letter(Delivery(lease, admitted, deliveries), reason, Cause.DELIVERIES)
            return None
        return Delivery(lease, admitted, deliveries)

    async def dead_letter(self, delivery: Delivery[M], reason: str, cause: Cause) -> None:
        """Move a message to the dead-letter stream, with its reason."""
        body = delivery.message.model_dump_json().encode()
        letter = make_letter(
            Source(self._stream, delivery.lease.entry, body, delivery.deliveries),
            reason,
            cause,
            *origin(delivery.message),
        )
        await self._dead_letter(delivery.lease, letter)

    async def _dead_letter(self, lease: Lease, letter: DeadLetter) -> None:
        await discard_entry(self._redis, self._keys, self._stream, lease.entry, letter, consumer_group=self._group)

    async def ack(self, lease: Lease) -> None:
        """Ack an entry that needs no effect."""
        await self._redis.xack(self._stream, self._group, lease.entry)

    async def give_back(self, lease: Lease) -> bool:
        """Return an entry that this process cannot finish; see return_lease."""
        return await return_lease(self._redis, lease, self._lease_s)

    def renewing(self, lease: Lease) -> AbstractAsyncContextManager[None]:
        """Renew the lease while the body runs. Once it is lost, cancel the body: LeaseLostError."""
        return self._renewal.holding(lease)

    @contextmanager
    def watching(self, leases: Iterable[Lease]) -> Iterator[set[Lease]]:
        """Renew leases while the body runs. Yields those that were lost so far: work on them has no effect."""
        lost: set[Lease] = set()
        with self._renewal.watching(leases, lost.add):
            yield lost


async def trim(redis: Redis, stream: str, consumer_group: str, gone_after_s: float, longest: int) -> int:
    """Delete the entries that a stream's only consumer group has acked, and consumers that are gone.

    Returns the number of deleted entries.
    All entries before the oldest unacked one are deleted; after it, only the excess over `longest` entries, the oldest
    first. So a stream keeps at most `longest` entries, or the unacked ones and one more if these are more. A consumer
    is gone if it held no lease and read nothing for `gone_after_s` seconds.
    """
    total = 0
    for _ in range(TRIM_CALLS):
        dropped = await call(
            redis,
            "trim",
            stream_key=stream,
            consumer_group=consumer_group,
            gone_after_ms=int(gone_after_s * 1000),
            longest=longest,
            most_before=TRIMMED_BEFORE,
            most_behind=TRIMMED_AT_ONCE,
        )
        total += dropped
        if dropped < TRIMMED_AT_ONCE:
            break
    return total


async def tail(
    redis: Redis, stream: str, after: str, count: int = 100, block_s: float = 0.0
) -> list[tuple[str, bytes]]:
    """Entries after id `after` as (id, message), for readers that each need all entries; no consumer group, no ack."""
    if block_s:
        reply = await redis.xread({stream: after}, count=count, block=int(block_s * 1000))
        entries = reply[0][1] if reply else []
    else:
        entries = await redis.xrange(stream, min=f"({after}", count=count)
    return [(entry.decode(), fields.get(b"m", b"")) for entry, fields in entries]


async def tail_messages(
    redis: Redis, keys: RunKeys, stream: str, model: type[M], after: str, count: int = 100, block_s: float = 0.0
) -> list[tuple[str, M]]:
    """Entries after id `after` as (id, message); an entry that is not a `model` of this run becomes a dead letter.

    The result is empty only at the end of the stream: entries after any number of invalid ones are read.
    """
    found: list[tuple[str, M]] = []
    while not found and (entries := await tail(redis, stream, after, count, block_s)):
        after, block_s = entries[-1][0], 0.0
        found = await _admit_bodies(redis, keys, stream, model, entries)
    return found


async def newest_messages(
    redis: Redis, keys: RunKeys, stream: str, model: type[M], before: str = "+", count: int = 100
) -> list[tuple[str, M]]:
    """Entries before id `before` like `tail_messages`, the newest first.

    The result is empty only at the beginning of the stream.
    """
    found: list[tuple[str, M]] = []
    end = before
    while not found and (entries := await redis.xrevrange(stream, max=end, count=count)):
        end = f"({entries[-1][0].decode()}"
        found = await admit_entries(redis, keys, stream, model, entries)
    return found


async def admit_entries(
    redis: Redis, keys: RunKeys, stream: str, model: type[M], entries: list[tuple[bytes, dict[bytes, bytes]]]
) -> list[tuple[str, M]]:
    """Those entries of a stream that are a `model` of this run; each other one becomes a dead letter."""
    bodies = [(entry.decode(), fields.get(b"m", b"")) for entry, fields in entries]
    return await _admit_bodies(redis, keys, stream, model, bodies)


async def _admit_bodies(
    redis: Redis, keys: RunKeys, stream: str, model: type[M], entries: list[tuple[str, bytes]]
) -> list[tuple[str, M]]:
    found = []
    for entry, body in entries:
        admitted = admit(keys, model, body)
        if isinstance(admitted, Malformed):
            await discard_entry(redis, keys, stream, entry, admitted.letter(Source(stream, entry, body)))
        else:
            found.append((entry, admitted))
    return found


def faulty_prompt(keys: RunKeys, letter: DeadLetter) -> str:
    """The id of the training prompt that is never drawn again because of a letter; "" if there is none."""
    faulty = letter.cause in PROMPT_FAULTS and letter.stream == keys.lane(Lane.TRAIN).tasks
    return letter.prompt or "" if faulty else ""


def rejection(stream: str, entry: str, message: Message, reason: str) -> DeadLetter:
    """The dead letter of a valid message whose content cannot be true; `reason` explains it."""
    return Malformed(reason).letter(Source(stream, entry, message.model_dump_json().encode()))


async def discard_entry(
    redis: Redis,
    keys: RunKeys,
    stream: str,
    entry: str,
    letter: DeadLetter,
    *,
    consumer_group: str = "",
    epoch_key: str = "",
    fence: str = "",
) -> None:
    """Replace an entry of a stream by its dead letter, once, and remember the prompt that the letter drops.

    The entry is acked for `consumer_group`, or deleted from a stream without one. `epoch_key`: of the role that `fence`
    is of; raises FencedError.
    """
    log.error("%s: entry %s is dead-lettered: %s", stream, entry, letter.reason)
    await call(
        redis,
        "discard_entry",
        stream_key=stream,
        dead_key=keys.dead,
        dropped_key=keys.dropped,
        epoch_keys=[epoch_key] if epoch_key else [],
        fence=fence,
        consumer_group=consumer_group,
        entry=entry,
        letter=letter.model_dump_json(),
        prompt=faulty_prompt(keys, letter),
        cause=letter.cause.value,
        letters_kept=DEAD_KEPT,
    )
