"""Reconciliation of the sampler with Redis: lost batches, orphaned and lost groups, old dead letters."""

import asyncio
import time

import pytest

from services.contracts import Batch, Cause, Lane, ProcessInfo, Task
from services.sampler.queue.waits import VERSION
from services.sampler.service import SamplerService
from services.streams.delivery.consumer import Consumer
from services.streams.keys import RunKeys
from services.streams.state.events import letters, read_all
from services.streams.state.group_counts import group_counts
from services.streams.state.heartbeat import Heartbeat
from services.streams.state.policy_history import History
from tests.harness.hand_fleet import STALENESS, HandFleet, HandLearner, evaluated, running, until
from tests.harness.small_run import recipe_document, service_context
from verifier.service import VerifierService

pytestmark = pytest.mark.usefixtures("loaded_once")


class LateLearner(HandLearner):
    """Takes no batch before `may` is set."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.may = asyncio.Event()

    async def run(self):
        await self.begin()
        await self.may.wait()
        await super().run()


async def phases(event_log):
    return [event.phase for _, event in await event_log.events()]


async def test_a_lost_batch_and_later_ones_are_published_again(redis, run_id):
    document = recipe_document("/none", limits={"max_staleness": 1, "rollout_steps": 3}, evaluation={"samples": 1})
    keys = RunKeys(run_id)
    fleet = HandFleet(redis, keys)
    learner = LateLearner(redis, keys, fleet)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(SamplerService().run(sampler), VerifierService().run(verifier), fleet.run(), learner.run()) as tasks,
    ):

        async def two_published():
            return await redis.xlen(keys.batches) == 2

        await until(two_published, tasks, "two batches")
        previous = [entry for entry, _ in await redis.xrange(keys.batches)]
        await redis.xdel(keys.batches, previous[0])

        async def both_again():
            now = [entry for entry, _ in await redis.xrange(keys.batches)]
            return len(now) == 2 and not set(now) & set(previous)

        await until(both_again, tasks, "both batches, published again")
        [text] = [event.text for _, event in await sampler.event_log.events() if event.phase == "batch-lost"]
        assert text.startswith("step 1, step 2: Redis lost the entry of the batch of step 1; 8 groups are kept")
        learner.may.set()
        await until(lambda: evaluated(redis, keys, "after"), tasks, "the last evaluation")
        counts = await group_counts(redis, keys)
    assert counts.reconciled, counts
    assert counts.trained == 12
    assert [batch.step for batch in learner.batches] == [1, 2, 3]
    names = [group.group for batch in learner.batches for group in batch.groups]
    assert len(set(names)) == len(names) == 12, "a group is trained once"


async def forget_publication(redis, keys, step, entry, batch):
    """What a failover does that loses the publication of a batch, but not what led to it."""
    for group in batch.groups:
        await redis.hset(keys.group(group.group), "state", "kept")
        await redis.hdel(keys.group(group.group), "step", "batch")
    await redis.xdel(keys.batches, entry)
    await redis.hset(keys.queue, "step", step - 1)


@pytest.mark.parametrize("lost", [1, 2])
async def test_a_publication_that_redis_lost_is_repeated(redis, run_id, monkeypatch, lost):
    """The groups of the last, or of both batches are kept in Redis; the sampler has them in batches."""
    monkeypatch.setattr("services.sampler.watches.audit.EVERY_S", 0.2)
    document = recipe_document("/none", limits={"max_staleness": 1, "rollout_steps": 3}, evaluation={"samples": 1})
    keys = RunKeys(run_id)
    fleet = HandFleet(redis, keys)
    learner = LateLearner(redis, keys, fleet)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(SamplerService().run(sampler), VerifierService().run(verifier), fleet.run(), learner.run()) as tasks,
    ):

        async def two_published():
            return await redis.xlen(keys.batches) == 2

        await until(two_published, tasks, "two batches")
        batches = await read_all(redis, keys, keys.batches, Batch)
        for entry, batch in reversed(batches[-lost:]):
            await forget_publication(redis, keys, batch.step, entry, batch)
        learner.may.set()
        await until(lambda: evaluated(redis, keys, "after"), tasks, "the last evaluation")
        counts = await group_counts(redis, keys)
        [text] = [event.text for _, event in await sampler.event_log.events() if event.phase == "batch-lost"]
        assert f"Redis lost the publication of the batch of step {3 - lost};" in text
    assert counts.reconciled, counts
    assert counts.trained == 12
    assert [batch.step for batch in learner.batches] == [1, 2, 3]
    names = [group.group for batch in learner.batches for group in batch.groups]
    assert len(set(names)) == len(names) == 12, "a group is trained once"


class AheadFleet(HandFleet):
    """Answers every other group with a version that a failover lost: it is above all that are known."""

    ahead = False

    @property
    def version(self):
        return 70 if self.ahead else self._version

    @version.setter
    def version(self, version):
        self._version = version

    async def answer(self, lane, delivery):
        self.ahead = lane is Lane.TRAIN and delivery.message.group.endswith(tuple("13579bdf"))
        await super().answer(lane, delivery)
        self.ahead = False


async def test_groups_of_a_version_that_redis_lost_are_stale(redis, run_id):
    document = recipe_document("/none", limits={"max_staleness": 1, "rollout_steps": 2}, evaluation={"samples": 1})
    keys = RunKeys(run_id)
    fleet = AheadFleet(redis, keys)
    learner = HandLearner(redis, keys, fleet)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(SamplerService().run(sampler), VerifierService().run(verifier), fleet.run(), learner.run()) as tasks,
    ):
        await until(lambda: evaluated(redis, keys, "after"), tasks, "the last evaluation")
        counts = await group_counts(redis, keys)
    assert counts.reconciled, counts
    assert counts.trained == 8
    assert counts.stale > 0
    names = [group.group for batch in learner.batches for group in batch.groups]
    assert not any(name.endswith(tuple("13579bdf")) for name in names)


async def test_groups_follow_a_redis_that_lost_writes(redis, run_id, monkeypatch):
    """A failover loses the last second: a group that was dispatched, one that was not known, messages of a third."""
    monkeypatch.setattr("services.sampler.watches.audit.EVERY_S", 0.2)
    document = recipe_document("/none", limits={"rollout_steps": 1}, evaluation={"samples": 1})
    keys = RunKeys(run_id)
    lane = keys.lane(Lane.TRAIN)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        running(SamplerService().run(sampler)) as tasks,
    ):

        async def dispatched():
            return await redis.scard(lane.pending) >= 4

        await until(dispatched, tasks, "four groups")
        first, second, *_ = sorted(member.decode() for member in await redis.smembers(lane.pending))
        # The first group's dispatch is undone; the second one's hash alone is gone; all tasks are gone.
        async with redis.pipeline(transaction=True) as pipe:
            pipe.delete(keys.group(first), keys.group(second))
            pipe.srem(lane.pending, first)
            pipe.hincrby(lane.counters, "dispatched", -1)
            pipe.xtrim(lane.tasks, maxlen=0)
            await pipe.execute()

        async def released():
            events = [event.text for _, event in await sampler.event_log.events()]
            orphaned = sum("its messages are gone from all streams" in text for text in events)
            return f"{second}: Redis lost it" in events and orphaned >= 2

        await until(released, tasks, "the released groups", deadline_s=90)
        assert "group-restored" not in await phases(sampler.event_log), "no group came back"
        counts = await group_counts(redis, keys)
        assert counts.reconciled, counts
        assert counts.dead >= 3


async def test_a_fleet_whose_version_redis_lost_gets_no_tasks(redis, run_id, monkeypatch):
    """No response of it can be trained, until the learner has announced a newer version."""
    document = recipe_document("/none", limits={"rollout_steps": 1}, evaluation={"samples": 1})
    keys = RunKeys(run_id)
    fleet = HandFleet(redis, keys)
    fleet.version = 70
    learner = LateLearner(redis, keys, fleet)
    info = ProcessInfo(
        id="rollout-1", service="rollout", run=run_id, host="h", pid=1, metrics="h:9", state="ready", version=70
    )
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        Heartbeat(redis, info) as replica,
        running(SamplerService().run(sampler), VerifierService().run(verifier), fleet.run(), learner.run()) as tasks,
    ):

        async def waits():
            return VERSION in [wait.name for wait in sampler.waits.current(time.time())]

        await until(waits, tasks, "the wait for a version")
        asked = len(fleet.tasks)
        await asyncio.sleep(2)
        assert len(fleet.tasks) == asked
        assert not [phase for phase in await phases(sampler.event_log) if phase.startswith("starvation")]
        history = await History.fenced(redis, keys, "learner")
        version = await history.announce(0, "w0", STALENESS, held=70)
        await history.commit_policy(version, 0, "w0")
        await replica.update(version=version)
        fleet.version = version
        learner.may.set()
        await until(lambda: evaluated(redis, keys, "after"), tasks, "the last evaluation")
        counts = await group_counts(redis, keys)
        assert not await waits()
    assert counts.reconciled, counts
    assert counts.trained == 4
    assert counts.stale > 0


class WaitingFleet(HandFleet):
    """Answers two training groups, and the others once it `may`."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.may = asyncio.Event()

    async def answer(self, lane, delivery):
        if lane is Lane.TRAIN and len(self.tasks) > 2:
            await self.may.wait()
        await super().answer(lane, delivery)


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_decision_that_redis_lost_is_made_again(redis, run_id, monkeypatch, restarted):
    """A failover loses the decision on a kept group, but none of its verdicts; the sampler dies of it, or lives on."""
    monkeypatch.setattr("services.sampler.watches.audit.EVERY_S", 0.2)
    sampling = {"dynamic_sampling": {"enabled": False}}
    document = recipe_document("/none", limits={"rollout_steps": 1}, evaluation={"samples": 1}, algorithm=sampling)
    keys = RunKeys(run_id)
    lane = keys.lane(Lane.TRAIN)
    fleet = WaitingFleet(redis, keys)
    async with (
        service_context(redis, run_id, document, "sampler") as first,
        service_context(redis, run_id, document, "sampler") as second,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(VerifierService().run(verifier), fleet.run(), HandLearner(redis, keys, fleet).run()) as others,
    ):

        async def kept(number):
            states = [
                await redis.hget(keys.group(name.decode()), "state") for name in await redis.smembers(lane.pending)
            ]
            return states.count(b"kept") == number

        async with running(SamplerService().run(first)) as sampling:
            await until(lambda: kept(2), [*others, *sampling], "two kept groups")
            if restarted:
                first.stopping.set()
                await asyncio.wait_for(sampling[0], 90)
            async with redis.pipeline(transaction=True) as pipe:
                name = fleet.tasks[0].group
                pipe.hset(keys.group(name), "state", "pending")
                pipe.hdel(keys.group(name), "kept_order")
                pipe.hincrby(lane.counters, "judged", -1)
                await pipe.execute()
            async with running(*([SamplerService().run(second)] if restarted else [])) as again:
                alive = [*others, *(again if restarted else sampling)]
                await until(lambda: kept(2), alive, "the decision, made again")
                fleet.may.set()
                await until(lambda: evaluated(redis, keys, "after"), alive, "the last evaluation")
        counts = await group_counts(redis, keys)
    assert counts.reconciled, counts
    assert (counts.trained, counts.dead) == (4, 0)


