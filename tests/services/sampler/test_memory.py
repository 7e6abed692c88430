"""A run that is short of memory in Redis goes on: partial batches, withdrawn groups, one group at a time."""

import asyncio
import time
from contextlib import suppress

import numpy as np
import pytest
from prometheus_client import REGISTRY

from services.contracts import Lane, Task, VersionSpan
from services.sampler.evaluation.evaluator import HeldOut
from services.sampler.service import SamplerService
from services.sampler.watches.memory import RedisMemory
from services.streams.connection.functions import REFUSING, RedisFullError
from services.streams.delivery.consumer import Consumer
from services.streams.delivery.leases import LeaseLostError
from services.streams.delivery.payloads import SamplePayload
from services.streams.keys import RunKeys
from services.streams.memory_bound import evaluated_prompt, footprint
from services.streams.memory_plan import compare_loaded, compare_plan
from services.streams.state.group_counts import group_counts
from services.streams.state.group_state import GroupTransitions
from services.streams.state.runs import RunRecords
from services.streams.state.stats import HIGH_WATER, memory_use
from services.waits import REDIS_MEMORY, cancellation_requested
from tests.harness.hand_fleet import HandFleet, HandLearner, evaluated, running, until
from tests.harness.small_run import recipe_document, service_context
from tests.services.sampler.archiving import evaluate
from tests.services.sampler.test_evaluation import PROMPTS
from verifier.service import VerifierService

pytestmark = pytest.mark.usefixtures("quick", "loaded_once")


def events_of(events, phase):
    return [event.text for _, event in events if event.phase == phase]


class RoomForSamples:
    """Publishes samples as a replica does: while Redis is full, it waits, and its heartbeat reports the wait."""

    def __init__(self, transitions, waits):
        self._transitions, self._waits = transitions, waits

    async def publish_samples(self, *samples):
        try:
            while True:
                try:
                    return await self._transitions.publish_samples(*samples)
                except RedisFullError as error:
                    self._waits.pending(REDIS_MEMORY, str(error), 60)
                    await asyncio.sleep(0.1)
        finally:
            self._waits.done(REDIS_MEMORY)


class PatientFleet(HandFleet):
    """Works on many tasks at once, answers at length, and waits for room in Redis."""

    TOKENS = 4000

    def __init__(self, context, skill=0.5):
        super().__init__(context.redis, context.keys, skill)
        self.transitions = RoomForSamples(self.transitions, context.waits)

    async def run(self):
        async with asyncio.TaskGroup() as lanes:
            for lane in Lane:
                lanes.create_task(self.serve(lane))

    async def serve(self, lane):
        tasks = self.keys.lane(lane).tasks
        consumer = Consumer(self.redis, self.keys, tasks, "rollout", "hand", Task, 5.0, 20)
        await consumer.open()
        async with asyncio.TaskGroup() as working:
            while not cancellation_requested():
                for delivery in await consumer.read(8, 0.05):
                    working.create_task(self.work(consumer, lane, delivery))

    async def work(self, consumer, lane, delivery):
        # The group was withdrawn meanwhile: the first sample that is published late acks its task.
        with suppress(LeaseLostError):
            async with consumer.renewing(delivery.lease):
                await self.answer(lane, delivery)
                if not await self.redis.sismember(self.keys.lane(lane).pending, delivery.message.group):
                    await consumer.ack(delivery.lease)

    def payload(self, text):
        tokens = self.TOKENS
        spans = (VersionSpan(version=self.version, start=0, end=tokens),)
        zeros = np.zeros(tokens, np.int32)
        return SamplePayload(zeros[:8], zeros, zeros.astype(np.float32), text.ljust(8 * tokens), "length", spans)


class TrainingOnly(HandFleet):
    """Leaves the prompts of evaluations alone."""

    async def answer(self, lane, delivery):
        if lane is Lane.TRAIN:
            await super().answer(lane, delivery)


