"""Owns heartbeats: each process announces that it is alive, and its waits, under a key that lapses when it dies.

Must not decide how to react to a death or a stall.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from pydantic import ValidationError
from redis.exceptions import RedisError

from services.cancellation import cancel_and_wait
from services.contracts import ProcessInfo, Wait
from services.metrics import STALLED_WAITS, WAIT_DEADLINE_SECONDS, WAIT_SECONDS
from services.streams.connection.client import Redis
from services.streams.connection.functions import RedisFullError, call
from services.streams.keys import SHARED_PROCESSES, RunKeys
from services.streams.state.events import EventLog
from services.waits import Waits, describe_wait

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
LAPSES_S = 10.0
PATIENCE_S = 5.0
"""How long one heartbeat may take; a Redis that hangs must not keep waits out of the log."""
UNSENT_KEPT = 100
"""Events that wait for Redis to answer again; the oldest are dropped first, and all are in the log."""


def _places(run: str | None, process: str) -> tuple[str, str]:
    if run is None:
        return SHARED_PROCESSES, SHARED_PROCESSES.removesuffix("es") + f":{process}"
    keys = RunKeys(run)
    return keys.processes, keys.process(process)


class Heartbeat:
    """One process's announcement. `update` changes what is announced; the heartbeat keeps it from lapsing.

    With `waits` each heartbeat announces them too; with an `event_log` a wait past its deadline becomes an event
    `stalled`, a long one an event `waiting`. `on_change` is called with each change of state, in this process.
    """

    def __init__(
        self,
        redis: Redis,
        info: ProcessInfo,
        waits: Waits | None = None,
        event_log: EventLog | None = None,
        on_change: Callable[[ProcessInfo], None] = lambda _: None,
    ) -> None:
        self._redis = redis
        self.info = info
        self._waits = waits or Waits()
        self._event_log = event_log
        self._on_change = on_change
        self._gauges = _Gauges(info.run or "", info.service)
        self._unsent: deque[tuple[str, str]] = deque(maxlen=UNSENT_KEPT)
        self._heart: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Heartbeat:
        self._on_change(self.info)
        await self._announce()
        self._heart = asyncio.create_task(self._beat(), name=f"heartbeat of {self.info.id}")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._heart:
            await cancel_and_wait(self._heart)
        self._gauges.show((), 0.0)
        index, key = _places(self.info.run, self.info.id)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._redis.delete(key)
                await self._redis.srem(index, self.info.id)
        except (RedisError, OSError) as error:
            log.warning(
                "could not delete the heartbeat of %s; it lapses within %g s: %s", self.info.id, LAPSES_S, _text(error)
            )

    async def update(self, *, state: str | None = None, version: int | None = None) -> None:
        """Announce another state or policy version, at once."""
        changes = {"state": state, "version": version}
        self.info = self.info.model_copy(update={name: value for name, value in changes.items() if value is not None})
        if state is not None:
            self._on_change(self.info)
        await self._announce()

    async def _announce(self) -> None:
        index, key = _places(self.info.run, self.info.id)
        self.info = self.info.model_copy(update={"waits": self._waits.current(time.time())})
        await call(
            self._redis,
            "heartbeat",
            process_key=key,
            processes_key=index,
            info=self.info.model_dump_json(),
            lapses_ms=int(LAPSES_S * 1000),
            process=self.info.id,
        )

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._watch(time.time())
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._announce()
                    await self._send_events()
            except (RedisError, RedisFullError, OSError) as error:
                log.warning("heartbeat of %s failed: %s", self.info.id, _text(error))

    def _watch(self, now: float) -> None:
        """Show the waits as metrics; log those that turned long or stalled, because they may wait for Redis itself."""
        self._gauges.show(self._waits.current(now), now)
        stalled, long = self._waits.newly_stalled(now), self._waits.newly_long(now)
        for phase, wait in [*(("stalled", wait) for wait in stalled), *(("waiting", wait) for wait in long)]:
            text = describe_wait(self.info.id, wait, now)
            log.warning("%s: %s", phase, text)
            self._unsent.append((phase, text))

    async def _send_events(self) -> None:
        while self._event_log is not None and self._unsent:
            await self._event_log.write(*self._unsent[0])
            self._unsent.popleft()


class _Gauges:
    """A process's waits as metrics; a wait that is over is no longer shown."""

    def __init__(self, run: str, service: str) -> None:
        self._labels = (run, service)
        self._shown: set[str] = set()

    def show(self, waits: tuple[Wait, ...], now: float) -> None:
        names = {wait.name for wait in waits}
        for name in self._shown - names:
            for family in (WAIT_SECONDS, WAIT_DEADLINE_SECONDS, STALLED_WAITS):
                family.remove(*self._labels, name)
        for wait in waits:
            WAIT_SECONDS.labels(*self._labels, wait.name).set(now - wait.since)
            WAIT_DEADLINE_SECONDS.labels(*self._labels, wait.name).set(wait.deadline_s)
            STALLED_WAITS.labels(*self._labels, wait.name).set(wait.stalled(now))
        self._shown = names


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


async def live_processes(redis: Redis, run: str | None) -> list[ProcessInfo]:
    """The processes of a run (or the shared ones) whose heartbeat has not lapsed, oldest first.

    One that cannot be parsed is logged and left out.
    """
    index, _ = _places(run, "")
    ids = sorted(member.decode() for member in await redis.smembers(index))
    if not ids:
        return []
    bodies = await asyncio.gather(*(redis.get(_places(run, process)[1]) for process in ids))
    lapsed = [process for process, body in zip(ids, bodies, strict=True) if body is None]
    if lapsed:
        await redis.srem(index, *lapsed)
    found = []
    for process, body in zip(ids, bodies, strict=True):
        if body is None:
            continue
        try:
            found.append(ProcessInfo.model_validate_json(body))
        except ValidationError as error:
            log.warning("process %s cannot be parsed and is left out: %s", process, error.errors()[0]["msg"])
    return sorted(found, key=lambda info: (info.started_at, info.id))
