"""Owns runs whose log a tracker follows: their records, what the log has, and a tracker that is started and stopped.

Must not stand in for a tracker's library.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from services.contracts import EvaluationRecord, Event, RunState, StepRecord
from services.process.hosting import host_service
from services.settings import parse_recipe
from services.streams.keys import RunKeys
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import RunRecords
from services.tracking.service import TrackerService
from tests.harness.small_run import recipe_document

DEADLINE_S = 60.0


def step_of(step: int, version: int | None = None, **metrics: float) -> StepRecord:
    """A step's record; its loss is a tenth of its number."""
    return StepRecord(
        step=step,
        version=step if version is None else version,
        optimizer_steps=1,
        groups=("g0",),
        metrics={"loss": step / 10, "accuracy": 0.5, **metrics},
        generation_started_at=1.0,
        generation_finished_at=2.0,
        learning_started_at=1_000_000.0 + step,
        learning_finished_at=1_000_001.0 + step + (version or 0) / 100,
    )


def evaluation_of(name: str, version: int, accuracy: float, of: str = "held-out") -> EvaluationRecord:
    """An evaluation's record."""
    return EvaluationRecord(
        name=name,
        set=of,
        version=version,
        prompts=8,
        samples_per_prompt=2,
        accuracy=accuracy,
        standard_error=0.1,
        unknown=0,
        at=1_000_000.5 + version,
    )


class TrackedRun:
    """A run's log, to which a test appends as the services do."""

    def __init__(self, redis: Any, url: str, record: RunRecord) -> None:
        self.redis, self.url, self.id = redis, url, record.id
        self.keys = RunKeys(record.id)

    @classmethod
    async def submitted(cls, redis: Any, url: str, run: str, tracking: Any) -> TrackedRun:
        """A new run whose recipe has this section."""
        recipe = parse_recipe(recipe_document("/model", tracking=tracking))
        return cls(redis, url, await RunRecords(redis).create(run, recipe))

    async def append(self, *messages: StepRecord | EvaluationRecord | Event, at_ms: int | None = None) -> None:
        """Append to the streams, and make the last step the committed one. `at_ms`: the time of the entries."""
        streams = {StepRecord: self.keys.steps, EvaluationRecord: self.keys.evaluations, Event: self.keys.events}
        for message in messages:
            await self.redis.xadd(streams[type(message)], {"m": message.model_dump_json()}, f"{at_ms or '*'}")
            if isinstance(message, StepRecord):
                await self.redis.hset(self.keys.policy, mapping={"step": message.step, "version": message.version})

    async def rewind(self, step: int) -> None:
        """Remove the steps after `step`, as a resumption does."""
        for entry, fields in await self.redis.xrange(self.keys.steps):
            if StepRecord.model_validate_json(fields[b"m"]).step > step:
                await self.redis.xdel(self.keys.steps, entry)
        await self.redis.hset(self.keys.policy, mapping={"step": step})

    async def end(self, state: RunState = RunState.SUCCEEDED, reason: str = "done") -> None:
        """What the controller writes before it stops the services."""
        records = RunRecords(self.redis)
        await records.set_paths(self.id, export_path="/exports/final")
        await records.set_summary(self.id, {"state": state.value, "reason": reason})

    async def events(self, phase: str) -> list[str]:
        """The texts of the tracker's events of this phase."""
        found = [Event.model_validate_json(fields[b"m"]) for _, fields in await self.redis.xrange(self.keys.events)]
        return [event.text for event in found if event.phase == phase]

    async def until(self, holds: Callable[[], Awaitable[Any]], what: str) -> Any:
        """What `holds` returns, as soon as it is true."""
        ends = time.monotonic() + DEADLINE_S
        while not (found := await holds()):
            assert time.monotonic() < ends, f"not within {DEADLINE_S:g} s: {what}"
            await asyncio.sleep(0.05)
        return found

    @asynccontextmanager
    async def tracked(self, service: TrackerService | None = None) -> AsyncIterator[asyncio.Task[None]]:
        """A tracker of the run, which is drained at the end."""
        stopping = asyncio.Event()
        hosting = asyncio.create_task(host_service(service or TrackerService(), self.id, self.url, stopping))
        try:
            yield hosting
        finally:
            stopping.set()
            async with asyncio.timeout(DEADLINE_S):
                await hosting
