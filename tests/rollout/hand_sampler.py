"""Owns the sampler's side of the rollout tests: dispatching tasks, reading samples, and a group of a dead replica.

Must not be used outside tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout.service import CONSUMER_GROUP
from services.contracts import Lane, ProcessInfo, Prompt, Sample, SampleFacts, Sampling, Task, VersionSpan
from services.process.hosting import Context
from services.streams.delivery.consumer import Consumer, tail
from services.streams.delivery.payloads import SamplePayload
from services.streams.state.group_state import Effect, GroupTransitions
from services.streams.state.heartbeat import live_processes
from tests.rollout.waiting import until

LEASE_S = 2.0


def prompt(text: str) -> Prompt:
    return Prompt(id=text[:8], messages=({"role": "user", "content": text},), verifier="pattern", reference={"a": 2})


def task(group: str, samples: int = 4, text: str = "1 + 1 = ?", tokens: int = 40) -> Task:
    sampling = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=tokens)
    return Task(group=group, prompt=prompt(text), samples=samples, sampling=sampling)


@dataclass
class HandSampler:
    """A run's sampler, driven by the test."""

    context: Context
    transitions: GroupTransitions

    async def samples(self, lane: Lane, group: str, count: int, deadline_s: float = 60.0) -> list[Sample]:
        """Wait for `count` samples of the group; returns them."""

        async def complete() -> list[Sample] | None:
            found = await self.all_samples(lane)
            mine = sorted((sample for sample in found if sample.group == group), key=lambda sample: sample.index)
            return mine if len(mine) >= count else None

        found: list[Sample] = await until(complete, deadline_s)
        return found

    async def all_samples(self, lane: Lane) -> list[Sample]:
        """Every sample on the lane's stream."""
        entries = await tail(self.context.redis, self.context.keys.lane(lane).samples, "0-0", 1000)
        return [Sample.model_validate_json(body) for _, body in entries]

    async def all_delivered(self) -> bool:
        """Whether every task was delivered."""
        [info] = await self.context.redis.xinfo_groups(self.context.keys.lane(Lane.TRAIN).tasks)
        return bool(info["lag"] == 0)

    async def all_acked(self) -> bool:
        """Whether every task was delivered and acked."""
        [info] = await self.context.redis.xinfo_groups(self.context.keys.lane(Lane.TRAIN).tasks)
        return bool(info["lag"] == info["pending"] == 0)


async def present(redis: Any, run: str, state: str, *, pid: int | None = None) -> ProcessInfo:
    """Wait for a replica in `state`; its process is `pid`, if that is given."""

    async def there() -> list[ProcessInfo]:
        replicas = [
            process
            for process in await live_processes(redis, run)
            if (process.service, process.state) == ("rollout", state)
        ]
        return [replica for replica in replicas if pid in (None, replica.pid)]

    found: list[ProcessInfo] = await until(there, 600.0)
    return found[0]


async def leave_a_group_behind(context: Context, transitions: GroupTransitions) -> None:
    """A replica leases a task, publishes sample 1, and dies."""
    keys = context.keys
    dead = Consumer(context.redis, keys, keys.lane(Lane.TRAIN).tasks, CONSUMER_GROUP, "dead", Task, LEASE_S, 5)
    await dead.open()
    await transitions.dispatch(Lane.TRAIN, [task("dead")], None)
    [delivery] = await dead.read(1, 1.0)
    facts = SampleFacts(
        payload=keys.payload("dead", 1),
        prompt_tokens=1,
        response_tokens=1,
        truncated=False,
        mean_logprob=-0.5,
        oldest_version=0,
        newest_version=0,
        started_at=1.0,
        finished_at=2.0,
    )
    sample = Sample(group="dead", index=1, verifier="pattern", reference={}, facts=facts)
    body = SamplePayload(
        np.array([2], np.int32),
        np.array([9], np.int32),
        np.array([-0.5], np.float32),
        "left",
        "stop",
        (VersionSpan(version=0, start=0, end=1),),
    )
    assert await transitions.publish_samples(Lane.TRAIN, delivery.lease, 4, [(sample, body)]) == [Effect.FRESH]
