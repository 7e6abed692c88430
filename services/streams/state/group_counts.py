"""Owns the counters of a lane's groups and response tokens.

Must not change them; the functions in lua/ do, with each transition of a group.
"""

from __future__ import annotations

from services.contracts import EvaluationCounts, GroupCounts, Lane
from services.streams.connection.client import Redis
from services.streams.connection.reading import read_together
from services.streams.keys import RunKeys


async def group_counts(redis: Redis, keys: RunKeys, lane: Lane = Lane.TRAIN) -> GroupCounts:
    """The lane's counters, read at one moment; `pending` is counted independently, not derived."""
    streams = keys.lane(lane)
    counters, pending = await read_together(redis, ("hgetall", streams.counters), ("scard", streams.pending))
    counts = GroupCounts if lane is Lane.TRAIN else EvaluationCounts
    return counts(**{name.decode(): int(value) for name, value in counters.items()}, pending=pending)


async def response_tokens(redis: Redis, keys: RunKeys, lane: Lane = Lane.TRAIN) -> int:
    """The response tokens of all samples of the lane that have a verdict, whatever the state of their groups."""
    return int(await redis.hget(keys.lane(lane).counters, "response_tokens") or 0)
