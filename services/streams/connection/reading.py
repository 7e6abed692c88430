"""Owns reading several keys as of one moment, also while Redis accepts no write.

Must not change anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.streams.connection.client import Redis
from services.streams.connection.functions import call_alone


def _fields(reply: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(reply[::2], reply[1::2], strict=True))


def _entries(reply: list[Any]) -> list[tuple[bytes, dict[bytes, bytes]]]:
    return [(entry, _fields(fields)) for entry, fields in reply]


_PARSED: Mapping[str, Callable[[Any], Any]] = {"hgetall": _fields, "xrange": _entries, "xrevrange": _entries}
"""By command: its reply as redis-py returns it. Those of all others stay as they are."""


async def read_together(redis: Redis, *commands: Sequence[Any]) -> list[Any]:
    """The replies to commands that only read, such as ("xlen", KEY), as redis-py returns them; all of one moment."""
    replies = await call_alone(
        redis,
        "read_together",
        read_keys=[key for _, key, *_ in commands],
        name_list=[name for name, *_ in commands],
        size_list=[len(words) for _, _, *words in commands],
        word_list=[word for _, _, *words in commands for word in words],
    )
    return [_PARSED.get(name, lambda reply: reply)(reply) for (name, *_), reply in zip(commands, replies, strict=True)]
