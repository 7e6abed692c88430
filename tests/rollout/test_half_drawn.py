"""Half-drawn responses: replicas that end or die in the middle of a group, and what the next one goes on from."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY

import rollout.half_drawn
import rollout.tasks
from rollout.generation import ResponseGenerator
from rollout.tasks import GroupWorker, LeasedTask
from services.contracts import CommittedPolicy, Lane, Release, Sample, Sampling, Task, TaskResult
from services.process.hosting import Context
from services.streams.connection.functions import RedisFullError
from services.streams.delivery.consumer import Consumer
from services.streams.delivery.partials import NEVER
from services.streams.delivery.payloads import SamplePayload, fetch
from services.streams.state.group_state import GroupTransitions
from services.waits import cancel_and_wait
from tests.harness.leased_task_route import FixedTokenizer
from tests.harness.small_run import recipe_document, service_context
from tests.rollout.hand_sampler import task
from tests.rollout.step_engine import StepEngine, content, undisturbed
from tests.rollout.waiting import until

PROMPT_IDS = np.array([2, 4, 9], np.int32)
LEASE_S = 30.0
SAMPLES = 3


@dataclass
class Scene:
    """A run with one group, and replicas that are started one after the other."""

    context: Context
    transitions: GroupTransitions
    sampling: Sampling
    engines: list[StepEngine] = field(default_factory=list)

    async def start(self, version: int = 1) -> tuple[GroupWorker, LeasedTask]:
        """A new replica, and the group's task under its lease."""
        context = self.context
        stream, name = context.keys.lane(Lane.TRAIN).tasks, f"replica-{len(self.engines)}"
        consumer = Consumer(context.redis, context.keys, stream, "rollout", name, Task, LEASE_S, 3)
        await consumer.open()
        self.engines.append(StepEngine(version))
        engine: Any = self.engines[-1]
        tokenizer: Any = FixedTokenizer(PROMPT_IDS)
        worker = GroupWorker(ResponseGenerator(engine, tokenizer, 4096, context.record.id))
        [delivery] = await consumer.read(1, 1.0)
        return worker, LeasedTask(context, Lane.TRAIN, consumer, self.transitions, delivery)

    async def payloads(self) -> list[SamplePayload]:
        """Those that were published; none is damaged."""
        whole, damaged = await fetch(self.context.redis, [self.context.keys.payload("g0", at) for at in range(SAMPLES)])
        assert damaged == {}
        return list(whole.values())

    def expected(self) -> list[dict[str, Any]]:
        """What one engine draws."""
        return [undisturbed(index, PROMPT_IDS.tolist(), self.sampling) for index in range(SAMPLES)]

    async def kept(self) -> dict[int, int]:
        """By sample, how many tokens of half-drawn responses Redis has."""
        fields = await self.context.redis.hgetall(self.context.keys.partials("g0"))
        return {int(name.split(b":")[1]): int(value) for name, value in fields.items() if name.startswith(b"tokens:")}

    def counted(self, name: str, **labels: str) -> float:
        """A metric of the run."""
        return REGISTRY.get_sample_value(name, {"run": self.context.record.id, **labels}) or 0.0


