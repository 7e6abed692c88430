"""Owns the tests of server-sent events: their form, and the reconnection behind the last one.

Must not start a gateway; test_gateway.py follows a real one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from penstock_client import events
from penstock_client.client import Client
from penstock_client.errors import ApiError, ApiUnreachableError, NotThePlatformError, RoleMissingError
from penstock_client.events import StreamEvent, follow_events, read_events
from tests.penstock_client.other_servers import answer, other_server

END = ["event: end", 'data: {"reason": "succeeded"}', ""]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(events, "LONGEST_WAIT_S", 0.01)


def test_lines_become_events() -> None:
    lines = [
        ": a comment",
        "",
        "id: 1-0",
        "event: step",
        "data: a",
        "data:b",
        "data",
        "",
        "retry: 5",
        "unknown: x",
        "data: {}",
        "",
        "event: nothing",
        "",
        "data: cut off",
    ]
    assert list(read_events(lines)) == [StreamEvent("1-0", "step", "a\nb\n"), StreamEvent("1-0", "message", "{}")]


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST_DATA", 1000)
    with pytest.raises(ApiError, match="more than 1000 characters"):
        list(read_events(itertools.repeat("data: xxxxxxxxxx")))


def opened(*streams: list[str] | ApiError) -> tuple[Callable[[str], Iterator[str]], list[str]]:
    """A function that opens these streams one after the other, and the cursors that it was given."""
    left, cursors = list(streams), list[str]()

    def open_lines(cursor: str) -> Iterator[str]:
        cursors.append(cursor)
        stream = left.pop(0)
        if isinstance(stream, ApiError):
            raise stream
        yield from stream

    return open_lines, cursors


def test_a_lost_stream_continues_behind_its_last_event() -> None:
    lost = ApiUnreachableError("lost")
    open_lines, cursors = opened(
        ["id: 1-0", "data: a", ""],
        lost,
        lost,
        ["id: 2-0", "data: b", "", "data: cut"],
        ["id: 3-0", "data: c", "", *END],
    )
    assert [event.data for event in follow_events(open_lines, "0-5")] == ["a", "b", "c"]
    assert cursors == ["0-5", "1-0", "1-0", "1-0", "2-0"]


def test_reconnections_have_a_bound() -> None:
    open_lines, cursors = opened(*[[] for _ in range(20)])
    with pytest.raises(ApiUnreachableError, match="the stream of events ended, after 8 attempts"):
        list(follow_events(open_lines))
    assert len(cursors) == 9


def test_a_refusal_is_final() -> None:
    open_lines, cursors = opened(["id: 1-0", "data: a", ""], RoleMissingError("expected viewer", 403))
    with pytest.raises(RoleMissingError):
        list(follow_events(open_lines))
    assert len(cursors) == 2


def test_another_answer_than_a_stream_is_an_error() -> None:
    for respond, expected in (
        (answer(200, "text/html", "<html>"), NotThePlatformError),
        (answer(200, "application/json", "{}"), NotThePlatformError),
        (answer(403, "application/problem+json", '{"detail": "expected viewer"}'), RoleMissingError),
    ):
        with other_server(respond) as server, Client(server.url) as client, pytest.raises(expected):
            list(client.events("r"))


def test_the_cursor_is_sent_as_last_event_id() -> None:
    stream = "\r\n".join(
        [": hello", "id: 7-0", 'data: {"id": "7-0", "at": 1, "kind": "event", "data": {}}', "", *END, ""]
    )
    with other_server(answer(200, "text/event-stream; charset=utf-8", stream)) as server:
        with Client(server.url, token="t") as client:
            [happening] = client.follow("r", "6-0")
        [(_, path, headers)] = server.requests
    assert (happening.id, path, headers["last-event-id"]) == ("7-0", "/v1/runs/r/events", "6-0")
    assert headers["accept"] == "text/event-stream"
