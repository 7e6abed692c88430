"""Owns a training lane that a test drives by hand, up to its dead letters and the redrive of their groups.

Must not decide what a test expects.
"""

import numpy as np
import pytest

from services.contracts import (
    Cause,
    DeadLetter,
    Lane,
    Outcome,
    Prompt,
    Release,
    Sample,
    SampleFacts,
    Sampling,
    Task,
    Verdict,
    VersionSpan,
)
from services.streams.delivery.consumer import Consumer
from services.streams.delivery.payloads import SamplePayload
from services.streams.state.dead_letters import NotRedrivableError, get_letter, letters, redrive
from services.streams.state.events import EventLog
from services.streams.state.group_counts import group_counts
from services.streams.state.group_state import GroupTransitions, missing_samples

SAMPLES = 3
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=8)
BODY = SamplePayload(
    np.array([5], np.int32),
    np.array([8, 9], np.int32),
    np.array([-0.5, -1.0], np.float32),
    "text",
    "stop",
    (VersionSpan(version=3, start=0, end=2),),
)


def task(group, stop=None, text="1 + 1"):
    prompt = Prompt(id=f"p-{group}", messages=({"role": "user", "content": text},), verifier="pattern", reference={})
    return Task(group=group, prompt=prompt, samples=SAMPLES, sampling=SAMPLING, stop=stop)


class Pipeline:
    """A run's training lane, driven by hand."""

    def __init__(self, redis, keys):
        self.redis, self.keys = redis, keys
        self.event_log = EventLog(redis, keys, "test")
        self.lane = keys.lane(Lane.TRAIN)
        self.rollout = self._consumer(self.lane.tasks, "rollout", Task)
        self.verifier = self._consumer(self.lane.samples, "verifier", Sample)
        self.sampler = self._consumer(self.lane.verdicts, "sampler", Verdict)

    def _consumer(self, stream, group, model):
        return Consumer(self.redis, self.keys, stream, group, f"{group}-0", model, 30.0, 3)

    async def open(self):
        for consumer in (self.rollout, self.verifier, self.sampler):
            await consumer.open()
        self.transitions = await GroupTransitions.fenced(self.redis, self.keys, "sampler")
        return self

    async def dispatch(self, *groups, stop=None):
        for group in groups:
            assert await self.transitions.dispatch(Lane.TRAIN, [task(group, stop)], None)

    async def draw(self, delivery, index):
        group = delivery.message.group
        facts = SampleFacts(
            payload=self.keys.payload(group, index),
            prompt_tokens=1,
            response_tokens=2,
            truncated=False,
            mean_logprob=-0.75,
            oldest_version=3,
            newest_version=3,
            started_at=1.0,
            finished_at=2.0,
        )
        sample = Sample(group=group, index=index, verifier="pattern", reference={}, facts=facts)
        wanted = delivery.message.wanted
        return await self.transitions.publish_sample(Lane.TRAIN, delivery.lease, wanted, sample, BODY)

    async def judge(self, delivery, outcome=Outcome.CORRECT):
        sample = delivery.message
        verdict = Verdict(group=sample.group, index=sample.index, outcome=outcome, score=1.0, facts=sample.facts)
        return await self.transitions.publish_verdict(Lane.TRAIN, delivery.lease, verdict)

    async def record(self, delivery, decision=""):
        return await self.transitions.record_verdict(Lane.TRAIN, delivery.lease, delivery.message, decision, SAMPLES)

    async def through(self, decision):
        """Take the next task of the stream to its decision, and return its group."""
        [delivery] = await self.rollout.read(1, 1)
        for index in await missing_samples(self.redis, self.keys, delivery.message):
            assert await self.draw(delivery, index)
        for sample in await self.verifier.read(SAMPLES, 1):
            assert await self.judge(sample)
        verdicts = await self.sampler.read(SAMPLES, 1)
        for number, verdict in enumerate(verdicts, 1):
            assert await self.record(verdict, decision if number == SAMPLES else "")
        return delivery.message.group

    async def bury(self, delivery, consumer, cause=Cause.DELIVERIES):
        """Dead-letter a message, end its group as the sampler does, and return the letter."""
        await consumer.dead_letter(delivery, "delivered 3 times without an ack", cause)
        assert await self.transitions.release(Lane.TRAIN, delivery.message.group, Release.DEAD, SAMPLES)
        return (await letters(self.redis, self.keys))[-1]

    async def dead_task(self, group, cause=Cause.DELIVERIES):
        await self.dispatch(group)
        [delivery] = await self.rollout.read(1, 1)
        return await self.bury(delivery, self.rollout, cause)

    async def redriven(self, letter):
        return await redrive(self.redis, self.keys, letter, self.event_log)

    async def counts(self):
        counts = await group_counts(self.redis, self.keys)
        assert counts.reconciled
        return {name: value for name, value in counts.model_dump(exclude={"reconciled"}).items() if value}

    async def rejection(self, letter):
        """Redrive a letter that cannot be redriven: nothing changes; returns the reason."""
        before = await self.counts(), await self.redis.xlen(self.lane.tasks)
        with pytest.raises(NotRedrivableError) as caught:
            await self.redriven(letter)
        assert (await self.counts(), await self.redis.xlen(self.lane.tasks)) == before
        return str(caught.value)


async def letter_of(pipeline, stream, body, **fields):
    """The letter of a hostile or broken message."""
    values = {"reason": "not valid", "deliveries": 1, "cause": Cause.INVALID, "size": len(body.encode())} | fields
    letter = DeadLetter(stream=stream, entry="1-0", body=body, **values)
    entry = await pipeline.redis.xadd(pipeline.keys.dead, {"m": letter.model_dump_json()})
    return await get_letter(pipeline.redis, pipeline.keys, entry.decode())
