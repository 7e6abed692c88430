"""Owns a run's log for users: events, step records, evaluations, dead letters.

Must not be read to steer a run, except for dead letters and which evaluations are done.
"""

from __future__ import annotations

import logging
import time
from typing import TypeVar

from services.contracts import DeadLetter, EvaluationRecord, Event, Message, StepRecord
from services.streams.connection.client import Redis
from services.streams.connection.functions import call
from services.streams.delivery.consumer import tail_messages
from services.streams.keys import RunKeys
from services.streams.retention import EVENTS_KEPT

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)


async def read_all(redis: Redis, keys: RunKeys, stream: str, model: type[M], after: str = "0-0") -> list[tuple[str, M]]:
    """All messages after id `after`, with their ids; an invalid entry becomes a dead letter."""
    found: list[tuple[str, M]] = []
    while page := await tail_messages(redis, keys, stream, model, after, count=500):
        found += page
        after = page[-1][0]
    return found


async def append_message(redis: Redis, stream: str, message: Message, kept: int) -> None:
    """Append to a stream without a consumer group, and keep at least its last `kept` entries (0: all)."""
    await call(redis, "append_message", stream_key=stream, message=message.model_dump_json(), kept=kept)


class EventLog:
    """The log of one run; `service` is the writer of events."""

    def __init__(self, redis: Redis, keys: RunKeys, service: str) -> None:
        self._redis = redis
        self._keys = keys
        self._service = service

    async def write(self, phase: str, text: str) -> None:
        """Write one event. `phase` is a word that programs may look for."""
        log.info("%s: %s", phase, text)
        event = Event(service=self._service, phase=phase, text=text, at=time.time())
        await append_message(self._redis, self._keys.events, event, EVENTS_KEPT)

    async def evaluation(self, record: EvaluationRecord, role: str, epoch: int) -> None:
        """Append an evaluation, as the owner of `role`. Raises FencedError."""
        await call(
            self._redis,
            "append_fenced",
            epoch_key=self._keys.epoch(role),
            stream_key=self._keys.evaluations,
            epoch=epoch,
            message=record.model_dump_json(),
            kept=0,
        )

    async def events(self, after: str = "0-0") -> list[tuple[str, Event]]:
        """Events after id `after`, oldest first."""
        return await read_all(self._redis, self._keys, self._keys.events, Event, after)

    async def steps(self, after: str = "0-0") -> list[tuple[str, StepRecord]]:
        """Step records after id `after`, oldest first."""
        return await read_all(self._redis, self._keys, self._keys.steps, StepRecord, after)

    async def evaluations(self) -> list[EvaluationRecord]:
        """All evaluations, oldest first."""
        return [
            record for _, record in await read_all(self._redis, self._keys, self._keys.evaluations, EvaluationRecord)
        ]

    async def dead_letters(self, after: str = "0-0") -> list[tuple[str, DeadLetter]]:
        """Dead letters after id `after`, oldest first."""
        return await read_all(self._redis, self._keys, self._keys.dead, DeadLetter, after)
