"""The sampler and the verifier together on a real server; the test plays the fleet and the learner."""

import asyncio
import itertools
import random
import time
from contextlib import asynccontextmanager

import numpy as np
import pytest
from prometheus_client import REGISTRY

from services.cancellation import end
from services.contracts import Batch, Cause, Lane, Policy, Sample, SampleFacts, StepRecord, Task, VersionSpan
from services.sampler.service import SamplerService
from services.streams.effects import Effects, group_counts, missing_samples
from services.streams.history import History
from services.streams.journal import Journal
from services.streams.keys import RunKeys
from services.streams.leases import Consumer
from services.streams.payloads import SamplePayload
from tests.conftest import recipe_document, service_context
from verifier.service import VerifierService

DEADLINE_S = 60


class HandFleet:
    """Answers tasks: each response is right with probability `skill`, and carries the current version."""

    def __init__(self, redis, keys, skill=0.5):
        self.redis, self.keys, self.skill = redis, keys, skill
        self.version = 0
        self.tasks: list[Task] = []
        """Every training task that was delivered, once each; the stream itself is trimmed."""
        self.effects = Effects(redis, keys, "rollout")
        # Dice for each lane: how the lanes' answers interleave is chance.
        self.random, self.evaluation_random = random.Random(5), random.Random(6)

    async def run(self):
        consumers = {}
        for lane in Lane:
            consumers[lane] = Consumer(
                self.redis, self.keys, self.keys.lane(lane).tasks, "rollout", "hand", Task, 5.0, 3
            )
            await consumers[lane].open()
        for lane in itertools.cycle(Lane):
            for delivery in await consumers[lane].read(4, 0.02):
                if lane is Lane.TRAIN and delivery.deliveries == 1:
                    self.tasks.append(delivery.message)
                await self.answer(lane, delivery)

    def payload(self, text):
        return SamplePayload(
            np.zeros(3, np.int32), np.zeros(4, np.int32), np.zeros(4, np.float32), text, "stop",
            (VersionSpan(version=self.version, start=0, end=4),),
        )  # fmt: skip

    async def answer(self, lane, delivery):
        task = delivery.message
        right = str(task.prompt.reference["entry"]["answer"])
        dice = self.random if lane is Lane.TRAIN else self.evaluation_random
        for index in await missing_samples(self.redis, self.keys, task):
            text = right if dice.random() < self.skill else "no idea"
            now = time.time()
            body = self.payload(text)
            facts = SampleFacts(
                payload=self.keys.payload(task.group, index), prompt_tokens=len(body.prompt_ids),
                response_tokens=len(body.response_ids), truncated=False,
                mean_logprob=0.0, oldest_version=self.version, newest_version=self.version, started_at=now,
                finished_at=now,
            )  # fmt: skip
            sample = Sample(group=task.group, index=index, verifier=task.prompt.verifier,
                            reference=task.prompt.reference, facts=facts)  # fmt: skip
            await self.effects.publish_sample(lane, delivery.lease, task.wanted, sample, body)


class HandLearner:
    """Consumes batches and publishes versions, remembering the batches."""

    def __init__(self, redis, keys, fleet):
        self.redis, self.keys, self.fleet = redis, keys, fleet
        self.batches: list[Batch] = []

    async def run(self):
        history = await History.fenced(self.redis, self.keys, "learner")
        policy = await history.policy() or Policy(version=await history.announce(0, "w0"), step=0)
        await history.commit_policy(policy.version, policy.step, f"w{policy.step}")
        after, step = "0-0", policy.step
        while True:
            for logged in await history.batches(after, 0.1):
                batch, after = logged.batch, logged.entry
                if batch.step <= step:
                    continue
                step = batch.step
                await asyncio.sleep(0.1)
                self.batches.append(batch)
                self.fleet.version = await history.announce(batch.step, f"w{batch.step}")
                record = StepRecord(
                    step=batch.step, version=self.fleet.version, weights=f"w{batch.step}", optimizer_steps=2,
                    groups=tuple(group.group for group in batch.groups), metrics=batch.sampling_metrics,
                    prompts=tuple(group.prompt for group in batch.groups),
                    lags=tuple(group.lag for group in batch.groups),
                    generation_started_at=batch.generation_started_at,
                    generation_finished_at=batch.generation_finished_at, learning_started_at=0.0,
                    learning_finished_at=0.0,
                )  # fmt: skip
                assert await history.commit_step(record, logged.entry)
                await self.cover(history, logged)

    async def cover(self, history, logged):
        assert await history.cover(logged)


@asynccontextmanager
async def running(*coroutines):
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield tasks
    finally:
        await end(*tasks)


async def until(condition, tasks, what, deadline_s=DEADLINE_S):
    ends = time.monotonic() + deadline_s
    while not await condition():
        for task in tasks:
            if task.done():
                task.result()
        assert time.monotonic() < ends, f"{what} did not happen within {deadline_s} s"
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
            await consumer.give_up(delivery, "nobody answers", Cause.DELIVERIES)
        async with running(fleet.run()) as generating:
            await until(lambda: evaluated(redis, keys, "after"), [*tasks, *generating], "the last evaluation")
        counts = await group_counts(redis, keys)
        evaluations = {record.name: record for record in await sampler.journal.evaluations()}
    assert counts.reconciled, counts
    assert (counts.dead, counts.trained) == (1, 4)
    assert set(evaluations) == {"before", "after"}


def rung_of(run):
    return REGISTRY.get_sample_value("penstock_starvation_rung", {"run": run})


