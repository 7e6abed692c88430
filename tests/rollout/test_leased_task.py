"""A leased task's requests to the engine, its samples, and its route through the files; no engine is started."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY

from rollout.engine import Generation
from rollout.generation import TRIES, MixedVersionError, ResponseGenerator
from rollout.nuclei import WideNucleusError
from rollout.tasks import LeasedTask
from services.contracts import Lane, Release, Task, TaskResult, VersionSpan
from services.streams.connection.functions import RedisFullError
from services.streams.delivery.consumer import Consumer, Delivery
from services.streams.delivery.leases import Lease, renew_lease
from services.streams.delivery.payloads import SamplePayload
from services.streams.keys import RunKeys
from services.streams.state.group_state import GroupTransitions
from tests.harness.leased_task_route import FixedTokenizer, SameAnswer, leased_task, leased_task_route
from tests.harness.small_run import recipe_document, service_context
from tests.rollout.hand_sampler import task

PROMPT_IDS = np.array([2, 4, 9], np.int32)
SPANS = (VersionSpan(version=4, start=0, end=1), VersionSpan(version=6, start=1, end=2))


@asynccontextmanager
async def leased(redis: Any, run: str, lane: Lane, message: Task, max_staleness: int = 0) -> AsyncIterator[LeasedTask]:
    """The second delivery of `message`, of a stream that is never read."""
    document = recipe_document("/none", limits={"max_staleness": max_staleness})
    async with service_context(redis, run, document, "rollout") as context:
        stream = context.keys.lane(lane).tasks
        consumer = Consumer(redis, context.keys, stream, "rollout", "me", Task, 30.0, 3)
        transitions = GroupTransitions(redis, context.keys, "rollout")
        delivery = Delivery(Lease(stream, "rollout", "me", "7-0"), message, 2)
        yield LeasedTask(context, lane, consumer, transitions, delivery)


@pytest.mark.parametrize(("finish_reason", "truncated"), [("stop", False), ("length", True)])
async def test_facts_of_a_mixed_version_response(redis: Any, run_id: str, finish_reason: str, truncated: bool) -> None:
    payload = SamplePayload(
        prompt_ids=PROMPT_IDS,
        response_ids=np.array([5, 6], np.int32),
        behaviour_logprobs=np.array([-0.5, -1.5], np.float32),
        text="ab",
        finish_reason=finish_reason,
        spans=SPANS,
    )
    async with leased(redis, run_id, Lane.TRAIN, task("g0")) as under_lease:
        sample = under_lease.sample(1, payload, 7.0)
        expected_key = under_lease.context.keys.payload("g0", 1)
        replica = under_lease.context.heartbeat.info.id
    facts = sample.facts
    assert (sample.group, sample.index, sample.verifier, sample.reference) == ("g0", 1, "pattern", {"a": 2})
    assert (facts.oldest_version, facts.newest_version) == (4, 6)
    assert (facts.prompt_tokens, facts.response_tokens, facts.truncated) == (3, 2, truncated)
    assert (facts.payload, facts.mean_logprob, facts.replica) == (expected_key, -1.0, replica)
    assert facts.started_at == 7.0 < facts.finished_at


@pytest.mark.parametrize(
    ("lane", "max_staleness", "one_version"),
    [(Lane.TRAIN, 0, True), (Lane.TRAIN, 1, False), (Lane.EVALUATION, 0, False)],
)
async def test_requests_of_an_on_policy_run_are_of_one_version(
    redis: Any, run_id: str, lane: Lane, max_staleness: int, one_version: bool
) -> None:
    message = task("g0")
    seeded = message.model_copy(update={"sampling": message.sampling.model_copy(update={"seed": 40})})
    async with leased(redis, run_id, lane, seeded, max_staleness) as under_lease:
        request = under_lease.request(3, PROMPT_IDS)
    assert (request.name, request.seed, request.one_version) == (f"g0/3/7-0/{under_lease.work}", 43, one_version)


async def test_mixed_version_responses_are_generated_again(redis: Any, run_id: str) -> None:
    engine = SameAnswer(Generation(np.array([5, 6], np.int32), np.array([-0.5, -1.5], np.float32), SPANS, "stop"))
    generator = ResponseGenerator(engine, FixedTokenizer(PROMPT_IDS), 256)  # type: ignore[arg-type]
    async with leased(redis, run_id, Lane.TRAIN, task("g0")) as under_lease:
        with pytest.raises(MixedVersionError, match=f"g0/1/7-0/{under_lease.work} was mixed-version in all 3 attempts"):
            await generator.generate(under_lease.request(1, PROMPT_IDS))
    assert engine.names == [f"g0/1/7-0/{under_lease.work}/{attempt}" for attempt in range(TRIES)]


async def test_a_wide_nucleus_is_drawn_again_then_dead_lettered(
    redis: Any, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task becomes a dead letter with the reason; the replica goes on."""
    async with leased_task(redis, run_id, samples=1) as (worker, under_lease):
        engine, tries = worker._generator._engine, []

        async def generate(_ids: Any, _sampling: Any, name: str, _seed: Any) -> Generation:
            tries.append(name)
            raise WideNucleusError("a nucleus has more than 33 tokens")

        monkeypatch.setattr(engine, "generate", generate)
        await worker.work(under_lease)
    assert len(tries) == TRIES
    [(_, letter)] = await redis.xrange(RunKeys(run_id).dead)
    assert b"was not usable in 3 attempts: a nucleus has more than 33 tokens" in letter[b"m"]


