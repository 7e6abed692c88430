"""Reconciliation of the sampler with Redis: redriven groups, lost batches, orphaned groups, old dead letters."""

import asyncio

from services.contracts import Cause, Lane, Task
from services.sampler.service import SamplerService
from services.streams.delivery.consumer import Consumer
from services.streams.keys import RunKeys
from services.streams.state.dead_letters import letters, redrive
from services.streams.state.events import EventLog
from services.streams.state.group_counts import group_counts
from tests.harness.hand_fleet import HandFleet, HandLearner, evaluated, running, until
from tests.harness.small_run import recipe_document, service_context
from verifier.service import VerifierService


class LateLearner(HandLearner):
    """Takes no batch before `may` is set."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.may = asyncio.Event()

    async def run(self):
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
        assert "batch-lost" in await phases(sampler.event_log)
        learner.may.set()
        await until(lambda: evaluated(redis, keys, "after"), tasks, "the last evaluation")
        counts = await group_counts(redis, keys)
    assert counts.reconciled, counts
    assert counts.trained == 12
    assert [batch.step for batch in learner.batches] == [1, 2, 3]
    names = [group.group for batch in learner.batches for group in batch.groups]
    assert len(set(names)) == len(names) == 12, "a group is trained once"


async def test_a_redriven_group_can_die_and_be_redriven_again(redis, run_id):
    document = recipe_document("/none", limits={"rollout_steps": 1}, evaluation={"samples": 1})
    keys = RunKeys(run_id)
    tasks_of = keys.lane(Lane.TRAIN).tasks
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        running(SamplerService().run(sampler)) as tasks,
    ):
        await sampler.event_log.write("begun", "the run")
        consumer = Consumer(redis, keys, tasks_of, "rollout", "hand", Task, 30.0, 3)
        await consumer.open()
        held = {delivery.message.group: delivery for delivery in await consumer.read(64, 10)}
        name = min(held)
        await consumer.dead_letter(held[name], "no answer", Cause.DELIVERIES)
        for wanted in (1, 2):

            async def dead(wanted=wanted):
                return (await group_counts(redis, keys)).dead == wanted

            await until(dead, tasks, f"{wanted} dead groups")
            newest = (await letters(redis, keys))[-1]
            again = (await redrive(redis, keys, newest, EventLog(redis, keys, "test"))).redriven
            assert again == f"{name}-r{wanted}"
            redriven = None
            while redriven is None:
                deliveries = await consumer.read(64, 10)
                redriven = next((delivery for delivery in deliveries if delivery.message.group == again), None)
            await consumer.dead_letter(redriven, "no answer either", Cause.DELIVERIES)

        async def three_dead():
            return (await group_counts(redis, keys)).dead == 3

        await until(three_dead, tasks, "the third dead group")
        assert (await group_counts(redis, keys)).reconciled


async def test_a_redriven_group_without_messages_is_orphaned(redis, run_id, monkeypatch):
    monkeypatch.setattr("services.sampler.orphans.ORPHANED_AFTER_S", 1.5)
    document = recipe_document("/none", limits={"rollout_steps": 1}, evaluation={"samples": 1})
    keys = RunKeys(run_id)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        running(SamplerService().run(sampler)) as tasks,
    ):
        consumer = Consumer(redis, keys, keys.lane(Lane.TRAIN).tasks, "rollout", "hand", Task, 30.0, 3)
        await consumer.open()
        while not (held := await consumer.read(64, 10)):
            pass  # the sampler is still starting
        for delivery in held:
            await consumer.dead_letter(delivery, "no answer", Cause.DELIVERIES)

        async def some_dead():
            return (await group_counts(redis, keys)).dead > 0

        await until(some_dead, tasks, "dead groups")
        again = (await redrive(redis, keys, (await letters(redis, keys))[0], EventLog(redis, keys, "test"))).redriven
        # The stream loses all tasks before a replica reads them: no message is left to end these groups.
        await redis.xtrim(keys.lane(Lane.TRAIN).tasks, maxlen=0)

        async def orphaned():
            texts = [event.text for _, event in await sampler.event_log.events() if event.phase == "group-orphaned"]
            return any(text.startswith(f"{again}:") for text in texts)

        await until(orphaned, tasks, "the event of the orphaned group", deadline_s=90)


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
        [earlier, _] = [letter.entry for letter in await letters(redis, keys)]
        await redis.hset(keys.queue, mapping={"step": 0, "last": 0, "letters": earlier})
        async with running(SamplerService().run(second)) as tasks:

            async def one_dead():
                return (await group_counts(redis, keys)).dead > 0

            await until(one_dead, tasks, "the group of the later dead letter to be dead")
            await asyncio.sleep(1.0)
            states = [await redis.hget(keys.group(delivery.message.group), "state") for delivery in held[:2]]
    assert states == [b"pending", b"dead"]
