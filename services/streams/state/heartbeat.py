"""Owns heartbeats: each process announces that it is alive, and its waits; the announcement lapses when it dies.

Must not decide how to react to a death or a stall.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from pydantic import ValidationError
from redis.exceptions import RedisError

from services.contracts import ProcessInfo, Wait
from services.metrics import STALLED_WAITS, WAIT_DEADLINE_SECONDS, WAIT_SECONDS
from services.streams.connection.client import Redis
from services.streams.connection.functions import call, library
from services.streams.keys import SHARED_HEARTBEATS, RunKeys
from services.streams.state.events import EventLog
from services.waits import Waits, cancel_and_wait, describe_wait, steady_time

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
LAPSES_S = 10.0
HELD_LOOK_S = 0.5
PATIENCE_S = 5.0
"""How long one heartbeat may take; a Redis that hangs must not keep waits out of the log."""
RETURNS_S = 2 * HEARTBEAT_S
"""After a jump of the server's clock, by which every heartbeat looks lapsed, each live process has one again within
this time."""
FORGOTTEN_S = 2 * 3600.0
"""How old a lapsed heartbeat is when it is deleted. A jump by an hour, such as a wrong time zone, must not delete those
of live processes: a reader would not know that there was one."""
LAPSED_KEPT, LAPSED_AT_LEAST_S = 1000, 60.0
"""How many lapsed heartbeats are kept for so long, the newest; others are deleted once they are this old. Every look
reads them all, and replicas on spot nodes are replaced often."""
FORGOTTEN_AT_ONCE = 500
UNSENT_KEPT = 100
"""Events that wait for Redis to answer again; the oldest are dropped first, and all are in the log."""


def _key(run: str | None) -> str:
    return SHARED_HEARTBEATS if run is None else RunKeys(run).heartbeats


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
        self.info = info.model_copy(update={"library": library().name})
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
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._redis.hdel(_key(self.info.run), self.info.id)
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
        now = steady_time()
        jumped_s = round(time.time() - now)  # readers compare with the clock as it is now
        waits = self._waits.current(now)
        shown = tuple(wait.model_copy(update={"since": wait.since + jumped_s}) for wait in waits)
        idle_s = round(self._waits.idle_s(now), 3)
        self.info = self.info.model_copy(update={"waits": shown, "idle_s": idle_s})
        await call(
            self._redis,
            "heartbeat",
            heartbeats_key=_key(self.info.run),
            process=self.info.id,
            info=self.info.model_dump_json(),
            forgotten_s=int(FORGOTTEN_S),
        )

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._watch(steady_time())
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._announce()
                    await self._send_events()
            except (RedisError, OSError) as error:
                log.warning("heartbeat of %s failed: %s", self.info.id, _text(error))

    def _watch(self, now: float) -> None:
        """Show the waits as metrics; log those that turned long or stalled, because they may wait for Redis itself."""
        self._gauges.show(self._waits.current(now), now)
        for phase, wait in self._waits.news(now):
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
    """The processes of a run (or the shared ones) whose heartbeat has not lapsed, oldest first; one round trip.

    One that cannot be parsed is logged and left out.
    """
    return (await live_by_run(redis, [run]))[run]


async def surviving_processes(redis: Redis, run: str, service: str = "") -> list[ProcessInfo]:
    """The live processes of a run, or of one service, for a reader that acts because there are none.

    One look does not prove that, because the server's clock may have jumped: where heartbeats have lapsed, a second
    look follows after RETURNS_S.
    """

    async def look(younger_than_s: float = LAPSES_S) -> list[ProcessInfo]:
        [found] = (await live_by_run(redis, [run], younger_than_s)).values()
        return [process for process in found if service in ("", process.service)]

    if (live := await look()) or not await look(math.inf):
        return live
    await asyncio.sleep(RETURNS_S)
    return await look()


async def held_version(redis: Redis, run: str | None) -> int:
    """The newest policy version that a live replica of a run holds; -1 without one.

    Waits until each replica has announced itself again or has lapsed, at most LAPSES_S: a failover may have lost what
    it announced before.
    """
    before, ends = await redis.hgetall(_key(run)), time.monotonic() + LAPSES_S
    while True:
        replicas = [each for each in await live_processes(redis, run) if each.service == "rollout"]
        now = await redis.hgetall(_key(run))
        silent = [each.id for each in replicas if now.get(each.id.encode()) == before.get(each.id.encode())]
        if not silent or time.monotonic() > ends:
            return max((each.version for each in replicas if each.version is not None), default=-1)
        log.info("waiting for the version that %s holds", ", ".join(silent))
        await asyncio.sleep(HELD_LOOK_S)


async def live_by_run(
    redis: Redis, runs: Sequence[str | None], younger_than_s: float = LAPSES_S
) -> dict[str | None, list[ProcessInfo]]:
    """`live_processes` of several runs, in one round trip."""
    async with redis.pipeline(transaction=False) as pipe:
        pipe.time()
        for run in runs:
            pipe.hgetall(_key(run))
        (seconds, microseconds), *hashes = await pipe.execute()
    now_ms = seconds * 1000 + microseconds // 1000
    found: dict[str | None, list[ProcessInfo]] = {}
    for run, fields in zip(runs, hashes, strict=True):
        ages = {process: _age_s(value, now_ms) for process, value in fields.items()}
        live = (fields[process] for process, age_s in ages.items() if age_s <= younger_than_s)
        found[run] = sorted(_parsed(live), key=lambda info: (info.started_at, info.id))
        if forgotten := _forgotten(fields, ages):
            await redis.hdel(_key(run), *forgotten)
    return found


def _forgotten(fields: Mapping[bytes, bytes], ages: Mapping[bytes, float]) -> list[bytes]:
    """The processes whose heartbeats are deleted now; `ages`: how old each is, in seconds."""
    lapsed = [process for process, age_s in ages.items() if age_s > LAPSED_AT_LEAST_S]
    # By the time that each begins with, not by its age: the latest are live ones if the clock was set back since.
    lapsed.sort(key=fields.__getitem__, reverse=True)
    old = [process for process in lapsed[:LAPSED_KEPT] if ages[process] > FORGOTTEN_S]
    return [*lapsed[LAPSED_KEPT:], *old][:FORGOTTEN_AT_ONCE]


def _age_s(value: bytes, now_ms: int) -> float:
    """The age of a heartbeat. One from the future has an age too: it lapses when the server's clock is set back."""
    at = value.partition(b" ")[0]
    return abs(now_ms - int(at)) / 1000 if at.isdigit() else math.inf


def _parsed(values: Iterable[bytes]) -> Iterator[ProcessInfo]:
    for value in values:
        try:
            yield ProcessInfo.model_validate_json(value.partition(b" ")[2])
        except ValidationError as error:
            log.warning("heartbeat %.200r cannot be parsed and is left out: %s", value, error.errors()[0]["msg"])
