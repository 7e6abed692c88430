"""Owns what is deleted from Redis when a run has succeeded and will not be resumed.

Must not delete what users read afterwards: the record, step records, evaluations, events, counters.
"""

from __future__ import annotations

from services.contracts import Lane
from services.streams.connection.client import Redis
from services.streams.keys import RunKeys

PER_CALL = 500


async def sweep(redis: Redis, keys: RunKeys) -> int:
    """Delete a finished run's payloads, batches, snapshots and lane streams; returns the number of keys."""
    deleted = 0
    for pattern in (keys.payload("*", 0).removesuffix(":0"), keys.key("sampler-snapshot:*")):
        found = [key async for key in redis.scan_iter(pattern, PER_CALL)]
        for start in range(0, len(found), PER_CALL):
            deleted += int(await redis.unlink(*found[start : start + PER_CALL]))
    streams = [stream for lane in map(keys.lane, Lane) for stream in (lane.tasks, lane.samples, lane.verdicts)]
    return deleted + int(await redis.unlink(keys.batches, keys.posteriors, *streams))
