"""Owns what a run writes down for people: events, step records, evaluations, dead letters.

Must not be read to steer a run, except for policy versions, dead letters, and which evaluations are done.
"""

from __future__ import annotations

import logging
import time
from typing import TypeVar

from services.contracts import DeadLetter, EvaluationRecord, Event, Message, StepRecord
from services.streams.connection import Redis
from services.streams.keys import RunKeys
from services.streams.leases import tail

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)


async def read_all(redis: Redis, stream: str, model: type[M], after: str = "0-0") -> list[tuple[str, M]]:
    """All entries behind `after`, validated, with their ids."""
    found: list[tuple[str, M]] = []
    while entries := await tail(redis, stream, after, count=500):
        found += [(entry, model.model_validate_json(body)) for entry, body in entries]
        after = entries[-1][0]
    return found


class Journal:
    """A run's written record."""

    def __init__(self, redis: Redis, keys: RunKeys, service: str) -> None:
        self._redis = redis
        self._keys = keys
        self._service = service

    async def event(self, phase: str, text: str) -> None:
        """Write one line for people. `phase` is a word a program may look for."""
        log.info("%s: %s", phase, text)
        event = Event(service=self._service, phase=phase, text=text, at=time.time())
        await self._redis.xadd(self._keys.events, {"m": event.model_dump_json()})

    async def evaluation(self, record: EvaluationRecord) -> None:
        """Write down an evaluation."""
        await self._redis.xadd(self._keys.evaluations, {"m": record.model_dump_json()})

    async def events(self, after: str = "0-0") -> list[tuple[str, Event]]:
        """Events behind `after`, oldest first."""
        return await read_all(self._redis, self._keys.events, Event, after)

    async def steps(self, after: str = "0-0") -> list[tuple[str, StepRecord]]:
        """Step records behind `after`, oldest first."""
        return await read_all(self._redis, self._keys.steps, StepRecord, after)

    async def evaluations(self) -> list[EvaluationRecord]:
        """All evaluations, oldest first."""
        return [record for _, record in await read_all(self._redis, self._keys.evaluations, EvaluationRecord)]

    async def dead_letters(self, after: str = "0-0") -> list[tuple[str, DeadLetter]]:
        """Dead letters behind `after`, oldest first."""
        return await read_all(self._redis, self._keys.dead, DeadLetter, after)

    async def policy_version(self) -> int | None:
        """The last committed policy version; None before the first."""
        value = await self._redis.get(self._keys.version)
        return None if value is None else int(value)
