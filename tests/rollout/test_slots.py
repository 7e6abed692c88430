"""When a replica leases another task: its unfinished samples count, not whole groups whose longest response goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rollout.generation import ResponseGenerator
from rollout.service import Replica, slots
from rollout.tasks import GroupWorker, LeasedTask
from services.contracts import Lane
from services.streams.connection.functions import RedisFullError
from services.streams.state.group_state import GroupTransitions
from tests.harness.leased_task_route import FixedTokenizer
from tests.harness.small_run import recipe_document, service_context
from tests.rollout.hand_sampler import HandSampler, task
from tests.rollout.step_engine import StepEngine
from tests.rollout.waiting import until

PATIENCE_S = 60.0
GROUP, SEQUENCES, TASKS = 4, 8, 20
SLOTS = slots(SEQUENCES, GROUP)


class LongEngine(StepEngine):
    """Every response ends soon, but for the last one of each group: it goes on until its group is let go."""

    def __init__(self) -> None:
        super().__init__(0)
        self.begun: list[str] = []
        self._go: dict[str, asyncio.Event] = {}

    def let_go(self, group: str) -> None:
        """End the group's longest response."""
        self._go.setdefault(group, asyncio.Event()).set()

    async def generate(self, prompt_ids: Sequence[int], sampling: Any, name: str, _seed: int | None = None) -> Any:
        group, index = name.split("/")[:2]
        self.begun.append(group)
        if int(index) == GROUP - 1:
            await self._go.setdefault(group, asyncio.Event()).wait()
        return await super().generate(prompt_ids, sampling, name)


@dataclass
class Scene:
    """A replica at work on TASKS groups."""

    replica: Replica
    engine: LongEngine
    sampler: HandSampler

    @property
    def unfinished(self) -> int:
        """Of the tasks that it works on."""
        return sum(map(self.replica._worker.unfinished, self.replica._groups.values()))

    async def published(self) -> int:
        """The samples on the stream."""
        return len(await self.sampler.all_samples(Lane.TRAIN))

    async def until_published(self, samples: int) -> None:
        """Until so many samples are on the stream."""

        async def enough() -> bool:
            return await self.published() >= samples

        await until(enough, PATIENCE_S)


@asynccontextmanager
async def scene(redis: Any, run: str) -> AsyncIterator[Scene]:
    """Started, in a run that only evaluates, so that the replica holds a version."""
    rollout = {"max_new_tokens": 16, "max_sequences": SEQUENCES, "kv_cache_mib": 64}
    document = recipe_document("/none", limits={"rollout_steps": 0}, rollout=rollout)
    async with service_context(redis, run, document, "rollout") as context:
        engine: Any = LongEngine()
        tokenizer: Any = FixedTokenizer(np.array([2, 4, 9], np.int32))
        working = Replica(context, engine, GroupWorker(ResponseGenerator(engine, tokenizer, 4096, run)))
        transitions = await GroupTransitions.fenced(redis, context.keys, "sampler")
        await transitions.dispatch(Lane.TRAIN, [task(f"g{n}", GROUP, tokens=2) for n in range(TASKS)], None)
        running = asyncio.create_task(working.run())
        yield Scene(working, engine, HandSampler(context, transitions))
        context.stopping.set()
        for number in range(TASKS):
            engine.let_go(f"g{number}")
        async with asyncio.timeout(PATIENCE_S):
            await running


@pytest.mark.parametrize(("max_sequences", "group_size", "expected"), [(64, 16, 80), (8, 4, 12), (30, 16, 48)])
def test_one_group_waits_beside_full_sequences(max_sequences: int, group_size: int, expected: int) -> None:
    assert slots(max_sequences, group_size) == expected


async def test_long_responses_do_not_hold_their_group_s_slots(redis: Any, run_id: str) -> None:
    async with scene(redis, run_id) as found:
        # By whole groups, it would stop at SLOTS / GROUP of them.
        await found.until_published(SLOTS * (GROUP - 1))
        assert len(set(found.engine.begun)) >= SLOTS
        assert found.unfinished >= SLOTS
        assert len(found.replica._groups) == SLOTS, "one long response of each, and no more tasks than slots"
        before = await found.published()
        found.engine.let_go("g0")
        await found.until_published(before + GROUP)  # the long one of g0, and the short ones of the next group
        assert len(found.replica._groups) == SLOTS


async def test_samples_that_wait_for_room_hold_their_slots(
    redis: Any, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = asyncio.Event()

    async def full(*_: Any) -> None:
        refused.set()
        raise RedisFullError("no room")

    monkeypatch.setattr(LeasedTask, "_publish_once", full)
    async with scene(redis, run_id) as found:
        async with asyncio.timeout(PATIENCE_S):
            await refused.wait()

        async def all_drawn() -> bool:
            return len(found.engine.begun) >= SLOTS and not found.engine._running

        await until(all_drawn, PATIENCE_S)
        assert found.unfinished == SLOTS
        assert len(set(found.engine.begun)) == SLOTS // GROUP
        monkeypatch.undo()
        await found.until_published(SLOTS)