@pytest.mark.parametrize("share", [0.11, pytest.param(0.05, marks=pytest.mark.slow)])
async def test_a_run_far_below_its_plan_succeeds(own_server, run_id, share):
    document = recipe_document(
        "/none",
        model={"max_model_len": 4096},
        rollout={"max_new_tokens": PatientFleet.TOKENS},
        data={"max_prompt_tokens": 64},
        algorithm={"group_size": 16},
        limits={"rollout_steps": 4, "groups_per_step": 8, "max_inflight_groups": 64, "max_staleness": 3},
    )
    _, redis = own_server
    keys = RunKeys(run_id)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        service_context(redis, run_id, document, "rollout") as rollout,
    ):
        await redis.config_set("maxmemory", int(share * footprint(sampler.record.recipe).total))
        fleet = PatientFleet(rollout, skill=0.05)
        learner = HandLearner(redis, keys, fleet)
        async with running(
            SamplerService().run(sampler), VerifierService().run(verifier), fleet.run(), learner.run()
        ) as tasks:
            await until(lambda: evaluated(redis, keys, "after"), tasks, "the last evaluation", deadline_s=90)
            counts = await group_counts(redis, keys)
        events = await sampler.event_log.events()
        [after] = [record for record in await sampler.event_log.evaluations() if record.name == "after"]
    assert counts.reconciled, counts
    assert [batch.step for batch in learner.batches] == [1, 2, 3, 4]
    assert counts.trained == sum(len(batch.groups) for batch in learner.batches)
    assert (after.prompts, after.dropped) == (8, 0)
    assert events_of(events, "redis-memory-short"), "the test exerts no pressure"
    if share < 0.11:
        assert events_of(events, "groups-withdrawn"), "the test exerts no pressure"


async def test_kept_groups_become_a_partial_batch(crowded, run_id):
    redis, fill = crowded
    document, keys = recipe_document("/none", limits={"rollout_steps": 1}), RunKeys(run_id)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
    ):
        fleet = HandFleet(redis, keys, skill=0.0)
        learner = HandLearner(redis, keys, fleet)
        async with running(SamplerService().run(sampler), VerifierService().run(verifier), learner.run()) as tasks:

            async def dispatched():
                return (await group_counts(redis, keys)).dispatched >= 4

            await until(dispatched, tasks, "the first groups")
            await fill(0.9)

            async def short():
                return events_of(await sampler.event_log.events(), "redis-memory-short")

            await until(short, tasks, "the shortage")
            consumer = Consumer(redis, keys, keys.lane(Lane.TRAIN).tasks, "rollout", "hand", Task, 5.0, 3)
            await consumer.open()
            for number, delivery in enumerate(await consumer.read(64, 5)):
                fleet.skill = 0.5 if number < 2 else 0.0
                await fleet.answer(Lane.TRAIN, delivery)

            async def trained():
                return len(learner.batches) == 1

            await until(trained, tasks, "a partial batch", deadline_s=60)
            counts = await group_counts(redis, keys)
            events = await sampler.event_log.events()
        [batch] = learner.batches
        assert 1 <= len(batch.groups) < 4, "the fleet's answers leave less than a whole batch"
        [text] = events_of(events, "redis-memory-partial")
    assert text == f"rollout step 1 trains {len(batch.groups)} of 4 groups: nothing else frees memory in Redis"
    assert counts.reconciled, counts
    assert counts.dead == 0


