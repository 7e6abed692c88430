"""The sampler and the verifier together on a real server; the test plays the fleet and the learner."""

import asyncio
import itertools
import random
import time
from contextlib import asynccontextmanager

import numpy as np
import pytest

from services.cancellation import end
from services.contracts import Batch, Cause, Lane, ProcessInfo, Sample, SampleFacts, StepRecord, Task, VersionSpan
from services.sampler.progress import SamplingStalledError
from services.sampler.service import SamplerService
from services.streams.effects import Effects, group_counts, missing_samples
from services.streams.journal import Journal
from services.streams.keys import RunKeys
from services.streams.leases import Consumer
from services.streams.payloads import SamplePayload
from services.streams.presence import Presence
from tests.conftest import recipe_document, service_context
from verifier.service import VerifierService

DEADLINE_S = 60


class HandFleet:
    """Answers tasks: each response is right with probability `skill`, and carries the current version."""

    def __init__(self, redis, keys, skill=0.5):
        self.redis, self.keys, self.skill = redis, keys, skill
        self.version = 0
        self.effects = Effects(redis, keys, "rollout")
        self.random = random.Random(5)

    async def run(self):
        consumers = {}
        for lane in Lane:
            consumers[lane] = Consumer(
                self.redis, self.keys, self.keys.lane(lane).tasks, "rollout", "hand", Task, 5.0, 3
            )
            await consumers[lane].open()
        for lane in itertools.cycle(Lane):
            for delivery in await consumers[lane].read(4, 0.02):
                await self.answer(lane, delivery)

    async def answer(self, lane, delivery):
        task = delivery.message
        right = str(task.prompt.reference["entry"]["answer"])
        for index in await missing_samples(self.redis, self.keys, task):
            text = right if self.random.random() < self.skill else "no idea"
            now = time.time()
            body = SamplePayload(
                np.zeros(3, np.int32), np.zeros(4, np.int32), np.zeros(4, np.float32), text, "stop",
                (VersionSpan(version=self.version, start=0, end=4),),
            )  # fmt: skip
            facts = SampleFacts(
                payload=self.keys.payload(task.group, index), prompt_tokens=3, response_tokens=4, truncated=False,
                mean_logprob=0.0, oldest_version=self.version, newest_version=self.version, started_at=now,
                finished_at=now,
            )  # fmt: skip
            sample = Sample(group=task.group, index=index, verifier=task.prompt.verifier,
                            reference=task.prompt.reference, facts=facts)  # fmt: skip
            await self.effects.publish_sample(lane, delivery.lease, task.samples, sample, body)


class HandLearner:
    """Consumes batches and publishes versions, remembering the batches."""

    def __init__(self, redis, keys, fleet):
        self.redis, self.keys, self.fleet = redis, keys, fleet
        self.batches: list[Batch] = []

    async def run(self):
        effects = await Effects.fenced(self.redis, self.keys, "learner")
        consumer = Consumer(self.redis, self.keys, self.keys.batches, "learner", "hand", Batch, 5.0, 3)
        await consumer.open()
        while True:
            for delivery in await consumer.read(1, 0.1):
                batch = delivery.message
                await asyncio.sleep(0.1)
                self.batches.append(batch)
                self.fleet.version = batch.version + 1
                record = StepRecord(
                    step=batch.step, version=batch.version + 1, optimizer_steps=2,
                    groups=tuple(group.group for group in batch.groups), metrics=batch.sampling_metrics,
                    generation_started_at=batch.generation_started_at,
                    generation_finished_at=batch.generation_finished_at, learning_started_at=0.0,
                    learning_finished_at=0.0,
                )  # fmt: skip
                assert await effects.commit_step(delivery.lease, batch, record)


@asynccontextmanager
async def running(*coroutines):
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield tasks
    finally:
        await end(*tasks)


async def until(condition, tasks, what):
    ends = time.monotonic() + DEADLINE_S
    while not await condition():
        for task in tasks:
            if task.done():
                task.result()
        assert time.monotonic() < ends, f"{what} did not happen within {DEADLINE_S} s"
        await asyncio.sleep(0.05)


