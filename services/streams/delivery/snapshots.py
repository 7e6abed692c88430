"""Owns how the sampler's snapshot of a rollout step is stored: compressed, under the key that its batch names.

Must not interpret a snapshot.
"""

from __future__ import annotations

import zlib

from services.contracts import SamplerSnapshot
from services.streams.connection.client import Redis


def compress_snapshot(snapshot: SamplerSnapshot) -> bytes:
    """A snapshot as it is stored under its claim check."""
    return zlib.compress(snapshot.model_dump_json().encode(), 1)


async def read_snapshot(redis: Redis, key: str) -> SamplerSnapshot | None:
    """The sampler's snapshot under a batch's claim check; None if it is gone."""
    body = await redis.get(key) if key else None
    return SamplerSnapshot.model_validate_json(zlib.decompress(body)) if body else None