async def test_starvation_climbs_its_ladder_and_pauses_until_somebody_resumes(redis, run_id):
    rungs = {"widen_after": 1, "boundary_after": 2, "partial_after": 3, "pause_after": 4}
    document = recipe_document(
        "/none", algorithm={"dynamic_sampling": {"starvation": rungs}}, limits={"rollout_steps": 1},
        evaluation={"samples": 1},
    )  # fmt: skip
    keys = RunKeys(run_id)
    fleet = HandFleet(redis, keys, skill=0.0)
    learner = HandLearner(redis, keys, fleet)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(SamplerService().run(sampler), VerifierService().run(verifier), fleet.run(), learner.run()) as tasks,
    ):

        async def told():
            return any(event.phase == "starvation-pause" for _, event in await sampler.journal.events())

        await until(told, tasks, "the pause")
        text = (await redis.get(keys.starved)).decode()
        phases = [event.phase for _, event in await sampler.journal.events()]
        assert rung_of(run_id) == 4
        counts = await group_counts(redis, keys)
        assert counts.reconciled, counts
        assert (counts.trained, learner.batches) == (0, [])
        assert "with 0" in text, text
        assert "0 with 4" in text, text
        climbed = [phase for phase in phases if phase.startswith("starvation")]
        assert climbed[0] == "starvation-widen"
        assert climbed[-1] == "starvation-pause"

        async def quiet():
            return (await group_counts(redis, keys)).pending == 0

        await until(quiet, tasks, "the end of what was under way")
        before = (await group_counts(redis, keys)).dispatched
        await asyncio.sleep(1.0)
        assert (await group_counts(redis, keys)).dispatched == before, "a paused run dispatches nothing"
        fleet.skill = 0.5
        await redis.delete(keys.starved)
        await until(lambda: evaluated(redis, keys, "after"), tasks, "the last evaluation")
        assert rung_of(run_id) < 4
        counts = await group_counts(redis, keys)
    assert counts.reconciled, counts
    assert counts.trained == 4
    assert [len(batch.groups) for batch in learner.batches] == [4]


async def test_few_kept_groups_make_a_partial_batch(redis, run_id):
    rungs = {"widen_after": None, "boundary_after": None, "partial_after": 2, "pause_after": None}
    document = recipe_document(
        "/none", algorithm={"dynamic_sampling": {"starvation": rungs}}, evaluation={"samples": 1},
        limits={"rollout_steps": 1, "groups_per_step": 4, "max_staleness": 0},
    )  # fmt: skip
    keys = RunKeys(run_id)
    # Of its first 54 groups three are kept, the first of them the seventh; at most 32 are under way.
    fleet = HandFleet(redis, keys, skill=0.01)
    learner = HandLearner(redis, keys, fleet)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(SamplerService().run(sampler), VerifierService().run(verifier), fleet.run(), learner.run()) as tasks,
    ):
        await until(lambda: evaluated(redis, keys, "after"), tasks, "the last evaluation")
        counts = await group_counts(redis, keys)
    assert counts.reconciled, counts
    [batch] = learner.batches
    assert 1 <= len(batch.groups) < 4
    assert batch.sampling_metrics["groups_missing"] == 4 - len(batch.groups)


async def test_screening_draws_the_rest_only_of_mixed_groups(redis, run_id):
    chosen = {"strategy": "screen", "screen_samples": 2}
    document = recipe_document(
        "/none", algorithm={"dynamic_sampling": {"selection": chosen}}, evaluation={"samples": 1},
        limits={"rollout_steps": 3},
    )  # fmt: skip
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
    assert counts.reconciled, counts
    assert counts.trained == 12
    assert sum(batch.sampling_metrics["groups_screened_out"] for batch in learner.batches) > 0
    for group in (group for batch in learner.batches for group in batch.groups):
        assert 0 < sum(one.correct for one in group.samples[:2]) < 2, "the screen was mixed"
        assert len(group.samples) == 4
    # A batch may be made of what was judged before the last one: only over the run it is never less than one.
    judged = sum(batch.sampling_metrics["response_tokens"] for batch in learner.batches)
    assert judged >= sum(one.tokens for batch in learner.batches for group in batch.groups for one in group.samples)
    assert all(batch.sampling_metrics["rollout_tokens_per_trained_token"] > 0 for batch in learner.batches)


async def test_a_group_whose_messages_are_gone_ends_as_dead(redis, run_id, monkeypatch):
    monkeypatch.setattr("services.sampler.orphans.ORPHANED_AFTER_S", 1.5)
    document = recipe_document("/none", limits={"rollout_steps": 1}, evaluation={"samples": 1})
    keys = RunKeys(run_id)
    fleet = HandFleet(redis, keys)
    learner = HandLearner(redis, keys, fleet)
    streams = keys.lane(Lane.TRAIN)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(SamplerService().run(sampler), VerifierService().run(verifier)) as tasks,
    ):

        async def first_task():
            return await redis.xrange(streams.tasks)

        await until(first_task, tasks, "the first task")
        [(entry, _), *_] = await first_task()
        await redis.xdel(streams.tasks, entry)
        await redis.xadd(streams.tasks, {"m": b'{"kind": "task", "group": "g000'})
        async with running(fleet.run()) as generating:

            async def ended():
                return (await group_counts(redis, keys)).dead == 1

            await until(ended, [*tasks, *generating], "the end of the orphan")
            async with running(learner.run()) as learning:
                await until(lambda: evaluated(redis, keys, "after"), [*tasks, *generating, *learning], "the end")
        counts = await group_counts(redis, keys)
        told = [event.text for _, event in await sampler.journal.events() if event.phase == "group-orphaned"]
    assert counts.reconciled, counts
    assert told == ["g00000000: what was on its way is gone from all streams"]
