"""Owns a simulated fleet and learner next to a real sampler and verifier, and how tests wait for them.

Must not be used outside tests.
"""

import asyncio
import itertools
import random
import time
from contextlib import asynccontextmanager

import numpy as np

from services.contracts import Batch, CommittedPolicy, Lane, Sample, SampleFacts, StepRecord, Task, VersionSpan
from services.streams.delivery.consumer import Consumer
from services.streams.delivery.payloads import SamplePayload
from services.streams.state.events import EventLog
from services.streams.state.group_state import GroupTransitions, missing_samples
from services.streams.state.policy_history import History
from services.waits import cancel_and_wait

DEADLINE_S = 150
STALENESS = 3
"""The highest max_staleness of the recipes that the simulated learner trains."""


class HandFleet:
    """Answers tasks: each response is correct with probability `skill`, and has the current version."""

    def __init__(self, redis, keys, skill=0.5):
        self.redis, self.keys, self.skill = redis, keys, skill
        self.version = 0
        self.tasks: list[Task] = []
        """Every delivered training task, once, because the stream itself is trimmed."""
        self.transitions = GroupTransitions(redis, keys, "rollout")
        # A generator per lane: the order in which the lanes are answered varies.
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
            np.zeros(3, np.int32),
            np.zeros(4, np.int32),
            np.zeros(4, np.float32),
            text,
            "stop",
            (VersionSpan(version=self.version, start=0, end=4),),
        )

    async def answer(self, lane, delivery):
        task = delivery.message
        right = str(task.prompt.reference["entry"]["answer"])
        dice = self.random if lane is Lane.TRAIN else self.evaluation_random
        for index in await missing_samples(self.redis, self.keys, task):
            text = right if dice.random() < self.skill else "no idea"
            now = time.time()
            body = self.payload(text)
            facts = SampleFacts(
                payload=self.keys.payload(task.group, index),
                prompt_tokens=len(body.prompt_ids),
                response_tokens=len(body.response_ids),
                truncated=False,
                mean_logprob=0.0,
                oldest_version=self.version,
                newest_version=self.version,
                started_at=now,
                finished_at=now,
            )
            sample = Sample(
                group=task.group,
                index=index,
                verifier=task.prompt.verifier,
                reference=task.prompt.reference,
                facts=facts,
            )
            await self.transitions.publish_samples(lane, delivery.lease, task.wanted, [(sample, body)])


class HandLearner:
    """Consumes batches, publishes versions, and keeps the batches."""

    def __init__(self, redis, keys, fleet):
        self.redis, self.keys, self.fleet = redis, keys, fleet
        self.batches: list[Batch] = []

    async def begin(self):
        """Publish the weights that it starts with. Returns the history and its policy."""
        history = await History.fenced(self.redis, self.keys, "learner")
        policy = await history.policy() or CommittedPolicy(version=await history.announce(0, "w0", STALENESS), step=0)
        await history.commit_policy(policy.version, policy.step, f"w{policy.step}")
        return history, policy

    async def run(self):
        history, policy = await self.begin()
        after, step = "0-0", policy.step
        while True:
            for logged in await history.batches(after, 0.1):
                batch, after = logged.batch, logged.entry
                if batch.step <= step or not await history.accepts(logged, step + 1):
                    continue
                step = batch.step
                await self.train()
                self.batches.append(batch)
                self.fleet.version = version = await history.announce(batch.step, f"w{batch.step}", STALENESS)
                record = StepRecord(
                    step=batch.step,
                    version=version,
                    weights=f"w{batch.step}",
                    optimizer_steps=2,
                    groups=tuple(group.group for group in batch.groups),
                    metrics=batch.sampling_metrics,
                    prompts=tuple(group.prompt for group in batch.groups),
                    staleness=tuple(group.staleness for group in batch.groups),
                    generation_started_at=batch.generation_started_at,
                    generation_finished_at=batch.generation_finished_at,
                    learning_started_at=0.0,
                    learning_finished_at=0.0,
                )
                assert await history.commit_step(record, logged.entry)
                assert await history.release_batch(logged)

    async def train(self):
        """As long as the optimizer steps take."""
        await asyncio.sleep(0.1)


@asynccontextmanager
async def running(*coroutines):
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield tasks
    finally:
        await cancel_and_wait(*tasks)


async def until(condition, tasks, what, deadline_s=DEADLINE_S):
    ends = time.monotonic() + deadline_s
    while not await condition():
        for task in tasks:
            if task.done():
                task.result()
        assert time.monotonic() < ends, f"{what} did not happen within {deadline_s} s"
        await asyncio.sleep(0.05)


async def evaluated(redis, keys, name):
    return name in {record.name for record in await EventLog(redis, keys, "test").evaluations()}
