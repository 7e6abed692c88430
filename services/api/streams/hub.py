"""Owns the one reader of Redis for all open streams: it hands each new entry to all subscriptions of its run.

Must not wait for a subscriber: one that does not take what it is given is dropped. Must not know what an entry means.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from services.contracts import RunState
from services.streams.connection.client import Redis, RedisUnavailableError
from services.streams.delivery.following import Entries, read_after, read_standings
from services.streams.state.run_record import DAMAGED, read_history

log = logging.getLogger(__name__)

QUEUED = 2000
"""Items that wait for one subscriber. Their bodies are shared by all subscribers of the run."""
READ_AT_ONCE = 500
BLOCK_S = 0.25
"""How long one read waits for an entry; a run that is subscribed to meanwhile joins the next one."""
GATHER_S = 0.02
"""Pause between reads, so that entries which are written in a burst are handed over together."""
LOOK_S = 0.5
"""How often the states of runs are read; they are no stream."""


@dataclass(frozen=True)
class StreamItem:
    """Something new of a run. `stream`: its key in Redis, "" for a change of state, whose `entry` is its number."""

    stream: str
    entry: str
    body: bytes


class Ended(Exception):  # noqa: N818  (no error: it ends an iteration)
    """Nothing follows: the run has ended, or was deleted, or the gateway stops; the text says which."""


class DroppedError(RuntimeError):
    """The subscriber did not take its items in time."""


class Subscription:
    """What one open stream waits for. `positions`: the last entry that it has of each stream."""

    def __init__(self, run: str, positions: Mapping[str, str], states: int) -> None:
        self.run = run
        self.positions = dict(positions)
        self.states = states
        self._items: asyncio.Queue[StreamItem | None] = asyncio.Queue(QUEUED + 1)
        self._why: Exception | None = None

    def offer(self, items: Iterable[StreamItem]) -> None:
        """Queue what belongs to this subscription; drop it if it has taken too little."""
        if self._why is not None:
            return
        for item in items:
            if self._items.qsize() >= QUEUED:
                log.warning("a stream of run %s was dropped: its client left %d items unread", self.run, QUEUED)
                self.end(DroppedError(f"{QUEUED} items were left unread"), at_once=True)
                return
            if item.stream in self.positions or not item.stream:
                self._items.put_nowait(item)

    def end(self, why: Exception, *, at_once: bool = False) -> None:
        """Nothing follows what is queued, or not even that."""
        if self._why is not None:
            return
        self._why = why
        while at_once and not self._items.empty():
            self._items.get_nowait()
        self._items.put_nowait(None)

    async def take(self, deadline_s: float) -> list[StreamItem]:
        """All that is queued; [] if there is nothing for `deadline_s` seconds. Raises Ended, DroppedError."""
        taken: list[StreamItem] = []
        try:
            async with asyncio.timeout(deadline_s):
                first = await self._items.get()
        except TimeoutError:
            return []
        while first is not None:
            taken.append(first)
            if self._items.empty():
                return taken
            first = self._items.get_nowait()
        if taken:  # what ends the subscription is raised when it is asked again
            self._items.put_nowait(None)
            return taken
        assert self._why is not None
        raise self._why


@dataclass
class _FollowedRun:
    """A run with subscriptions. `positions`: what the reader has of each stream; `ended`: why nothing will follow."""

    subscriptions: set[Subscription] = field(default_factory=set)
    positions: dict[str, str] = field(default_factory=dict)
    history: bytes = b""
    ended: str = ""


class Hub:
    """The reader. It runs while there is a subscription, on one connection, however many runs and streams are open."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._runs: dict[str, _FollowedRun] = {}
        self._reader: asyncio.Task[None] | None = None
        self._look_at = 0.0
        self._closed = False

    def subscribe(self, run: str, positions: Mapping[str, str], states: int) -> Subscription:
        """Follow streams of a run after `positions`, and its states after the first `states`.

        What was written before the reader's next read may be missing: read once more after this call, and skip the
        items that you have then. Call `leave` at the end.
        """
        subscription = Subscription(run, positions, states)
        if self._closed:
            subscription.end(Ended("the gateway stops"))
            return subscription
        watched = self._runs.setdefault(run, _FollowedRun())
        watched.subscriptions.add(subscription)
        for stream, after in positions.items():
            watched.positions.setdefault(stream, after)
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read(), name="reader of all streams")
        return subscription

    def leave(self, subscription: Subscription) -> None:
        """The subscription is no longer read."""
        watched = self._runs.get(subscription.run)
        if watched is None:
            return
        watched.subscriptions.discard(subscription)
        if not watched.subscriptions:
            del self._runs[subscription.run]

    async def close(self) -> None:
        """End all subscriptions: the gateway stops."""
        self._closed = True
        self._end_all(Ended("the gateway stops"))
        if self._reader is not None:
            self._reader.cancel()
            with suppress(asyncio.CancelledError):
                await self._reader

    def _end_all(self, why: Exception) -> None:
        for watched in self._runs.values():
            for subscription in watched.subscriptions:
                subscription.end(why)
        self._runs.clear()

    async def _read(self) -> None:
        try:
            while self._runs:
                try:
                    await self._read_once()
                except RedisUnavailableError as error:
                    log.warning("open streams wait for Redis: %s", error)
                await asyncio.sleep(GATHER_S)
        except Exception:
            log.exception("the reader of all streams failed; their clients connect again")
            self._end_all(Ended("the gateway failed to read the run"))

    async def _read_once(self) -> None:
        if (now := time.monotonic()) >= self._look_at:
            self._look_at = now + LOOK_S
            await self._look()
        watched = dict(self._runs)  # those that join meanwhile have no part in this read
        positions = {stream: after for run in watched.values() for stream, after in run.positions.items()}
        if not positions:
            return
        found = await read_after(self._redis, positions, READ_AT_ONCE, BLOCK_S)
        for name, run in watched.items():
            self._hand_over(name, run, found)

    def _hand_over(self, name: str, run: _FollowedRun, found: Mapping[str, Entries]) -> None:
        new = {stream: entries for stream in run.positions if (entries := found.get(stream))}
        for stream, entries in new.items():
            run.positions[stream] = entries[-1][0]
            items = [StreamItem(stream, entry, body) for entry, body in entries]
            for subscription in tuple(run.subscriptions):
                subscription.offer(items)
        if run.ended and not new:  # this read began after the run had ended
            for subscription in tuple(run.subscriptions):
                subscription.end(Ended(run.ended))
            if self._runs.get(name) is run:  # else it was left, and is subscribed to again
                del self._runs[name]

    async def _look(self) -> None:
        names = list(self._runs)
        standings = await read_standings(self._redis, names)
        for name in names:
            if (run := self._runs.get(name)) is None:
                continue
            if name not in standings:
                run.ended = "the run was deleted"
                continue
            state, history = standings[name]
            run.ended = why_ended(state)
            if history != run.history:
                run.history = history
                items = states_of(history)
                for subscription in tuple(run.subscriptions):
                    subscription.offer(items[subscription.states :])
                    subscription.states = len(items)


def why_ended(state: bytes) -> str:
    """Why nothing follows of a run in this state; "" if something may."""
    ended = any(known.ended and known.value.encode() == state for known in RunState)
    return f"the run is {state.decode()}" if ended else ""


def states_of(history: bytes) -> list[StreamItem]:
    """The changes of a run's state, as its record has them (JSON), each with its number, from 1.

    None of a record that is damaged: the run's own view says so, and other runs' streams go on.
    """
    try:
        changes = read_history(history.decode())
    except DAMAGED:
        return []
    return [StreamItem("", str(number), change.model_dump_json().encode()) for number, change in enumerate(changes, 1)]
