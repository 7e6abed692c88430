"""Owns the unknown verdicts that a run's users can read: the last of them, each with its reason and its response's end.

Must not count them; metrics do. Nothing is decided by them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

from services.contracts import Lane, Outcome, Task, UnknownVerdict, Verdict
from services.streams.connection.client import Redis
from services.streams.delivery.consumer import newest_messages, tail_messages
from services.streams.keys import RunKeys
from services.streams.retention import UNKNOWN_KEPT
from services.streams.state.events import append_message
from services.streams.state.group_state import read_fields

EVERY_S = 1.0
"""A process notes unknown verdicts at most this often: of a reward that fails, all look alike."""
NOTED_AT_ONCE = 4
EXCERPT_CHARACTERS = 200
"""Of the end of a response, where its answer is."""
SHOWN = 200
"""Verdicts on a page."""


class JudgedResponse(NamedTuple):
    """A verdict, and the response's text; "" if it could not be read."""

    verdict: Verdict
    text: str


class UnknownVerdicts:
    """Notes the unknown verdicts of one process: at most NOTED_AT_ONCE every EVERY_S seconds."""

    def __init__(self, redis: Redis, keys: RunKeys) -> None:
        self._redis, self._keys = redis, keys
        self._next_s = 0.0

    async def note(self, lane: Lane, judged: Sequence[JudgedResponse]) -> None:
        """Note the unknown ones of published verdicts, the prompt's id with each as long as its group exists.

        Without any, or too soon after the last ones, Redis is not called.
        """
        unknown = [each for each in judged if each.verdict.outcome is Outcome.UNKNOWN][:NOTED_AT_ONCE]
        if not unknown or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + EVERY_S
        prompts = await self._prompts(list(dict.fromkeys(each.verdict.group for each in unknown)))
        notes = [_note(lane, each, prompts) for each in unknown]
        stream = self._keys.unknown
        await asyncio.gather(*(append_message(self._redis, self._keys, stream, note, UNKNOWN_KEPT) for note in notes))

    async def _prompts(self, groups: Sequence[str]) -> dict[str, str]:
        found = await read_fields(self._redis, self._keys, groups, ("task",))
        tasks = {group: task for group, [task] in zip(groups, found, strict=True) if task}
        return {group: Task.model_validate_json(task).prompt.id for group, task in tasks.items()}


def _note(lane: Lane, judged: JudgedResponse, prompts: dict[str, str]) -> UnknownVerdict:
    verdict = judged.verdict
    return UnknownVerdict(
        lane=lane,
        group=verdict.group,
        index=verdict.index,
        prompt=prompts.get(verdict.group),
        reason=verdict.reason,
        excerpt=judged.text[-EXCERPT_CHARACTERS:],
        at=time.time(),
    )


async def unknown_verdicts(redis: Redis, keys: RunKeys, after: str = "0-0") -> list[tuple[str, UnknownVerdict]]:
    """Up to SHOWN noted verdicts after entry `after`, oldest first; an invalid entry becomes a dead letter."""
    return await tail_messages(redis, keys, keys.unknown, UnknownVerdict, after, count=SHOWN)


async def last_unknown(redis: Redis, keys: RunKeys, count: int) -> list[tuple[str, UnknownVerdict]]:
    """The last `count` noted verdicts, oldest first; an invalid entry becomes a dead letter."""
    found = await newest_messages(redis, keys, keys.unknown, UnknownVerdict, count=count)
    return found[::-1]
