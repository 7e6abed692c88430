"""How a run is followed: looks at it come with its events, or each second where the stream is refused."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from penstock_client.cli.following import notices
from penstock_client.cli.following.follow import follow
from penstock_client.errors import ApiError
from tests.penstock_client.cli.viewing import viewed

FAR_S = 600.0


class StreamedRun:
    """A run whose API answers `views` one after the other, and whose stream sends what is put into `happens`."""

    def __init__(self, *states: str, refusal: str = "") -> None:
        self.views = [viewed(state=state, reason="test") for state in states]
        self.happens: queue.Queue[str | None] = queue.Queue()
        self.looks = 0
        self.looked = threading.Event()
        self._refusal = refusal

    def show(self, _run: str) -> Any:
        self.looks += 1
        self.looked.set()
        return self.views[min(self.looks, len(self.views)) - 1]

    def steps(self, _run: str, _after: str) -> list[Any]:
        return []

    def events(self, _run: str) -> Iterator[str]:
        if self._refusal:
            raise ApiError(self._refusal)
        while (found := self.happens.get(timeout=60)) is not None:
            yield found


def followed(run: StreamedRun) -> list[str]:
    """The states in which `follow` left the run, in a thread whose end is waited for."""
    found: list[str] = []
    client: Any = run
    following = threading.Thread(target=lambda: found.append(follow(client, "r")[0].state))
    following.start()
    if not run._refusal:
        assert run.looked.wait(30)
        run.happens.put("event")
        run.happens.put(None)
    following.join(60)
    assert not following.is_alive()
    return found


def test_a_look_comes_with_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "LOOK_S", FAR_S)
    run = StreamedRun("running", "succeeded")
    assert (followed(run), run.looks) == (["succeeded"], 2)


def test_a_refused_stream_is_said_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(notices, "LOOK_S", FAR_S)
    monkeypatch.setattr(notices, "POLL_S", 0.05)
    run = StreamedRun(*["running"] * 5, "failed", refusal="404 of a proxy")
    assert (followed(run), run.looks) == (["failed"], 6)
    said = capsys.readouterr().err
    assert said == "no stream of events (404 of a proxy): looking at the run every 0.05 s instead\n"


def test_a_run_is_looked_at_although_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "LOOK_S", 0.05)
    run = StreamedRun("running", "running", "succeeded")
    client: Any = run
    assert follow(client, "r")[0].state == "succeeded"
    run.happens.put(None)