@asynccontextmanager
async def scene(
    redis: Any, run: str, tokens: int = 120, max_staleness: int = 1, **sampling: Any
) -> AsyncIterator[Scene]:
    document = recipe_document("/none", limits={"max_staleness": max_staleness})
    async with service_context(redis, run, document, "rollout") as context:
        transitions = await GroupTransitions.fenced(redis, context.keys, "rollout")
        wanted = task("g0", SAMPLES, tokens=tokens)
        wanted = wanted.model_copy(update={"sampling": wanted.sampling.model_copy(update=sampling)})
        await transitions.dispatch(Lane.TRAIN, [wanted], None)
        yield Scene(context, transitions, wanted.sampling)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a test take milliseconds."""
    monkeypatch.setattr(rollout.tasks, "MOMENT_S", 0.002)
    monkeypatch.setattr(rollout.half_drawn, "KEEP_EVERY_S", 0.005)
    monkeypatch.setattr(rollout.half_drawn, "KEEP_TOKENS", 4)


async def lapse(task: LeasedTask) -> None:
    """The lease of a replica that died a while ago."""
    lease, idle = task.delivery.lease, int(LEASE_S * 1000) + 1000
    await task.context.redis.xclaim(
        lease.stream, lease.consumer_group, lease.consumer, 0, [lease.entry], idle=idle, justid=True
    )


async def disturb(found: Scene, dice: random.Random) -> None:
    """Replicas draw the group one after the other: they end or die in the middle, and versions change."""
    version = 1
    async with asyncio.timeout(60):
        while True:
            worker, task = await found.start(version)
            engine = found.engines[-1]
            working, keeping = asyncio.create_task(worker.work(task)), asyncio.create_task(worker.keep())
            alive = asyncio.create_task(engine.until_drawn(dice.randrange(5, 150)))
            await asyncio.wait([working, alive], return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and dice.random() < 0.3:
                version += 1
                engine.version = version
                await engine.until_drawn(engine.drawn_tokens + 1)
            if dice.random() < 0.5:
                worker.end()
                await working
            await cancel_and_wait(working, keeping, alive)
            [stream] = await found.context.redis.xinfo_groups(found.context.keys.lane(Lane.TRAIN).tasks)
            if stream["pending"] == 0:
                return
            await lapse(task)


@pytest.mark.parametrize("top_k", [None, 5])
async def test_what_is_published_is_what_one_engine_draws(redis: Any, run_id: str, top_k: int | None) -> None:
    """However its parts are split; every token has the version that its engine held."""
    for seed in range(4):
        async with scene(redis, f"{run_id}-{seed}", max_staleness=7, top_k=top_k) as found:
            await disturb(found, random.Random(seed))
            payloads = await found.payloads()
            assert [content(payload) for payload in payloads] == found.expected()
            for payload in payloads:
                versions = [span.version for span in payload.spans]
                assert versions == sorted(set(versions))
                ends = [0, *(span.end for span in payload.spans)]
                assert [span.start for span in payload.spans] == ends[:-1]
                assert ends[-1] == len(payload.response_ids)
            assert len(found.engines) > 2, "nothing was disturbed"
            assert not await redis.exists(found.context.keys.partials("g0"))
            samples = await redis.xlen(found.context.keys.lane(Lane.TRAIN).samples)
            assert samples == SAMPLES


async def test_a_replica_that_ends_keeps_every_token(redis: Any, run_id: str) -> None:
    async with scene(redis, run_id, tokens=400) as found:
        worker, task = await found.start()
        working = asyncio.create_task(worker.work(task))
        await found.engines[0].until_drawn(60)
        worker.end()
        await working
        kept = await found.kept()
        assert sum(kept.values()) >= 60, "every token from before the notice"
        worker, again = await found.start()  # at once: no lease has to expire
        assert again.delivery.deliveries == 1, "a return is no failed delivery"
        await worker.work(again)
        assert [content(payload) for payload in await found.payloads()] == found.expected()
        tokens = sum(len(payload.response_ids) for payload in await found.payloads())
        assert found.engines[1].drawn_tokens == tokens - sum(kept.values())
        assert found.counted("penstock_kept_tokens_total") == sum(kept.values())
        returned = found.counted("penstock_messages_total", stream="train-tasks", result=TaskResult.RETURNED)
        assert returned == 1
        entries = await redis.xrange(found.context.keys.lane(Lane.TRAIN).samples)
        samples = [Sample.model_validate_json(entry[b"m"]) for _, entry in entries]
        own = {sample.index for sample in samples if sample.facts.replica == found.context.heartbeat.info.id}
        assert own == set(range(SAMPLES)) - set(kept), "no replica is said to have drawn what several drew"


async def test_a_replica_that_is_killed_loses_what_is_new(redis: Any, run_id: str) -> None:
    """And deliveries with which more was kept are not counted: the task is not dead-lettered."""
    async with scene(redis, run_id, tokens=900) as found:
        kept: dict[int, int] = {}
        for _ in range(6):  # limits.max_deliveries is 3
            worker, task = await found.start()
            working, keeping = asyncio.create_task(worker.work(task)), asyncio.create_task(worker.keep())
            before = sum(kept.values())

            async def grown(before: int = before) -> bool:
                return sum((await found.kept()).values()) > before

            await until(grown, 30)
            await cancel_and_wait(working, keeping)
            kept = await found.kept()
            await lapse(task)
        assert await redis.xlen(found.context.keys.dead) == 0


async def test_nothing_is_sent_again_of_a_group_that_has_ended(
    redis: Any, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[list[int]] = []
    keep = rollout.tasks.keep_partials

    async def noted(*given: Any) -> list[int]:
        sent.append(await keep(*given))
        return sent[-1]

    monkeypatch.setattr(rollout.tasks, "keep_partials", noted)
    async with scene(redis, run_id, tokens=400) as found:
        worker, task = await found.start()
        working, keeping = asyncio.create_task(worker.work(task)), asyncio.create_task(worker.keep())

        async def kept() -> bool:
            return len(await found.kept()) == SAMPLES

        await until(kept, 30)
        await found.transitions.release(Lane.TRAIN, "g0", Release.STALE, SAMPLES)
        await working
        await cancel_and_wait(keeping)
        assert not await found.kept()
    assert sum(reply.count(NEVER) for reply in sent) == SAMPLES, "once for each response"


async def test_a_task_without_progress_is_dead_lettered(redis: Any, run_id: str) -> None:
    async with scene(redis, run_id) as found:
        for _ in range(3):
            _, task = await found.start()
            await lapse(task)
        with pytest.raises(ValueError, match="not enough values"):
            await found.start()
        assert await redis.xlen(found.context.keys.dead) == 1


async def left_by_a_replica(found: Scene, version: int = 1) -> dict[int, int]:
    """What a replica that ends keeps, by sample."""
    worker, task = await found.start(version)
    working = asyncio.create_task(worker.work(task))
    await found.engines[-1].until_drawn(30)
    worker.end()
    await working
    return await found.kept()


@pytest.mark.parametrize(
    ("case", "reason"),
    [("another version", "version"), ("too stale", "stale"), ("damaged", None), ("a seed", None)],
)
async def test_what_must_not_be_gone_on_from_is_dropped(redis: Any, run_id: str, case: str, reason: str | None) -> None:
    staleness = 0 if case == "another version" else 1
    async with scene(redis, run_id, max_staleness=staleness, **({"seed": 7} if case == "a seed" else {})) as found:
        kept = await left_by_a_replica(found)
        assert bool(kept) == (case != "a seed")
        keys = found.context.keys
        if case == "too stale":
            policy = CommittedPolicy(version=4, step=4)
            steps = '{"2": 2, "3": 3, "4": 4}'
            await redis.hset(keys.policy, mapping={"version": 4, "step": policy.step, "version_steps": steps})
        if case == "damaged":
            body = await redis.hget(keys.partials("g0"), "1:0")
            await redis.hset(keys.partials("g0"), "1:0", body[:-1] + bytes([body[-1] ^ 1]))
        worker, task = await found.start(2)
        await worker.work(task)
        payloads = await found.payloads()
        assert [content(payload) for payload in payloads] == found.expected()
        fresh = [payload.spans[0].version == 2 for payload in payloads]
        assert fresh == ([False, True, False] if case == "damaged" else [True] * SAMPLES)
        if reason:
            assert found.counted("penstock_dropped_tokens_total", reason=reason) == sum(kept.values())
        events = [entry[b"m"] for _, entry in await redis.xrange(keys.events)]
        assert any(b"partial-damaged" in event for event in events) == (case == "damaged")


async def test_a_full_redis_delays_no_response(
    redis: Any, run_id: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def full(*_: Any, **__: Any) -> list[int]:
        raise RedisFullError("Redis is at its maxmemory")

    monkeypatch.setattr("services.streams.delivery.partials.call_for_each", full)
    async with scene(redis, run_id) as found:
        worker, task = await found.start()
        keeping = asyncio.create_task(worker.keep())
        await worker.work(task)
        assert not keeping.done()
        await cancel_and_wait(keeping)
        assert len(await found.payloads()) == SAMPLES
    assert caplog.text.count("are not kept for now: Redis is at its maxmemory") == 1, "once, not for each task and time"


async def test_whole_responses_come_before_pieces(redis: Any, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a full Redis, what is kept of a whole response makes room for it, and nothing more is kept meanwhile."""
    monkeypatch.setattr(rollout.tasks, "FULL_PAUSE_S", 0.05)
    seen: list[dict[int, int]] = []
    async with scene(redis, run_id, tokens=400) as found:
        publish, refused = found.transitions.publish_samples, 0

        async def full(*given: Any) -> list[int]:
            nonlocal refused
            seen.append(await found.kept())
            if len(seen) <= 4:
                refused += 1
                raise RedisFullError("Redis is at its maxmemory")
            return await publish(*given)

        monkeypatch.setattr(found.transitions, "publish_samples", full)
        worker, task = await found.start()
        keeping = asyncio.create_task(worker.keep())
        await worker.work(task)
        await cancel_and_wait(keeping)
        assert [content(payload) for payload in await found.payloads()] == found.expected()
    assert refused == 4
    assert set(seen[0]) == {0, 1, 2}, "sample 0 ends first"
    assert set(seen[1]) == {1, 2}
    assert seen[2] == seen[3] == seen[4], "nothing is kept while it waits for room"


async def test_a_notice_prefers_no_short_responses(redis: Any, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends after the moment is returned with the rest, even if it ends before the last tokens are kept."""
    async with scene(redis, run_id, tokens=60) as found:
        worker, task = await found.start()
        keep, calls = rollout.half_drawn.WatchedTask.keep, 0

        async def slow(self: Any, least: int = 1) -> None:
            nonlocal calls
            calls += 1
            await keep(self, least)
            if calls == 2:
                await found.engines[0].until_drawn(SAMPLES * 60)

        monkeypatch.setattr(rollout.half_drawn.WatchedTask, "keep", slow)
        working = asyncio.create_task(worker.work(task))
        await found.engines[0].until_drawn(15)
        worker.end()
        await working
        assert not await redis.exists(*(found.context.keys.payload("g0", index) for index in range(SAMPLES)))
        assert set(await found.kept()) == {0, 1, 2}
