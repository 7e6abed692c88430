"""Owns a run's log for users: events, step records, evaluations, dead letters.

Must not be read to steer a run, except for dead letters, which evaluations are done, and new step records.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from typing import TypeVar

from services.contracts import DeadLetter, EvaluationRecord, Event, Message, StepRecord
from services.streams.connection.client import Redis
from services.streams.connection.functions import call
from services.streams.connection.reading import read_together
from services.streams.delivery.consumer import admit_entries, newest_messages, tail, tail_messages
from services.streams.delivery.validation import Malformed, Source, admit
from services.streams.keys import RunKeys
from services.streams.retention import EVENTS_KEPT

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

READ_AT_ONCE, LETTERS_SHOWN = 500, 200
FEW = 8
"""Records of steps that are read together where several were committed at almost the same time."""
LAST_OF_MS = 2**64 - 1
"""The highest number of an entry among those of one millisecond."""


async def read_all(redis: Redis, keys: RunKeys, stream: str, model: type[M], after: str = "0-0") -> list[tuple[str, M]]:
    """All messages after id `after`, with their ids; an invalid entry becomes a dead letter."""
    found: list[tuple[str, M]] = []
    while page := await tail_messages(redis, keys, stream, model, after, count=READ_AT_ONCE):
        found += page
        after = page[-1][0]
    return found


async def read_newest(redis: Redis, keys: RunKeys, stream: str, model: type[M]) -> AsyncIterator[M]:
    """All messages, the newest first, read as far as they are asked for; an invalid entry becomes a dead letter."""
    before = "+"
    while page := await newest_messages(redis, keys, stream, model, before):
        before = f"({page[-1][0]}"
        for _, message in page:
            yield message


async def read_step(redis: Redis, keys: RunKeys, step: int) -> StepRecord | None:
    """The record of a rollout step, if Redis has it; costs little more in a run of many steps than in one of few.

    The id of an entry is its time, and steps rise with it, because a rewind deletes the records of the steps that it
    takes back. So the time in which the record may have been written is halved until it is found.
    """
    first = await tail_messages(redis, keys, keys.steps, StepRecord, "0-0", count=1)
    last = await newest_messages(redis, keys, keys.steps, StepRecord, count=1)
    if not first or not last:
        return None
    low, high = (_time(page[0][0]) for page in (first, last))
    while high - low > 1:
        middle = (low + high) // 2
        page = await tail_messages(redis, keys, keys.steps, StepRecord, _before(middle), count=1)
        if not page or page[0][1].step > step:
            high = middle - 1
        elif page[0][1].step == step:
            return page[0][1]
        else:
            low = _time(page[0][0])
    after = _before(low)
    while page := await tail_messages(redis, keys, keys.steps, StepRecord, after, count=FEW):
        if known := next((record for _, record in page if record.step >= step), None):
            return known if known.step == step else None
        after = page[-1][0]
    return None


def _time(entry: str) -> int:
    """When an entry was written, in milliseconds: the first part of its id."""
    return int(entry.partition("-")[0])


def _before(time_ms: int) -> str:
    """The last id that an entry could have before this time."""
    return f"{time_ms - 1}-{LAST_OF_MS}"


async def append_message(redis: Redis, keys: RunKeys, stream: str, message: Message, kept: int) -> None:
    """Append to a stream without a consumer group, and keep at least its last `kept` entries (0: all).

    Nothing of a run without a record, which was deleted: it would stay for ever.
    """
    text = message.model_dump_json()
    await call(redis, "append_message", record_key=keys.record, stream_key=stream, message=text, kept=kept)


class EventLog:
    """The log of one run; `service` is the writer of events."""

    def __init__(self, redis: Redis, keys: RunKeys, service: str) -> None:
        self._redis = redis
        self._keys = keys
        self._service = service

    async def write(self, phase: str, text: str, at: float | None = None) -> None:
        """Write one event. `phase` is a word that programs may look for; `at`: Unix seconds, by default now.

        One that equals one of the newest events, its time included, is not written again.
        """
        log.info("%s: %s", phase, text)
        event = Event(service=self._service, phase=phase, text=text, at=time.time() if at is None else at)
        await append_message(self._redis, self._keys, self._keys.events, event, EVENTS_KEPT)

    async def events(self, after: str = "0-0") -> list[tuple[str, Event]]:
        """Events after id `after`, oldest first."""
        return await read_all(self._redis, self._keys, self._keys.events, Event, after)

    def newest_events(self) -> AsyncIterator[Event]:
        """Events, the newest first."""
        return read_newest(self._redis, self._keys, self._keys.events, Event)

    async def last_events(self, count: int) -> list[Event]:
        """The last `count` events, oldest first."""
        found = await newest_messages(self._redis, self._keys, self._keys.events, Event, count=count)
        return [event for _, event in reversed(found)]

    async def steps(self, after: str = "0-0") -> list[tuple[str, StepRecord]]:
        """Step records after id `after`, oldest first."""
        return await read_all(self._redis, self._keys, self._keys.steps, StepRecord, after)

    async def last_evaluations(self, count: int) -> list[EvaluationRecord]:
        """The last `count` evaluations, oldest first."""
        found = await newest_messages(self._redis, self._keys, self._keys.evaluations, EvaluationRecord, count=count)
        return [record for _, record in reversed(found)]

    async def evaluations(self) -> list[EvaluationRecord]:
        """All evaluations, oldest first."""
        return [
            record for _, record in await read_all(self._redis, self._keys, self._keys.evaluations, EvaluationRecord)
        ]

    async def dead_letters(self, after: str = "0-0") -> list[tuple[str, DeadLetter]]:
        """Dead letters after id `after`, oldest first."""
        return await read_all(self._redis, self._keys, self._keys.dead, DeadLetter, after)


def entry_order(entry: str) -> tuple[int, ...]:
    """A key by which the ids of entries of one server, of whatever stream, are in the order of their time."""
    return tuple(int(part) for part in entry.split("-"))


async def letters(
    redis: Redis, keys: RunKeys, after: str = "0-0", count: int = LETTERS_SHOWN
) -> list[tuple[str, DeadLetter]]:
    """Up to `count` dead letters after entry `after`, oldest first. An invalid entry is shown as an invalid letter."""
    found = []
    for entry, body in await tail(redis, keys.dead, after, count):
        admitted = admit(keys, DeadLetter, body)
        if isinstance(admitted, Malformed):
            admitted = admitted.letter(Source(keys.dead, entry, body, deliveries=0))
        found.append((entry, admitted))
    return found


class EvaluationFollower:
    """The evaluations of a run so far. `count`: how many; `done`: the set and the name of each."""

    def __init__(self, redis: Redis, keys: RunKeys) -> None:
        self._redis = redis
        self._keys = keys
        self._forget()

    def _forget(self) -> None:
        self._after = "0-0"
        self.count = 0
        self.done: set[tuple[str, str]] = set()

    async def look(self) -> None:
        """Read those recorded since the last look, at most READ_AT_ONCE.

        A rewind deletes evaluations: then none is known, and the next looks read all of them again.
        """
        stream = self._keys.evaluations
        newer = ("xrange", stream, f"({self._after}", "+", "COUNT", READ_AT_ONCE)
        length, entries = await read_together(self._redis, ("xlen", stream), newer)
        if len(entries) < READ_AT_ONCE and length != self.count + len(entries):
            self._forget()
            return
        found = await admit_entries(self._redis, self._keys, stream, EvaluationRecord, entries)
        self._after = entries[-1][0].decode() if entries else self._after
        self.count += len(found)
        self.done |= {(record.set, record.name) for _, record in found}