async def test_a_dead_letter_from_before_a_rewind_has_no_effect(redis, run_id):
    document = recipe_document("/none", limits={"rollout_steps": 1}, evaluation={"samples": 1})
    keys = RunKeys(run_id)
    async with (
        service_context(redis, run_id, document, "sampler") as first,
        service_context(redis, run_id, document, "sampler") as second,
    ):
        consumer = Consumer(redis, keys, keys.lane(Lane.TRAIN).tasks, "rollout", "hand", Task, 30.0, 3)
        async with running(SamplerService().run(first)) as sampling:
            await consumer.open()
            held = await consumer.read(2, 10)
            while len(held) < 2:
                held += await consumer.read(2, 10)
            first.stopping.set()
            await asyncio.wait_for(sampling[0], 90)
        for delivery in held[:2]:
            await consumer.dead_letter(delivery, "no answer", Cause.DELIVERIES)
        [(earlier, _), _] = await letters(redis, keys)
        await redis.hset(keys.queue, mapping={"step": 0, "last": 0, "letters": earlier})
        async with running(SamplerService().run(second)) as tasks:

            async def one_dead():
                return (await group_counts(redis, keys)).dead > 0

            await until(one_dead, tasks, "the group of the later dead letter to be dead")
            await asyncio.sleep(1.0)
            states = [await redis.hget(keys.group(delivery.message.group), "state") for delivery in held[:2]]
    assert states == [b"pending", b"dead"]
