"""Owns server-sent events: from lines to events, and the reconnection after the last one that was seen.

Must not open a connection; the caller passes one that does.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock_client.errors import ApiError, ApiUnreachableError
from penstock_client.transport import is_passing

log = logging.getLogger(__name__)

MOST_DATA = 16 * 2**20
"""Characters of one event."""
END = "end"
"""The kind of the last event: the run has ended, and all was sent."""
RECONNECTIONS = 8
"""How often in a row a stream is opened again without a new event in between."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 10.0
SILENCE_S = 60.0
"""Without a line for so long, the connection is taken for lost; the API sends a comment at least every 15 s."""


@dataclass(frozen=True)
class StreamEvent:
    """One event: its id (a cursor), its kind (`message` if it has none), and its data as text."""

    id: str
    kind: str
    data: str

    @property
    def document(self) -> Any:
        """The data as JSON. Raises ValueError."""
        return json.loads(self.data)


def read_events(lines: Iterable[str]) -> Iterator[StreamEvent]:
    """The events of a stream, by the rules of the HTML standard (9.2.6); comments and unknown fields are skipped.

    An event that the stream's end cuts off is dropped. Raises ApiError for one above MOST_DATA characters.
    """
    cursor, kind, data, size = "", "", list[str](), 0
    for line in lines:
        if line:
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "data":
                data.append(value)
                size += len(value)
                if size > MOST_DATA:
                    raise ApiError(f"an event has more than {MOST_DATA} characters")
            elif field == "event":
                kind = value
            elif field == "id" and "\0" not in value:
                cursor = value
        else:
            if data:
                yield StreamEvent(cursor, kind or "message", "\n".join(data))
            kind, data, size = "", [], 0


def follow_events(open_lines: Callable[[str], Iterable[str]], after: str = "") -> Iterator[StreamEvent]:
    """The events after `after`, until the API says that nothing follows (`end`).

    `open_lines(cursor)`: the lines of a new stream after that cursor. A stream that ends otherwise is opened again, at
    most RECONNECTIONS times in a row. Raises ApiError.
    """
    cursor, failures = after, 0
    while True:
        why: ApiError | None = None
        try:
            for event in read_events(open_lines(cursor)):
                if event.kind == END:
                    return
                cursor, failures = event.id or cursor, 0
                yield event
        except ApiError as error:
            if not is_passing(error):
                raise
            why = error
        failures += 1
        if failures > RECONNECTIONS:
            raise ApiUnreachableError(f"{why or 'the stream of events ended'}, after {RECONNECTIONS} attempts")
        wait = min(FIRST_WAIT_S * 2 ** (failures - 1), LONGEST_WAIT_S)
        log.warning("the stream of events ended (%s); opened again in %g s, after %r", why, wait, cursor)
        time.sleep(wait)
