"""Owns the functions that the rows of a run name: the sampler knows them once it has loaded the data.

Must not decide what a row may name. No verdict depends on them: a verifier loads what it lacks when a text needs it.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.contracts import RowFunctions
from services.streams.connection.client import Redis
from services.streams.delivery.consumer import newest_messages
from services.streams.keys import RunKeys
from services.streams.state.events import append_message

KEPT = 1
"""Only the newest is read."""


async def write_row_functions(redis: Redis, keys: RunKeys, functions: Sequence[str]) -> None:
    """Write the functions, each as the text of a reward, in place of those of an earlier load."""
    message = RowFunctions(functions=tuple(functions))
    await append_message(redis, keys, keys.row_functions, message, KEPT)


async def read_row_functions(redis: Redis, keys: RunKeys) -> tuple[str, ...] | None:
    """The functions that were written last; None if the data of this run has not been loaded yet."""
    found = await newest_messages(redis, keys, keys.row_functions, RowFunctions, count=1)
    return found[0][1].functions if found else None
