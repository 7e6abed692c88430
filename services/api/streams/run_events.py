"""Owns what happens in a run as one ordered story: events, changes of state, step records, evaluations.

Must not send anything. Its cursor has a position in each of the run's streams, because the ids of two streams may be
equal: one position could skip an entry.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from services.api.streams.hub import StreamItem, states_of, why_ended
from services.api.views.metrics import StepView
from services.contracts import EvaluationRecord, Event, Message, StepRecord
from services.settings.faults import invalid
from services.streams.connection.client import Redis
from services.streams.delivery.following import last_ids, read_pages, read_standings
from services.streams.delivery.validation import Malformed, admit
from services.streams.keys import RunKeys
from services.streams.runs.lists import CursorError

KINDS: dict[str, type[Message]] = {"event": Event, "step": StepRecord, "evaluation": EvaluationRecord}
STATE = "state"
START, END = "start", "end"
_ID = "[0-9]{1,15}-[0-9]{1,15}"
CURSOR = rf"^({START}|{END}|{_ID}_{_ID}_{_ID}_[0-9]{{1,6}})$"
"""Positions in the streams of KINDS, and the number of states; `start`: before everything, `end`: behind it."""


@dataclass(frozen=True)
class StoryCursor:
    """How much of a run's story is known: the last entry of each kind, and the number of states."""

    event: str = "0-0"
    step: str = "0-0"
    evaluation: str = "0-0"
    states: int = 0

    def __str__(self) -> str:
        return f"{self.event}_{self.step}_{self.evaluation}_{self.states}"

    def knows(self, kind: str, entry: str) -> bool:
        """Whether an item is not behind the cursor."""
        if kind == STATE:
            return int(entry) <= self.states
        return _order(entry) <= _order(getattr(self, kind))

    def behind(self, kind: str, entry: str) -> StoryCursor:
        """The cursor behind an item."""
        change: dict[str, Any] = {"states": int(entry)} if kind == STATE else {kind: entry}
        return replace(self, **change)


@dataclass(frozen=True)
class Story:
    """One item, as it is sent. `data`: JSON."""

    kind: str
    entry: str
    at: float
    data: bytes

    def json(self, cursor: StoryCursor) -> bytes:
        """The item with the cursor behind it, as services.api.views.reading.events describes it."""
        return b'{"id":"%s","kind":"%s","at":%s,"data":%s}' % (
            str(cursor).encode(),
            self.kind.encode(),
            json.dumps(self.at).encode(),
            self.data,
        )


def _order(entry: str) -> tuple[int, int]:
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number)


async def parse_cursor(redis: Redis, keys: RunKeys, text: str, field: str) -> StoryCursor:
    """The cursor that `text`, the value of `field`, gives. Raises CursorError."""
    if not re.fullmatch(CURSOR, text, re.ASCII):
        raise CursorError(invalid(field, text, f"{START}, {END}, or the `id` of an event or `next` of a page"))
    if text == START:
        return StoryCursor()
    if text == END:
        streams = streams_of(keys)
        ids = await last_ids(redis, list(streams))
        states = (await read_standings(redis, [keys.run])).get(keys.run)
        known = {kind: ids[stream] for stream, kind in streams.items()}
        return StoryCursor(**known, states=len(states_of(states[1])) if states else 0)
    event, step, evaluation, states_text = text.split("_")
    return StoryCursor(event, step, evaluation, int(states_text))


def streams_of(keys: RunKeys) -> dict[str, str]:
    """The kinds of the run's streams, by their keys."""
    return {keys.events: "event", keys.steps: "step", keys.evaluations: "evaluation"}


def positions_of(keys: RunKeys, cursor: StoryCursor) -> dict[str, str]:
    """The cursor's position in each stream."""
    return {stream: getattr(cursor, kind) for stream, kind in streams_of(keys).items()}


class Storyteller:
    """Turns items of one run into what is sent of them."""

    def __init__(self, keys: RunKeys) -> None:
        self._keys = keys
        self._streams = streams_of(keys)

    def kind(self, item: StreamItem) -> str:
        """What kind of item it is."""
        return self._streams.get(item.stream, STATE)

    def report(self, item: StreamItem) -> Story | None:
        """The item as it is sent; None for an entry that is not a valid message, which its owner dead-letters."""
        kind = self.kind(item)
        if kind == STATE:
            return Story(kind, item.entry, float(json.loads(item.body)["at"]), item.body)
        admitted = admit(self._keys, KINDS[kind], item.body)
        if isinstance(admitted, Malformed):
            return None
        at = int(item.entry.partition("-")[0]) / 1000
        if isinstance(admitted, StepRecord):
            admitted = StepView(id=item.entry, **dict(admitted))
        return Story(kind, item.entry, at, admitted.model_dump_json().encode())


@dataclass(frozen=True)
class StoryPage:
    """Part of a run's story: items, each with the cursor behind it. `more`: there is more now; `ended`: the run has."""

    told: list[tuple[StoryCursor, Story]]
    next: StoryCursor
    more: bool
    ended: str


async def read_story(redis: Redis, keys: RunKeys, cursor: StoryCursor, count: int) -> StoryPage:
    """Up to `count` items behind a cursor, in the order of their time."""
    standing = (await read_standings(redis, [keys.run])).get(keys.run)
    pages = await read_pages(redis, positions_of(keys, cursor), count)
    items = [[StreamItem(stream, entry, body) for entry, body in page] for stream, page in pages.items()]
    state, history = standing or (b"", b"[]")
    items.append(states_of(history)[cursor.states :])
    teller, told, read = Storyteller(keys), list[tuple[StoryCursor, Story]](), 0
    for item in _merged(items):
        if read == count:
            break
        read += 1
        cursor = cursor.behind(teller.kind(item), item.entry)
        if story := teller.report(item):
            told.append((cursor, story))
    more = sum(map(len, items)) > read or any(len(page) == count for page in pages.values())
    return StoryPage(told, cursor, more, why_ended(state) if standing else "the run was deleted")


def _merged(items: list[list[StreamItem]]) -> Iterator[StreamItem]:
    return heapq.merge(*items, key=_time)


def _time(item: StreamItem) -> tuple[int, int]:
    if item.stream:
        return _order(item.entry)
    return int(json.loads(item.body)["at"] * 1000), 0
