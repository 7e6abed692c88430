"""Owns what is deleted from Redis of a run that will not be resumed: in chunks, so that no call takes long.

Must not delete what users read afterwards, unless the run is deleted: the record, step records, evaluations, events,
dead letters, unknown verdicts, counters, the ledger.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection

from services.contracts import Closing, Lane
from services.streams.connection.client import Redis
from services.streams.connection.functions import call
from services.streams.keys import RunKeys

PER_CALL = 500
KEEPING = (Closing.EXPIRING, Closing.ARCHIVING)


async def sweep(redis: Redis, keys: RunKeys) -> int:
    """Delete what users do not read of a run that succeeds; returns the number of keys.

    Its last groups stay, where its sampler was, and the user's files: the end may be cut off here, and its services
    start again.
    """
    also = {keys.sampler_state, keys.queue, keys.checkpoints, keys.reward_files, keys.step_tokens}
    deleted = 0
    async for chunk in _chunks(redis, keys, _unread(keys, also, keys.group(""))):
        deleted += int(await redis.unlink(*chunk))
    return deleted


async def erase(redis: Redis, keys: RunKeys, closing: Closing | None) -> bool:
    """Delete the keys of a run that is being closed, except its record; whether it still was at the last of them.

    A run that expires or is archived keeps what users read afterwards. None: a run that has no record any more, of
    which something was left or written again.
    """
    doomed = _unread(keys) if closing in KEEPING else lambda key: key != keys.record
    word = closing.value if closing else ""
    async for chunk in _chunks(redis, keys, doomed):
        done = await call(redis, "unlink_closed", record_key=keys.record, doomed_keys=chunk, closing=word)
        if done < 0:
            return False
    return True


def _unread(keys: RunKeys, also: Collection[str] = (), *prefixes: str) -> Callable[[str], bool]:
    """Whether a key is none that users read afterwards, nor one that fences or expires by itself, nor one of `also`."""
    counts = {key for lane in map(keys.lane, Lane) for key in (lane.counters, lane.pending, lane.tokens_in_flight)}
    read = {keys.record, keys.policy, keys.steps, keys.evaluations, keys.events, keys.dead, keys.unknown, *counts}
    kept = {*read, keys.ledger, keys.logs, keys.heartbeats, *also}
    starts = (keys.epoch(""), keys.log(""), *prefixes)
    return lambda key: key not in kept and not key.startswith(starts)


async def _chunks(redis: Redis, keys: RunKeys, doomed: Callable[[str], bool]) -> AsyncIterator[list[str]]:
    """The names of the run's keys that are `doomed`, at most PER_CALL at a time."""
    chunk: list[str] = []
    async for key in redis.scan_iter(match=keys.key("*"), count=PER_CALL):
        if doomed(name := key.decode()):
            chunk.append(name)
        if len(chunk) == PER_CALL:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
