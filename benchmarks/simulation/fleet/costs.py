"""Owns what one group, one half-drawn response and one replica cost the parts that do not grow with the fleet.

Measured on a real Valkey with the real sampler, verifier and pull loop, around an engine that answers at once. Must not
simulate, nor count the start of a process.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data_plane import steady
from benchmarks.data_plane.bench import cpu_s
from services.contracts import Lane, ProcessInfo, Task, VersionSpan
from services.streams.connection.client import connect
from services.streams.delivery.consumer import Consumer
from services.streams.delivery.drawn import DrawnTokens
from services.streams.delivery.partials import Partial, Piece, keep_partials
from services.streams.state.events import EventLog
from services.streams.state.group_state import GroupTransitions
from services.streams.state.heartbeat import Heartbeat, live_processes
from services.waits import Waits
from tests.harness.servers.redis_servers import start_server
from tests.harness.small_run import recipe_document, service_context
from tests.rollout.hand_sampler import task

SAMPLES = 16
FILTERED = 0.28
TOGETHER, KEPT_TIMES = 64, 60
"""Groups whose half-drawn responses are kept at once; how often."""
PROMPT_IDS = np.arange(64, dtype=np.int32)


@dataclass(frozen=True)
class Costs:
    """CPU seconds, and bytes that enter and leave Redis.

    `sampler_s`, `verifier_s`, `redis_s`, `redis_in`, `redis_out`: per judged group with its batch. `keep_s`, `keep_in`:
    Redis', per call that keeps what the responses of one group have got in a second. `look_s`: the learner's, per
    replica whose heartbeat it looks at; `look_redis_s` and `look_out`: Redis'.
    """

    sampler_s: float
    verifier_s: float
    redis_s: float
    redis_in: float
    redis_out: float
    keep_s: float
    keep_in: float
    look_s: float
    look_redis_s: float
    look_out: float


def measure(folder: Path, seconds: float, tokens: int, pieces: int, tokens_per_s: int, replicas: int) -> Costs:
    """All costs. `tokens`: of a response; `pieces`: responses of a group in progress, `tokens_per_s` of each.

    `seconds`: how long groups are moved; `replicas`: how many heartbeats are looked at.
    """
    group = steady.measure(folder, seconds, rollout=("--response-tokens", str(tokens)), filtered=FILTERED)
    keep_s, keep_in = asyncio.run(kept(folder / "keep", pieces, tokens_per_s))
    look_s, look_redis_s, look_out = asyncio.run(looked_at(folder / "look", replicas))
    return Costs(
        group.cpu_s["sampler"],
        group.cpu_s["verifier"],
        group.cpu_s["valkey"],
        group.redis_in,
        group.redis_out,
        keep_s,
        keep_in,
        look_s,
        look_redis_s,
        look_out,
    )


@contextmanager
def _server(folder: Path) -> Iterator[tuple[int, str]]:
    """A server's pid and address."""
    folder.mkdir()
    server = start_server(folder, "--appendfsync", "always")
    try:
        yield server.process.pid, f"redis://127.0.0.1:{server.port}/0"
    finally:
        server.stop()


async def kept(folder: Path, pieces: int, tokens: int) -> tuple[float, float]:
    """CPU seconds of Redis, and bytes, per call that keeps `tokens` more tokens of each response.

    TOGETHER groups call at once, as those of a fleet do: what Redis writes to its disk is written together.
    """
    with _server(folder) as (pid, url):
        redis: Any = await connect(url)
        async with service_context(redis, "keep", recipe_document("/none"), "rollout") as context:
            transitions = await GroupTransitions.fenced(redis, context.keys, "sampler")
            names = [f"g{number}" for number in range(TOGETHER)]
            await transitions.dispatch(Lane.TRAIN, [task(name, SAMPLES, tokens=100_000) for name in names], None)
            stream = context.keys.lane(Lane.TRAIN).tasks
            consumer = Consumer(redis, context.keys, stream, "rollout", "me", Task, 600.0, 5)
            await consumer.open()
            leases = [delivery.lease for delivery in await consumer.read(TOGETHER, 1.0)]
            before, traffic = cpu_s(pid), await _traffic(redis)
            for turn in range(KEPT_TIMES):
                more = [_piece(index, turn * tokens, tokens) for index in range(pieces)]
                calls = (
                    keep_partials(redis, context.keys, lease, name, more, PROMPT_IDS, 5)
                    for lease, name in zip(leases, names, strict=True)
                )
                counts = await asyncio.gather(*calls)
                assert counts == [[(turn + 1) * tokens] * pieces] * TOGETHER
            spent, received = cpu_s(pid) - before, (await _traffic(redis))[0] - traffic[0]
        await redis.aclose()
    count = TOGETHER * KEPT_TIMES
    return spent / count, received / count


def _piece(index: int, start: int, tokens: int) -> Piece:
    spans = (VersionSpan(version=0, start=0, end=tokens),)
    drawn = DrawnTokens(np.ones(tokens, np.int32), np.full(tokens, -0.5, np.float32), spans)
    return Piece(index, "attempt", 0, start, Partial(drawn, 1.0))


async def looked_at(folder: Path, replicas: int, looks: int = 20) -> tuple[float, float, float]:
    """CPU seconds of the one who looks and of Redis, and bytes, per heartbeat looked at."""
    with _server(folder) as (pid, url):
        redis: Any = await connect(url)
        async with (
            service_context(redis, "look", recipe_document("/none"), "learner") as context,
            AsyncExitStack() as all_of,
        ):
            for _ in range(replicas):
                info = ProcessInfo(
                    id=f"rollout-{uuid.uuid4().hex[:8]}",
                    service="rollout",
                    run="look",
                    host="10.0.0.1",
                    pid=1,
                    metrics="10.0.0.1:9000",
                    state="ready",
                    version=1,
                )
                log = EventLog(redis, context.keys, "rollout")
                await all_of.enter_async_context(Heartbeat(redis, info, Waits(), log))
            before, mine, traffic = cpu_s(pid), time.process_time(), await _traffic(redis)
            for _ in range(looks):
                found = await live_processes(redis, "look")
                assert len(found) > replicas
            mine, theirs = time.process_time() - mine, cpu_s(pid) - before
            sent = (await _traffic(redis))[1] - traffic[1]
        await redis.aclose()
    count = looks * replicas
    return mine / count, theirs / count, sent / count


async def _traffic(redis: Any) -> tuple[int, int]:
    stats = await redis.info("stats")
    return stats["total_net_input_bytes"], stats["total_net_output_bytes"]
