"""Owns the view of a run's dead letters for users.

Must not trust a letter: its content may be hostile.
"""

from __future__ import annotations

from services.contracts import DeadLetter
from services.streams.connection.client import Redis
from services.streams.delivery.consumer import tail
from services.streams.delivery.validation import Malformed, Source, admit
from services.streams.keys import RunKeys

PAGE = 200


async def letters(redis: Redis, keys: RunKeys, after: str = "0-0", count: int = PAGE) -> list[tuple[str, DeadLetter]]:
    """Up to `count` dead letters after entry `after`, oldest first. An invalid entry is shown as an invalid letter."""
    found = []
    for entry, body in await tail(redis, keys.dead, after, count):
        admitted = admit(keys, DeadLetter, body)
        if isinstance(admitted, Malformed):
            admitted = admitted.letter(Source(keys.dead, entry, body, deliveries=0))
        found.append((entry, admitted))
    return found
