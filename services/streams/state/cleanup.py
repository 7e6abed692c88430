"""Owns what is taken out of Redis when a run has succeeded and nobody will go on with it.

Must not touch what people look at afterwards: the record, step records, evaluations, events, counters.
"""

from __future__ import annotations

from services.contracts import Lane
from services.streams.connection.client import Redis
from services.streams.keys import RunKeys

AT_ONCE = 500


async def sweep(redis: Redis, keys: RunKeys) -> int:
    """Delete a finished run's payloads, batches, snapshots and streams under way; how many keys."""
    gone = 0
    for pattern in (keys.payload("*", 0).removesuffix(":0"), keys.key("sampler-snapshot:*")):
        found = [key async for key in redis.scan_iter(pattern, AT_ONCE)]
        for start in range(0, len(found), AT_ONCE):
            gone += int(await redis.unlink(*found[start : start + AT_ONCE]))
    streams = [stream for lane in map(keys.lane, Lane) for stream in (lane.tasks, lane.samples, lane.verdicts)]
    return gone + int(await redis.unlink(keys.batches, keys.posteriors, *streams))
