"""Delivery on a real server: leases, idempotent effects, fences, counters."""

import asyncio

import numpy as np
import pytest

from services.contracts import (
    Batch,
    BatchGroup,
    Lane,
    Outcome,
    Prompt,
    Release,
    Sample,
    SampleFacts,
    SamplerState,
    Sampling,
    StepRecord,
    Task,
    Verdict,
    VersionSpan,
)
from services.streams.effects import Effects, FencedError, group_counts, missing_samples
from services.streams.journal import Journal
from services.streams.keys import RunKeys
from services.streams.leases import Consumer
from services.streams.payloads import PayloadMissingError, SamplePayload, fetch, fetch_text, pack, unpack

PROMPT = Prompt(id="p0", messages=({"role": "user", "content": "1 + 1"},), verifier="pattern", reference={})
STATE = SamplerState(cursor=1, next_group=1)
BODY = SamplePayload(
    prompt_ids=np.array([5, 6, 7], np.int32),
    response_ids=np.array([8, 9], np.int32),
    behaviour_logprobs=np.array([-0.5, -1.25], np.float32),
    text="zwölf",
    finish_reason="stop",
    spans=(VersionSpan(version=3, start=0, end=1), VersionSpan(version=4, start=1, end=2)),
)


def task(group: str, samples: int = 2) -> Task:
    return Task(
        group=group,
        prompt=PROMPT,
        samples=samples,
        sampling=Sampling(temperature=1.0, top_p=1.0, max_new_tokens=8),
    )


def facts(keys: RunKeys, group: str, index: int) -> SampleFacts:
    return SampleFacts(
        payload=keys.payload(group, index),
        prompt_tokens=3,
        response_tokens=2,
        truncated=False,
        mean_logprob=-0.875,
        oldest_version=3,
        newest_version=4,
        started_at=1.0,
        finished_at=2.0,
    )


class Pipeline:
    """A run's consumers and effects, driven by hand."""

    def __init__(self, redis, keys, lease_s=0.3, max_deliveries=2):
        self.redis, self.keys = redis, keys
        streams = keys.lane(Lane.TRAIN)

        def make(stream, group, name, model):
            return Consumer(redis, keys, stream, group, name, model, lease_s, max_deliveries)

        self.rollout = [make(streams.tasks, "rollout", f"r{n}", Task) for n in range(2)]
        self.verifier = make(streams.samples, "verifier", "v0", Sample)
        self.sampler = make(streams.verdicts, "sampler", "s0", Verdict)
        self.learner = make(keys.batches, "learner", "l0", Batch)
        self.effects = Effects(redis, keys, "any")

    async def open(self):
        for consumer in (*self.rollout, self.verifier, self.sampler, self.learner):
            await consumer.open()
        return self

    async def publish(self, lease, group, index, total=2):
        sample = Sample(
            group=group, index=index, verifier="pattern", reference={}, facts=facts(self.keys, group, index)
        )
        return await self.effects.publish_sample(Lane.TRAIN, lease, total, sample, BODY)

    async def group_through(self, fenced, group, decision):
        """Take one group from dispatch to its decision."""
        await fenced.dispatch(Lane.TRAIN, task(group), STATE)
        [delivery] = await self.rollout[0].read(1, 1)
        for index in range(2):
            assert await self.publish(delivery.lease, group, index)
        for sample in await self.verifier.read(2, 1):
            one = sample.message
            verdict = Verdict(group=group, index=one.index, outcome=Outcome.CORRECT, score=1.0, facts=one.facts)
            assert await self.effects.publish_verdict(Lane.TRAIN, sample.lease, verdict)
        first, second = await self.sampler.read(2, 1)
        await fenced.record_verdict(Lane.TRAIN, first.lease, first.message, "", 2)
        await fenced.record_verdict(Lane.TRAIN, second.lease, second.message, decision, 2)


@pytest.fixture
def keys(run_id):
    return RunKeys(run_id)


async def test_payload_survives_the_round_trip(redis, keys):
    await redis.hset("payload-test", mapping=pack(BODY))
    [found] = await fetch(redis, ["payload-test"])
    assert found.text == await fetch_text(redis, "payload-test") == "zwölf"
    assert found.spans == BODY.spans
    np.testing.assert_array_equal(found.response_ids, [8, 9])
    np.testing.assert_array_equal(found.behaviour_logprobs, np.array([-0.5, -1.25], np.float32))
    with pytest.raises(PayloadMissingError, match="no-such-key"):
        await fetch(redis, ["no-such-key"])
    with pytest.raises(PayloadMissingError, match="damaged"):
        unpack("damaged", {**dict.fromkeys([b"text", b"finish_reason"], b""), b"prompt_ids": b"123"})


@pytest.mark.parametrize("run", ["a:b", "", "A", "a}b", "../x", "x" * 100, "a\n"])
def test_run_id_cannot_escape_its_prefix(run):
    with pytest.raises(ValueError, match="run id"):
        RunKeys(run)


