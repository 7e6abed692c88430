"""The loops around an engine that is already started: a replica that is asked to end, and its own lapsed lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

import rollout.service
from rollout.generation import ResponseGenerator
from rollout.service import Replica
from rollout.tasks import GroupWorker
from services.contracts import Lane
from services.streams.state.group_state import GroupTransitions
from services.waits import cancel_and_wait
from tests.harness.leased_task_route import FixedTokenizer
from tests.harness.small_run import recipe_document, service_context
from tests.rollout.hand_sampler import task
from tests.rollout.step_engine import StepEngine
from tests.rollout.waiting import until

PATIENCE_S = 60.0


@asynccontextmanager
async def replica(redis: Any, run: str, **limits: Any) -> AsyncIterator[tuple[Replica, StepEngine]]:
    """One that draws with a step engine; it holds a version if the run only evaluates."""
    async with service_context(redis, run, recipe_document("/none", limits=limits), "rollout") as context:
        drawing = StepEngine(0)
        engine, tokenizer = drawing, FixedTokenizer(np.array([2, 4, 9], np.int32))
        generator = ResponseGenerator(engine, tokenizer, 4096, run)  # type: ignore[arg-type]
        yield Replica(context, engine, GroupWorker(generator)), drawing  # type: ignore[arg-type]


async def test_a_replica_without_a_version_ends_at_once(
    redis: Any, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout.service, "DRAIN_S", 10 * PATIENCE_S)
    async with replica(redis, run_id) as (ending, _):
        running = asyncio.create_task(ending.run())

        async def waits() -> bool:
            return ending._context.waits.is_open("weights")

        await until(waits, PATIENCE_S)
        ending._context.stopping.set()
        async with asyncio.timeout(PATIENCE_S):
            await running


async def test_a_drain_has_one_deadline(redis: Any, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which all parts use what is left: the tasks that are read last, the weight sync and the groups."""
    given: list[float | None] = []
    timeout = asyncio.timeout

    def counted(delay: float | None) -> asyncio.Timeout:
        given.append(delay)
        return timeout(delay)

    monkeypatch.setattr(rollout.service, "DRAIN_S", 0.05)
    async with replica(redis, run_id) as (ending, _):
        stuck = [asyncio.create_task(asyncio.Event().wait()) for _ in range(2)]
        monkeypatch.setattr("rollout.service.asyncio.timeout", counted)
        async with timeout(PATIENCE_S):
            await ending._drain(*stuck)  # type: ignore[arg-type]
        await cancel_and_wait(*stuck)
    assert given.count(0.05) == 1


async def test_its_own_lapsed_lease_starts_no_second_work(redis: Any, run_id: str) -> None:
    """The same consumer takes the entry again while its work goes on: the work is not repeated, and nothing breaks."""
    async with replica(redis, run_id, rollout_steps=0) as (working, engine):
        context = working._context
        sampler = await GroupTransitions.fenced(redis, context.keys, "sampler")
        await sampler.dispatch(Lane.TRAIN, [task("g0", 2, tokens=300)], None)
        running = asyncio.create_task(working.run())
        await engine.until_drawn(20)
        [works] = working._groups.values()
        lease, read = works.delivery.lease, asyncio.Event()
        consumer = working._consumers[Lane.TRAIN]
        reclaim = consumer._reclaim

        async def reclaimed(count: int) -> Any:
            found = await reclaim(count)
            if found:
                read.set()
            return found

        consumer._reclaim = reclaimed  # type: ignore[method-assign]
        consumer._next_reclaim = 0.0
        await redis.xclaim(lease.stream, lease.consumer_group, lease.consumer, 0, [lease.entry], idle=10**7)
        async with asyncio.timeout(PATIENCE_S):
            await read.wait()

        async def published() -> bool:
            return await redis.xlen(context.keys.lane(Lane.TRAIN).samples) == 2

        await until(published, PATIENCE_S)
        assert not running.done()
        context.stopping.set()
        async with asyncio.timeout(PATIENCE_S):
            await running
    assert engine.drawn_tokens <= 600, "no response was drawn twice"