async def test_groups_without_room_are_withdrawn_newest_first(crowded, run_id):
    redis, fill = crowded
    document, keys = recipe_document("/none", limits={"rollout_steps": 2}), RunKeys(run_id)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        service_context(redis, run_id, document, "rollout") as rollout,
    ):
        fleet = HandFleet(redis, keys)
        learner = HandLearner(redis, keys, fleet)
        async with running(SamplerService().run(sampler), VerifierService().run(verifier), learner.run()) as tasks:

            async def dispatched():
                return (await group_counts(redis, keys)).dispatched == 8

            await until(dispatched, tasks, "the first groups")
            await fill(0.9)
            # Groups that are being generated are left alone, however long it takes.
            await until(lambda: shortage(sampler.event_log), tasks, "the shortage")
            await asyncio.sleep(1.5)
            assert (await group_counts(redis, keys)).dead == 0
            rollout.waits.pending(REDIS_MEMORY, "room for samples", 60)

            async def one_left():
                return (await group_counts(redis, keys)).pending == 1

            await until(one_left, tasks, "the withdrawals", deadline_s=60)
            await asyncio.sleep(1)
            assert await redis.smembers(keys.lane(Lane.TRAIN).pending) == {b"g00000000"}, "the last one stays"
            texts = events_of(await sampler.event_log.events(), "groups-withdrawn")
            [wait] = [wait for wait in sampler.waits.current(time.time()) if wait.name == REDIS_MEMORY]
            # Nothing is released any more once there is memory, and the run goes on.
            rollout.waits.done(REDIS_MEMORY)
            await fill(0)
            async with running(fleet.run()) as generating:
                await until(lambda: evaluated(redis, keys, "after"), [*tasks, *generating], "the last evaluation")
            counts = await group_counts(redis, keys)
    assert texts[0].startswith("2 groups, g00000007 first: Redis has no room for the responses of rollout-")
    assert sum(int(text.split()[0]) for text in texts) == counts.dead == 7
    assert "responses of 1 groups in flight have no room" in wait.waits_for
    assert counts.reconciled, counts
    assert counts.trained == 8


async def shortage(event_log):
    return events_of(await event_log.events(), "redis-memory-short")


@pytest.mark.slow
async def test_a_run_that_can_free_nothing_goes_on_group_by_group(crowded, run_id):
    redis, fill = crowded
    document, keys = recipe_document("/none", limits={"rollout_steps": 2}), RunKeys(run_id)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
    ):
        await fill(0.9)
        fleet = HandFleet(redis, keys, skill=0.5)
        learner = HandLearner(redis, keys, fleet)
        async with running(
            SamplerService().run(sampler), VerifierService().run(verifier), fleet.run(), learner.run()
        ) as tasks:
            await until(lambda: evaluated(redis, keys, "after"), tasks, "the last evaluation", deadline_s=90)
            counts = await group_counts(redis, keys)
            events = await sampler.event_log.events()
    assert [len(batch.groups) for batch in learner.batches] == [1, 1]
    assert counts.reconciled, counts
    assert len(events_of(events, "redis-memory-single")) == 1
    assert len(events_of(events, "redis-memory-partial")) == 2


async def test_evaluations_obey_the_high_water_mark(crowded, run_id):
    redis, fill = crowded
    document, keys = recipe_document("/none"), RunKeys(run_id)
    tasks = keys.lane(Lane.EVALUATION).tasks
    async with service_context(redis, run_id, document, "sampler") as context:
        memory = RedisMemory(context)
        transitions = await GroupTransitions.fenced(redis, keys, "sampler")
        await fill(0.9)
        await memory.look()
        async with running(evaluate(context, transitions, (HeldOut("x", PROMPTS, 2),), memory)) as evaluating:

            async def waiting():
                return any(wait.name == "evaluation-memory" for wait in context.waits.current(time.time()))

            await until(waiting, evaluating, "the wait for memory")
            assert await redis.xlen(tasks) == 0
            [text] = events_of(await context.event_log.events(), "redis-memory-short")
            assert "nothing new is dispatched above 85%" in text
            # Waiting does not help: one prompt at a time.
            for _ in range(6):
                await memory.look()

            async def one():
                return await redis.xlen(tasks) == 1

            await until(one, evaluating, "a single prompt")
            for _ in range(6):
                await memory.look()
            await asyncio.sleep(0.7)
            assert await redis.xlen(tasks) == 1
            await fill(0)
            await memory.look()

            async def all_dispatched():
                return await redis.xlen(tasks) == 6

            await until(all_dispatched, evaluating, "the remaining prompts")
            assert events_of(await context.event_log.events(), "redis-memory-freed")
            assert not await waiting()


