"""Owns the yardstick: redis-py alone moves the same bytes, in pipelines of 256 messages on one connection.

Must not use the platform's streams, or leave out a byte that they store.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any

import redis
from redis import asyncio as redis_asyncio

from benchmarks.data_plane.bench import Bench, cpu_s
from tests.harness.servers.redis_servers import Process

PIPELINE = 256
MOST = 4096
ROUNDS = 3
PREFIX = "reference:"


@dataclass(frozen=True)
class Pace:
    """Messages per second, and CPU seconds per message in client and server."""

    per_s: float
    cpu_s: float


def together(paces: Mapping[str, Pace], counts: Mapping[str, int]) -> Pace:
    """All stages one after the other."""
    messages = sum(counts.values())
    seconds = sum(counts[name] / pace.per_s for name, pace in paces.items())
    return Pace(messages / seconds, sum(counts[name] * pace.cpu_s for name, pace in paces.items()) / messages)


@dataclass(frozen=True)
class Messages:
    """The bodies of a run's messages as its streams held them, and the fields of its payloads, one per sample."""

    tasks: list[bytes]
    samples: list[bytes]
    verdicts: list[bytes]
    payloads: list[dict[bytes, bytes]]

    def group_bytes(self, samples: int) -> float:
        """The bytes that a group of so many samples writes, on average: task and verdicts twice, the rest once."""
        payloads = [sum(map(len, fields.values())) for fields in self.payloads]
        each = fmean(payloads) + _mean_size(self.samples) + 2 * _mean_size(self.verdicts)
        return 2 * _mean_size(self.tasks) + samples * each


def _mean_size(bodies: list[bytes]) -> float:
    return fmean(map(len, bodies))


def capture(bench: Bench) -> Messages:
    """The first messages of a run whose verdicts wait to be recorded."""
    raw: Any = redis.Redis(host="127.0.0.1", port=bench.port, protocol=2)
    tasks, samples, verdicts = (
        [fields[b"m"] for _, fields in raw.xrange(bench.key(name), count=MOST)]
        for name in ("tasks", "samples", "verdicts")
    )
    payloads = [raw.hgetall(key) for key in raw.scan_iter(match=bench.key("payload:g*"), count=1000)]
    raw.close()
    return Messages(tasks=tasks, samples=samples, verdicts=verdicts, payloads=payloads[:MOST])


def stages_of(messages: Messages, server: Process) -> dict[str, Pace]:
    """The pace of each stage on an empty server, the median of ROUNDS rounds."""
    rounds = [asyncio.run(_round(messages, server)) for _ in range(ROUNDS)]
    return {
        name: Pace(median(found[name].per_s for found in rounds), median(found[name].cpu_s for found in rounds))
        for name in rounds[0]
    }


async def _round(messages: Messages, server: Process) -> dict[str, Pace]:
    client: Any = redis_asyncio.Redis(host="127.0.0.1", port=server.port, protocol=2)
    timed = partial(_timed, client, server.process.pid)
    tasks, samples, verdicts, payloads = messages.tasks, messages.samples, messages.verdicts, messages.payloads
    keys = [f"{PREFIX}payload:{index}" for index in range(len(samples))]
    groups = [f"{PREFIX}group:{index // 16}" for index in range(len(samples))]

    def dispatch(pipe: Any, index: int) -> None:
        pipe.xadd(f"{PREFIX}tasks", {"m": tasks[index % len(tasks)]})
        pipe.hset(f"{PREFIX}group:{index}", mapping={"state": "pending", "task": tasks[index % len(tasks)]})

    def generate(pipe: Any, index: int) -> None:
        pipe.hset(keys[index], mapping=payloads[index % len(payloads)])
        pipe.xadd(f"{PREFIX}samples", {"m": samples[index]})

    def judge(pipe: Any, index: int) -> None:
        pipe.hmget(keys[index], "text", "text_crc")
        pipe.xadd(f"{PREFIX}verdicts", {"m": verdicts[index]})

    def record(pipe: Any, index: int) -> None:
        pipe.hset(groups[index], f"verdict:{index % 16}", verdicts[index])

    try:
        await client.flushdb()
        for stream in ("tasks", "samples", "verdicts"):
            await client.xgroup_create(f"{PREFIX}{stream}", "readers", "0", mkstream=True)
        return {
            "dispatched": await timed(len(samples) // 16, dispatch, ""),
            "generated": await timed(len(samples), generate, "tasks", 16),
            "judged": await timed(len(samples), judge, "samples"),
            "recorded": await timed(len(samples), record, "verdicts"),
        }
    finally:
        await client.aclose()


async def _timed(
    client: Any, server: int, count: int, effect: Callable[[Any, int], None], source: str, per_entry: int = 1
) -> Pace:
    """Read `count` messages' sources, apply each effect and ack its source. `server`: its pid."""
    started, spent_s = time.perf_counter(), time.process_time() + cpu_s(server)
    for first in range(0, count, PIPELINE):
        chunk = range(first, min(first + PIPELINE, count))
        entries: Sequence[bytes] = ()
        if source:
            wanted = max(1, len(chunk) // per_entry)
            reply = await client.xreadgroup("readers", "r", {f"{PREFIX}{source}": ">"}, count=wanted)
            entries = [entry for _, found in reply for entry, _ in found]
        async with client.pipeline(transaction=False) as pipe:
            for index in chunk:
                effect(pipe, index)
            if entries:
                pipe.xack(f"{PREFIX}{source}", "readers", *entries)
            await pipe.execute()
    spent_s = time.process_time() + cpu_s(server) - spent_s
    return Pace(count / (time.perf_counter() - started), spent_s / count)