async def test_a_task_passes_through_few_files(redis: Any, run_id: str) -> None:
    visited = await leased_task_route(redis, run_id)
    returns = len(visited) - len(set(visited))
    assert "tasks.py" in visited
    assert len(set(visited)) <= 4
    assert returns <= 2, visited


async def test_the_largest_group_is_published(redis: Any, run_id: str) -> None:
    """All of its responses are ready at once."""
    async with leased_task(redis, run_id, samples=4096) as (worker, largest):
        await worker.work(largest)
    assert await redis.xlen(RunKeys(run_id).lane(Lane.TRAIN).samples) == 4096


@pytest.mark.parametrize("released", [False, True])
async def test_a_renewal_after_the_ack_ends_no_work(
    redis: Any, run_id: str, monkeypatch: pytest.MonkeyPatch, released: bool
) -> None:
    """The call that acks the task is served, and the lease is looked at before its reply arrives."""
    looked = asyncio.Event()

    async def renew(client: Any, lease: Lease) -> bool:
        owned = await renew_lease(client, lease)
        if not owned:
            looked.set()
        return owned

    def late(method: Any) -> Any:
        async def replying_late(*arguments: Any) -> Any:
            reply = await method(*arguments)
            await looked.wait()
            await asyncio.sleep(0.05)  # a work that is to end has ended by then
            return reply

        return replying_late

    def counted(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(name, {"run": run_id, **labels}) or 0.0

    monkeypatch.setattr("services.streams.delivery.leases.renew_lease", renew)
    async with leased_task(redis, run_id, samples=1) as (worker, under_lease):
        monkeypatch.setattr(under_lease.consumer._renewal, "_every_s", 0.05)
        monkeypatch.setattr(under_lease.consumer, "ack", late(under_lease.consumer.ack))
        monkeypatch.setattr(under_lease.transitions, "publish_samples", late(under_lease.transitions.publish_samples))
        if released:
            await under_lease.transitions.release(Lane.TRAIN, "g0", Release.DEAD, 1)
        async with asyncio.timeout(30):
            await worker.work(under_lease)
    results = {result: counted("penstock_messages_total", stream="train-tasks", result=result) for result in TaskResult}
    assert {result for result, count in results.items() if count} == {TaskResult.DONE}
    assert counted("penstock_response_tokens_total") == (0 if released else 1)


async def test_a_withdrawn_group_ends_the_wait_for_memory(
    redis: Any, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leased_task(redis, run_id, samples=1) as (worker, under_lease):
        transitions = under_lease.transitions

        async def full(*_: Any) -> list[int]:
            await transitions.withdraw(Lane.TRAIN, "g0", 1)
            raise RedisFullError("Redis is at its maxmemory")

        monkeypatch.setattr(under_lease.consumer._renewal, "_every_s", 0.05)
        monkeypatch.setattr("rollout.tasks.FULL_PAUSE_S", 0.05)
        monkeypatch.setattr(transitions, "publish_samples", full)
        async with asyncio.timeout(30):
            await worker.work(under_lease)
        assert under_lease.context.waits.current(time.time()) == ()
    labels = {"run": run_id, "stream": "train-tasks", "result": TaskResult.LEASE_LOST}
    assert REGISTRY.get_sample_value("penstock_messages_total", labels) == 1