async def test_life_of_a_group_reconciles_at_every_step(redis, keys):
    pipeline = await Pipeline(redis, keys).open()
    fenced = await Effects.fenced(redis, keys, "sampler")
    await pipeline.group_through(fenced, "g0", "kept")
    await pipeline.group_through(fenced, "g1", Release.FILTERED.value)
    await fenced.dispatch(Lane.TRAIN, task("g2"), STATE)
    assert await fenced.release(Lane.TRAIN, "g2", Release.DEAD, 2)
    counts = await group_counts(redis, keys)
    assert counts.model_dump() == {
        "dispatched": 3, "trained": 0, "filtered": 1, "stale": 0, "dead": 1, "pending": 1,
        "reconciled": True,
    }  # fmt: skip
    batch = Batch(
        step=1, version=0, groups=(BatchGroup(group="g0", samples=()),), sampler_state=STATE,
        sampling_metrics={}, generation_started_at=1.0, generation_finished_at=2.0,
    )  # fmt: skip
    assert await fenced.publish_batch(batch)
    assert not await fenced.publish_batch(batch), "a group stands in one batch only"
    assert not await fenced.release(Lane.TRAIN, "g0", Release.STALE, 2), "a batched group cannot be dropped"
    [delivery] = await pipeline.learner.read(1, 1)
    record = StepRecord(
        step=1, version=1, optimizer_steps=2, groups=("g0",), metrics={}, generation_started_at=1.0,
        generation_finished_at=2.0, learning_started_at=3.0, learning_finished_at=4.0,
    )  # fmt: skip
    learner = await Effects.fenced(redis, keys, "learner")
    assert await learner.commit_step(delivery.lease, batch, record)
    assert not await learner.commit_step(delivery.lease, batch, record), "a version is committed once"
    counts = await group_counts(redis, keys)
    assert (counts.trained, counts.pending, counts.reconciled) == (1, 0, True)
    assert await Journal(redis, keys, "test").policy_version() == 1
    assert await redis.ttl(keys.group("g0")) > 0


async def test_dispatching_twice_counts_once(redis, keys):
    fenced = await Effects.fenced(redis, keys, "sampler")
    assert await fenced.dispatch(Lane.TRAIN, task("g0"), STATE)
    assert not await fenced.dispatch(Lane.TRAIN, task("g0"), STATE)
    assert (await group_counts(redis, keys)).dispatched == 1
    assert await redis.xlen(keys.lane(Lane.TRAIN).tasks) == 1


async def test_second_delivery_generates_only_what_is_missing(redis, keys):
    pipeline = await Pipeline(redis, keys).open()
    fenced = await Effects.fenced(redis, keys, "sampler")
    await fenced.dispatch(Lane.TRAIN, task("g0"), STATE)
    [first] = await pipeline.rollout[0].read(1, 1)
    assert await pipeline.publish(first.lease, "g0", 1)
    await asyncio.sleep(0.4)
    [second] = await pipeline.rollout[1].read(1, 1)
    assert second.deliveries == 2
    assert await missing_samples(redis, keys, second.message) == [0]
    assert not await pipeline.publish(second.lease, "g0", 1), "the first result wins"
    assert await pipeline.publish(second.lease, "g0", 0)
    assert await redis.xlen(keys.lane(Lane.TRAIN).samples) == 2
    assert (await redis.xpending(keys.lane(Lane.TRAIN).tasks, "rollout"))["pending"] == 0


async def test_renewed_lease_is_not_taken_over_and_a_lost_one_not_stolen_back(redis, keys):
    pipeline = await Pipeline(redis, keys).open()
    one, other = pipeline.rollout
    await pipeline.effects.dispatch(Lane.TRAIN, task("g0"), STATE)
    [held] = await one.read(1, 1)
    async with one.renewing(held.lease):
        await asyncio.sleep(0.8)
        assert await other.read(1, 0.05) == []
    await asyncio.sleep(0.4)
    [taken] = await other.read(1, 1)
    assert taken.lease.entry == held.lease.entry
    assert not await one.still_owned(held.lease)
    assert await other.still_owned(taken.lease)


async def test_message_that_nobody_acks_is_given_up_with_its_reason(redis, keys):
    pipeline = await Pipeline(redis, keys, lease_s=0.05, max_deliveries=2).open()
    await pipeline.effects.dispatch(Lane.TRAIN, task("g7"), STATE)
    for _ in range(2):
        [delivery] = await pipeline.rollout[0].read(1, 1)
        assert delivery.message.group == "g7"
        await asyncio.sleep(0.1)
    assert await pipeline.rollout[0].read(1, 0.05) == []
    [(_, letter)] = await Journal(redis, keys, "test").dead_letters()
    assert (letter.group, letter.reason) == ("g7", "delivered 2 times without an ack")


async def test_hostile_message_does_not_stop_the_consumer(redis, keys):
    pipeline = await Pipeline(redis, keys).open()
    tasks = keys.lane(Lane.TRAIN).tasks
    for body in (b"", b"\xff\xfe", b"[]", b'{"kind": "sample"}', b'{"kind": "task", "group": 3}'):
        await redis.xadd(tasks, {"m": body})
    await redis.xadd(tasks, {"other": "field"})
    await pipeline.effects.dispatch(Lane.TRAIN, task("g0"), STATE)
    [delivery] = await pipeline.rollout[0].read(10, 1)
    assert delivery.message.group == "g0"
    assert len(await Journal(redis, keys, "test").dead_letters()) == 6


async def test_former_owner_is_fenced(redis, keys):
    former = await Effects.fenced(redis, keys, "sampler")
    owner = await Effects.fenced(redis, keys, "sampler")
    with pytest.raises(FencedError):
        await former.dispatch(Lane.TRAIN, task("g0"), STATE)
    assert await owner.dispatch(Lane.TRAIN, task("g0"), STATE)
