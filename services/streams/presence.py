"""Owns who is alive: every process announces itself under a key that lapses when it dies.

Must not decide what follows from a death.
"""

from __future__ import annotations

import asyncio
import logging

from redis.exceptions import RedisError

from services.cancellation import end
from services.contracts import ProcessInfo
from services.streams.connection import Redis
from services.streams.keys import SHARED_PROCESSES, RunKeys

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
LAPSES_S = 10.0


def _places(run: str | None, process: str) -> tuple[str, str]:
    if run is None:
        return SHARED_PROCESSES, f"penstock:process:{process}"
    keys = RunKeys(run)
    return keys.processes, keys.process(process)


class Presence:
    """One process's announcement. `update` changes what is announced; the heartbeat keeps it from lapsing."""

    def __init__(self, redis: Redis, info: ProcessInfo) -> None:
        self._redis = redis
        self.info = info
        self._heart: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Presence:
        await self._announce()
        self._heart = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._heart:
            await end(self._heart)
        index, key = _places(self.info.run, self.info.id)
        try:
            await self._redis.delete(key)
            await self._redis.srem(index, self.info.id)
        except RedisError as error:
            log.warning("could not withdraw %s; it lapses within %g s: %s", self.info.id, LAPSES_S, error)

    async def update(self, *, state: str | None = None, version: int | None = None) -> None:
        """Announce another state or policy version, at once."""
        changes = {"state": state, "version": version}
        self.info = self.info.model_copy(update={k: v for k, v in changes.items() if v is not None})
        await self._announce()

    async def _announce(self) -> None:
        index, key = _places(self.info.run, self.info.id)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(key, self.info.model_dump_json(), px=int(LAPSES_S * 1000))
            pipe.sadd(index, self.info.id)
            await pipe.execute()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                await self._announce()
            except RedisError as error:
                log.warning("heartbeat of %s failed: %s", self.info.id, error)


async def live_processes(redis: Redis, run: str | None) -> list[ProcessInfo]:
    """The processes of a run (or the shared ones) whose announcement has not lapsed, oldest first."""
    index, _ = _places(run, "")
    ids = sorted(member.decode() for member in await redis.smembers(index))
    if not ids:
        return []
    bodies = await asyncio.gather(*(redis.get(_places(run, one)[1]) for one in ids))
    lapsed = [one for one, body in zip(ids, bodies, strict=True) if body is None]
    if lapsed:
        await redis.srem(index, *lapsed)
    found = [ProcessInfo.model_validate_json(body) for body in bodies if body is not None]
    return sorted(found, key=lambda info: (info.started_at, info.id))
