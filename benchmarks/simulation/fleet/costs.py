"""Owns what one group, one half-drawn response and one replica cost the parts that do not grow with the fleet.

Measured on a real Valkey with the real sampler, verifier and pull loop, around an engine that answers at once. Must not
simulate, nor count the start of a process.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import AsyncExitStack
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
from tests.harness.servers.redis_servers import embedded_server
from tests.harness.small_run import recipe_document, service_context
from tests.rollout.hand_sampler import task

SAMPLES = 16
FILTERED = 0.28
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
    keep_s, keep_in = asyncio.run(_keep(pieces, tokens_per_s))
    look_s, look_redis_s, look_out = asyncio.run(_look(replicas))
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


async def _keep(pieces: int, tokens: int, calls: int = 400) -> tuple[float, float]:
    """CPU seconds of Redis, and bytes, per call that keeps `tokens` more tokens of each response."""
    with embedded_server() as server:
        redis: Any = await connect(f"redis://127.0.0.1:{server.port}/0")
        async with service_context(redis, "keep", recipe_document("/none"), "rollout") as context:
            transitions = await GroupTransitions.fenced(redis, context.keys, "sampler")
            await transitions.dispatch(Lane.TRAIN, [task("g0", SAMPLES, tokens=100_000)], None)
            stream = context.keys.lane(Lane.TRAIN).tasks
            consumer = Consumer(redis, context.keys, stream, "rollout", "me", Task, 600.0, 5)
            await consumer.open()
            [delivery] = await consumer.read(1, 1.0)
            before, bytes_before = cpu_s(server.process.pid), await _traffic(redis)
            for call in range(calls):
                more = [_piece(index, call * tokens, tokens) for index in range(pieces)]
                await keep_partials(redis, context.keys, delivery.lease, "g0", more, PROMPT_IDS, 5)
            spent, traffic = cpu_s(server.process.pid) - before, await _traffic(redis)
        await redis.aclose()
    return spent / calls, (traffic[0] - bytes_before[0]) / calls


def _piece(index: int, start: int, tokens: int) -> Piece:
    spans = (VersionSpan(version=0, start=0, end=tokens),)
    drawn = DrawnTokens(np.ones(tokens, np.int32), np.full(tokens, -0.5, np.float32), spans)
    return Piece(index, "attempt", 0, start, Partial(drawn, 1.0))


async def _look(replicas: int, looks: int = 20) -> tuple[float, float, float]:
    """CPU seconds of the one who looks and of Redis, and bytes, per heartbeat looked at."""
    with embedded_server() as server:
        redis: Any = await connect(f"redis://127.0.0.1:{server.port}/0")
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
            before, mine, traffic = cpu_s(server.process.pid), time.process_time(), await _traffic(redis)
            for _ in range(looks):
                found = await live_processes(redis, "look")
                assert len(found) > replicas
            mine, theirs = time.process_time() - mine, cpu_s(server.process.pid) - before
            sent = (await _traffic(redis))[1] - traffic[1]
        await redis.aclose()
    count = looks * replicas
    return mine / count, theirs / count, sent / count


async def _traffic(redis: Any) -> tuple[int, int]:
    stats = await redis.info("stats")
    return stats["total_net_input_bytes"], stats["total_net_output_bytes"]