async def evaluated(redis, keys, name):
    return name in {record.name for record in await Journal(redis, keys, "test").evaluations()}


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_run_of_three_steps_reconciles(redis, run_id, max_staleness):
    document = recipe_document("/none", limits={"max_staleness": max_staleness, "rollout_steps": 3})
    keys = RunKeys(run_id)
    fleet = HandFleet(redis, keys)
    learner = HandLearner(redis, keys, fleet)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(SamplerService().run(sampler), VerifierService().run(verifier), fleet.run(), learner.run()) as tasks,
    ):
        await until(lambda: evaluated(redis, keys, "after"), tasks, "the last evaluation")
        counts = await group_counts(redis, keys)
        evaluations = {record.name: record for record in await sampler.journal.evaluations()}
    assert counts.reconciled, counts
    assert counts.trained == 12
    assert [batch.step for batch in learner.batches] == [1, 2, 3]
    ages = [one.staleness for batch in learner.batches for group in batch.groups for one in group.samples]
    assert all(0 <= age <= max_staleness for age in ages), ages
    names = [group.group for batch in learner.batches for group in batch.groups]
    assert len(set(names)) == len(names) == 12, "a group is trained once"
    for batch in learner.batches:
        for group in batch.groups:
            correct = sum(sample.correct for sample in group.samples)
            assert 0 < correct < 4
            assert sum(sample.advantage for sample in group.samples) == pytest.approx(0.0, abs=1e-9)
    assert (evaluations["before"].version, evaluations["after"].version) == (0, 3)
    assert evaluations["before"].prompts == 8
    assert 0.2 < evaluations["before"].accuracy < 0.8


async def test_killed_sampler_is_replaced_without_losing_or_repeating_a_group(redis, run_id):
    document = recipe_document("/none", limits={"rollout_steps": 4})
    keys = RunKeys(run_id)
    fleet = HandFleet(redis, keys)
    learner = HandLearner(redis, keys, fleet)
    async with (
        service_context(redis, run_id, document, "sampler") as first,
        service_context(redis, run_id, document, "sampler") as second,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(VerifierService().run(verifier), fleet.run(), learner.run()) as tasks,
    ):
        async with running(SamplerService().run(first)) as sampling:

            async def one_step():
                return len(learner.batches) >= 1

            await until(one_step, [*tasks, *sampling], "the first batch")
        async with running(SamplerService().run(second)) as sampling:
            await until(lambda: evaluated(redis, keys, "after"), [*tasks, *sampling], "the last evaluation")
        counts = await group_counts(redis, keys)
    assert counts.reconciled, counts
    assert counts.trained == 16
    names = [group.group for batch in learner.batches for group in batch.groups]
    assert len(set(names)) == len(names) == 16


async def test_task_that_is_given_up_is_a_dead_group_and_the_run_goes_on(redis, run_id):
    document = recipe_document("/none", limits={"rollout_steps": 1})
    keys = RunKeys(run_id)
    fleet = HandFleet(redis, keys)
    learner = HandLearner(redis, keys, fleet)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(SamplerService().run(sampler), VerifierService().run(verifier), learner.run()) as tasks,
    ):
        for lane in Lane:
            consumer = Consumer(redis, keys, keys.lane(lane).tasks, "rollout", "hand", Task, 5.0, 3)
            await consumer.open()
            [delivery] = await consumer.read(1, 20)
            body = delivery.message.model_dump_json().encode()
            await consumer.give_up(delivery.lease, body, "nobody answers", 6, Cause.DELIVERIES)
        async with running(fleet.run()) as generating:
            await until(lambda: evaluated(redis, keys, "after"), [*tasks, *generating], "the last evaluation")
        counts = await group_counts(redis, keys)
        evaluations = {record.name: record for record in await sampler.journal.evaluations()}
    assert counts.reconciled, counts
    assert (counts.dead, counts.trained) == (1, 4)
    assert set(evaluations) == {"before", "after"}


async def test_starvation_ends_with_its_reason(redis, run_id):
    document = recipe_document("/none", limits={"rollout_steps": 1, "stall_timeout_s": 3.0})
    keys = RunKeys(run_id)
    fleet = HandFleet(redis, keys, skill=0.0)
    ready = ProcessInfo(id="rollout-1", service="rollout", run=run_id, host="h", pid=1, metrics="h:1", state="ready")
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(VerifierService().run(verifier), fleet.run()),
        Presence(redis, ready),
    ):
        with pytest.raises(SamplingStalledError, match="every group was filtered for 3 s"):
            await asyncio.wait_for(SamplerService().run(sampler), DEADLINE_S)
        counts = await group_counts(redis, keys)
    assert counts.reconciled, counts
    assert counts.filtered > 0
