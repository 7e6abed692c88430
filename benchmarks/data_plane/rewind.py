"""Owns the longest call of a run with many open groups: a rewind reopens them all, and a new sampler recovers them; all
are released at once; a sampler that was away trims a stream with all of their samples.

Must not choose what is reopened: all groups are, as when a run is rewound to its first step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from services.contracts import Lane, Outcome, Prompt, Release, SampleFacts, Sampling, Task, Verdict
from services.sampler.groups import recover
from services.streams.connection.client import Redis, connect
from services.streams.delivery.consumer import trim
from services.streams.keys import RunKeys
from services.streams.state.group_state import GroupTransitions, trim_released
from services.streams.state.ownership import become_owner
from services.streams.state.policy_history import GROUPS_PER_CALL
from services.streams.state.rewind import ReopenedGroup, Rewind
from services.streams.unarchived import Unarchived
from tests.harness.servers.redis_servers import start_server

SAMPLES, PER_PIPELINE = 16, 200
LOGGED_US = 1000
READER, PER_ACK, SAMPLE = "verifier", 5000, bytes(400)
PAYLOAD = {"response_ids": bytes(64), "behaviour_logprobs": bytes(64), "text": b"The answer is 42."}


@dataclass(frozen=True)
class Part:
    """One part: its seconds, and its longest call in the server in milliseconds, with that call's name.

    A call below LOGGED_US is not logged: then the name is empty.
    """

    seconds: float
    longest_ms: float
    call: str


def measure(folder: Path, groups: int, fsync: str = "always") -> dict[str, Part]:
    """The parts of a rewind over `groups` pending groups with half of their verdicts, a sampler's recovery, the release
    of as many groups, and the trim of their samples' stream.
    """
    with start_server(folder, "--appendfsync", fsync) as server:
        return asyncio.run(_measure(f"redis://127.0.0.1:{server.port}/0", groups))


async def _measure(url: str, groups: int) -> dict[str, Part]:
    redis, keys = await connect(url), RunKeys("rewind")
    names = [f"g{number:08d}" for number in range(groups)]
    parts: dict[str, Part] = {}
    try:
        await _fill(redis, keys, names)
        await redis.config_set("slowlog-log-slower-than", LOGGED_US)
        await redis.config_set("slowlog-max-len", 100_000)
        rewind = Rewind(redis, keys, "sampler", await become_owner(redis, keys, "sampler"), 1)
        async with _timed(redis, parts, "start"):
            await rewind.start()
        async with _timed(redis, parts, "reopen"):
            await rewind.reopen([ReopenedGroup(name, "p", SAMPLES) for name in names])
        async with _timed(redis, parts, "posteriors"):
            await rewind.store_posteriors({f"p{number}": "1:1:0" for number in range(groups)})
        async with _timed(redis, parts, "finish"):
            await rewind.finish(0, None, [], "rewound")
        async with _timed(redis, parts, "recover"):
            table = await recover(redis, keys, Lane.TRAIN)
        if len(table.reopened) != groups:
            raise RuntimeError(f"{len(table.reopened)} of {groups} groups were reopened")
        await _release_and_trim(redis, names, parts)
    finally:
        await redis.aclose()
    return parts


async def _release_and_trim(redis: Redis, names: list[str], parts: dict[str, Part]) -> None:
    keys, lane = RunKeys("release"), Lane.TRAIN
    await _fill(redis, keys, names)
    await _fill_acked(redis, keys.lane(lane).samples, SAMPLES * len(names))
    sampler = await GroupTransitions.fenced(redis, keys, "sampler")
    async with _timed(redis, parts, "release"):
        await asyncio.gather(*(sampler.release(lane, name, Release.STALE, SAMPLES) for name in names))
    async with _timed(redis, parts, "archived"):
        waiting = Unarchived(redis, keys, "sampler", sampler.fence)
        while found := await waiting.names(lane, GROUPS_PER_CALL):
            await waiting.take(lane, await waiting.hashes(found))
    async with _timed(redis, parts, "forget"):
        await trim_released(redis, keys, lane)
    async with _timed(redis, parts, "trim"):
        while await trim(redis, keys.lane(lane).samples, READER, 3600.0, len(names)):
            pass


async def _fill_acked(redis: Redis, stream: str, entries: int) -> None:
    """A stream of `entries` acked entries, and one that is not."""
    await redis.xgroup_create(stream, READER, "0", mkstream=True)
    for start in range(0, entries, PER_ACK):
        async with redis.pipeline(transaction=False) as pipe:
            for _ in range(min(PER_ACK, entries - start)):
                pipe.xadd(stream, {"m": SAMPLE})
            added = await pipe.execute()
        await redis.xreadgroup(READER, "v", {stream: ">"}, count=PER_ACK)
        await redis.xack(stream, READER, *added)
    await redis.xadd(stream, {"m": SAMPLE})
    await redis.xreadgroup(READER, "v", {stream: ">"}, count=1)


@asynccontextmanager
async def _timed(redis: Redis, parts: dict[str, Part], name: str) -> AsyncIterator[None]:
    await redis.slowlog_reset()
    started = time.perf_counter()
    yield
    seconds = time.perf_counter() - started
    calls = [(call["duration"], call["command"].split()[:2]) for call in await redis.slowlog_get(100_000)]
    duration, command = max(calls, default=(LOGGED_US, []))
    parts[name] = Part(seconds, duration / 1000, b" ".join(command).decode())


async def _fill(redis: Redis, keys: RunKeys, names: list[str]) -> None:
    """Write the groups as a sampler, replicas and verifiers leave them."""
    for start in range(0, len(names), PER_PIPELINE):
        async with redis.pipeline(transaction=False) as pipe:
            for name in names[start : start + PER_PIPELINE]:
                task = _task(name).model_dump_json()
                verdicts = {f"verdict:{at}": _verdict(keys, name, at) for at in range(SAMPLES // 2)}
                pipe.hset(keys.group(name), mapping={"state": "pending", "task": task, "samples": SAMPLES, **verdicts})
                pipe.sadd(keys.lane(Lane.TRAIN).pending, name)
                pipe.xadd(keys.lane(Lane.TRAIN).tasks, {"m": task})
                for at in range(SAMPLES):
                    pipe.hset(keys.payload(name, at), mapping=PAYLOAD)
            await pipe.execute()
    await redis.hset(keys.policy, mapping={"version": 1, "step": 1})


def _task(name: str) -> Task:
    prompt = Prompt(
        id="p", messages=({"role": "user", "content": "?" * 300},), verifier="math", reference={"answer": "4"}
    )
    return Task(
        group=name, prompt=prompt, samples=SAMPLES, sampling=Sampling(temperature=1.0, top_p=1.0, max_new_tokens=64)
    )


def _verdict(keys: RunKeys, name: str, index: int) -> str:
    facts = SampleFacts(
        payload=keys.payload(name, index),
        prompt_tokens=80,
        response_tokens=16,
        truncated=False,
        mean_logprob=-0.5,
        oldest_version=1,
        newest_version=1,
        started_at=1.0,
        finished_at=2.0,
    )
    return Verdict(group=name, index=index, outcome=Outcome.WRONG, score=0.0, facts=facts).model_dump_json()