async def test_a_volume_short_of_space_is_named(crowded, run_id):
    redis, _ = crowded
    async with service_context(redis, run_id, recipe_document("/none"), "sampler") as context:
        memory = RedisMemory(context)
        await redis.config_set("maxmemory", REFUSING)  # as helm/penstock/files/redis-start.sh does
        assert (await memory_use(redis)).share == 1.0
        await memory.look()
        assert await memory.short()
        exported = REGISTRY.get_sample_value("penstock_redis_memory_ratio", {"run": run_id})
        assert exported != exported, "no share: RedisMemoryShort would advise more memory"
        assert memory.room(1024, in_flight=0) == 1, "one fits always"
        await compare_loaded(redis, context.record.recipe, 10**6, {})
        assert await compare_plan(redis, RunRecords(redis), run_id, context.record.recipe) == []
        await redis.config_set("maxmemory", 0)
        await memory.look()
        assert not await memory.short()
        assert REGISTRY.get_sample_value("penstock_redis_memory_ratio", {"run": run_id}) == 0.0
        [text] = events_of(await context.event_log.events(), "redis-memory-short")
        assert text.startswith("Redis refuses new data, because its volume is short of space; nothing new")


async def test_an_evaluation_dispatches_only_what_fits(crowded, run_id):
    redis, fill = crowded
    document, keys = recipe_document("/none"), RunKeys(run_id)
    tasks = keys.lane(Lane.EVALUATION).tasks
    async with service_context(redis, run_id, document, "sampler") as context:
        memory, samples = RedisMemory(context), 1024
        transitions = await GroupTransitions.fenced(redis, keys, "sampler")
        used = (await redis.info("memory"))["used_memory"]
        room = 2.5 * evaluated_prompt(context.record.recipe, samples)
        await redis.config_set("maxmemory", int((used + room) / HIGH_WATER))
        await memory.look()
        async with running(evaluate(context, transitions, (HeldOut("x", PROMPTS, samples),), memory)) as evaluating:

            async def dispatched(count):
                return await redis.xlen(tasks) == count

            await until(lambda: dispatched(2), evaluating, "two prompts")
            await asyncio.sleep(0.7)
            assert await dispatched(2), "a third might not fit beside them"
            await fill(0)
            await memory.look()
            await until(lambda: dispatched(len(PROMPTS)), evaluating, "the remaining prompts")


@pytest.mark.slow
async def test_groups_give_way_to_the_last_evaluation(crowded, run_id):
    """What was dispatched in advance is of no use once training has ended."""
    redis, fill = crowded
    limits = {"rollout_steps": 1, "groups_per_step": 4, "max_inflight_groups": 64}
    document, keys = recipe_document("/none", limits=limits), RunKeys(run_id)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
    ):
        fleet = TrainingOnly(redis, keys, skill=0.3)
        learner = HandLearner(redis, keys, fleet)
        async with running(
            SamplerService().run(sampler), VerifierService().run(verifier), fleet.run(), learner.run()
        ) as tasks:

            async def evaluating():
                return await redis.xlen(keys.lane(Lane.EVALUATION).tasks) > 0 and len(learner.batches) == 1

            await until(evaluating, tasks, "the last evaluation")
            assert (await group_counts(redis, keys)).pending > 0, "the test needs a surplus"
            assert not events_of(await sampler.event_log.events(), "groups-withdrawn")
            await fill(0.9)

            async def withdrawn():
                return (await group_counts(redis, keys)).pending == 0

            await until(withdrawn, tasks, "the withdrawal", deadline_s=60)
            counts = await group_counts(redis, keys)

            async def reported():
                return events_of(await sampler.event_log.events(), "groups-withdrawn")

            await until(reported, tasks, "the event")
            texts = await reported()
    assert sum(int(text.split()[0]) for text in texts) == counts.dead > 0
    assert all("training has ended" in text for text in texts)
