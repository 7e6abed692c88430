"""Owns how the user's files of a run are read from Redis, where they were put together with its record.

Must not hand out a text that is not the one that was submitted.
"""

from __future__ import annotations

import hashlib

from services.streams.connection.client import Redis
from services.streams.keys import RunKeys
from services.streams.state.run_record import RunRecord


class RewardFileError(RuntimeError):
    """A file that a run was submitted with is missing in Redis, or is not what was submitted. The text names it."""


async def read_reward_files(redis: Redis, record: RunRecord) -> dict[str, str]:
    """The texts of the files that a run was submitted with, by name (`./rewards.py`). Raises RewardFileError."""
    if not record.files:
        return {}
    key = RunKeys(record.id).reward_files
    stored: list[bytes | None] = await redis.hmget(key, list(record.files))
    return {
        name: _checked(record.id, name, digest, content)
        for (name, digest), content in zip(record.files.items(), stored, strict=True)
    }


def _checked(run: str, name: str, digest: str, content: bytes | None) -> str:
    where = f"run {run!r}: its file {name!r}"
    if content is None:
        raise RewardFileError(f"{where} is no longer in Redis; submit the recipe again, under another id")
    if (found := hashlib.sha256(content).hexdigest()) != digest:
        raise RewardFileError(
            f"{where} is not the one that was submitted: its SHA-256 in Redis is {found}, and the record has {digest}"
        )
    return content.decode()
