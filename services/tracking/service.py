"""Owns the tracker's process: one follower for each sink that the recipe names, and a drain with a deadline.

Must not fail because of a sink, nor keep a run from ending.

Reads step records, evaluations, events, the record; writes only events. A sink stores the cursor beside its rows, so
a restarted tracker continues where that sink is. Drain order: copy what the log has, write how the run ended, close.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from services.process.hosting import Context
from services.storage.places import runs_folder
from services.streams.connection.functions import FencedError
from services.streams.state.ownership import become_owner, newest_owner
from services.tracking.follower import SinkFollower
from services.tracking.rows import TrackedFacts
from services.tracking.sink import Sink
from services.tracking.sinks.table import SINKS
from services.waits import cancel_and_wait

DRAIN_S = 5.0
"""How long the end of a run waits for its sinks."""


class TrackerService:
    """Copies one run's log to trackers. `sinks`: by name, what makes a sink from the recipe's settings."""

    name = "tracker"

    def __init__(self, sinks: Mapping[str, Callable[[Any], Sink]] = SINKS) -> None:
        self._sinks = sinks
        self._followers: list[SinkFollower] = []

    @property
    def hangs(self) -> bool:
        """Whether a sink has not returned from a call: a library's exit handler would wait for it."""
        return any(follower.hangs for follower in self._followers)

    async def run(self, context: Context) -> None:
        """Copy until the run has ended, or the stop. Raises FencedError once another tracker of the run has started."""
        record = context.record
        fence = await become_owner(context.redis, context.keys, self.name, context.heartbeat.info.id)

        async def check() -> None:
            newest = await newest_owner(context.redis, context.keys, self.name)
            if newest.replaces(fence):
                raise FencedError(f"a newer tracker follows run {record.id!r}: {newest.owner}")

        recipe = record.recipe.model_dump(mode="json")
        facts = TrackedFacts(record.id, record.project, record.created_at, recipe, runs_folder() / record.id)
        self._followers = [
            SinkFollower(name, partial(self._sinks[name], settings), context, facts, check)
            for name, settings in record.recipe.tracking.named.items()
        ]
        await context.heartbeat.update(state="ready")
        await self._follow(context)

    async def _follow(self, context: Context) -> None:
        tasks = [asyncio.create_task(follower.run(), name=follower.name) for follower in self._followers]
        stopping = asyncio.create_task(context.stopping.wait(), name="the stop")
        try:
            left = set(tasks)
            while left and not stopping.done():
                done, _ = await asyncio.wait({*left, stopping}, return_when=asyncio.FIRST_COMPLETED)
                left -= done
                for task in done:
                    task.result()
            await self._drain(context, left)
        finally:
            await cancel_and_wait(stopping, *tasks)

    @staticmethod
    async def _drain(context: Context, left: set[asyncio.Task[None]]) -> None:
        if not left:
            return
        with context.waits.on("sinks", "the sinks to take the last rows", DRAIN_S):
            done, late = await asyncio.wait(left, timeout=DRAIN_S)
        for task in late:
            copied = f"python -m services.tracking --run {context.keys.run} copies them"
            text = f"{task.get_name()}: not closed within {DRAIN_S:g} s; its last rows may be missing, and {copied}"
            await context.event_log.write("tracking-failed", text)
        for task in done:
            task.result()
