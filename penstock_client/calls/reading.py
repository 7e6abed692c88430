"""Owns the calls that read runs: lists, one run, its steps, waits, dead letters, unknown verdicts, events.

Must not change a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

from pydantic import TypeAdapter

from penstock_client.answers import as_model
from penstock_client.calls.base import FIRST, ApiCalls, of
from penstock_client.events import SILENCE_S, StreamEvent, follow_events
from penstock_client.models import (
    DeadLetterEntry,
    ProcessLog,
    ProcessLogLine,
    ProcessLogPage,
    ProcessLogs,
    RolloutStep,
    Run,
    RunEntries,
    RunEntry,
    RunHappening,
    RunStory,
    StepList,
    UnknownVerdictEntry,
    WaitEntry,
)

PAGE = 500
WAITS = TypeAdapter(list[WaitEntry])
LETTERS = TypeAdapter(list[DeadLetterEntry])
VERDICTS = TypeAdapter(list[UnknownVerdictEntry])


class RunReading(ApiCalls):
    """Calls that read runs."""

    def runs_page(self, *, limit: int | None = None, after: str | None = None, **wanted: Any) -> RunEntries:
        """One page of the runs behind the cursor `after`; `wanted` as in `runs`."""
        return as_model(self.url, RunEntries, self.call("GET", "/v1/runs", limit=limit, after=after, **wanted))

    def runs(
        self,
        *,
        state: Sequence[str] | None = None,
        project: str | None = None,
        name: str | None = None,
        archived: bool | None = None,
    ) -> Iterator[RunEntry]:
        """All runs that match, page by page, in the order of the API: the newest first.

        `state`: one of these; `name`: a part of the id; `archived`: whether they are closed, None for both.
        """
        after: str | None = None
        wanted = {"state": list(state) if state else None, "project": project, "name": name}
        closed = None if archived is None else str(archived).lower()
        while True:
            page = self.runs_page(limit=PAGE, after=after, archived=closed, **wanted)
            yield from page.runs
            if page.next is None or page.next == after:
                return
            after = page.next

    def show(self, run: str) -> Run:
        """One run."""
        return self._run(self.call("GET", of(run)))

    def steps(self, run: str, after: str = FIRST) -> list[RolloutStep]:
        """The run's rollout steps after the one whose id is `after`, oldest first."""
        return as_model(self.url, StepList, self.call("GET", of(run, "/metrics"), after=after)).steps

    def waits(self, run: str) -> list[WaitEntry]:
        """What the run's processes wait for, longest wait first."""
        return as_model(self.url, WAITS, self.call("GET", of(run, "/waits")))

    def dead(self, run: str) -> Iterator[DeadLetterEntry]:
        """All dead letters of the run, oldest first."""
        return self._entries(run, "/dead", LETTERS, lambda letter: letter.entry)

    def unknown(self, run: str) -> Iterator[UnknownVerdictEntry]:
        """The last unknown verdicts of the run, oldest first."""
        return self._entries(run, "/unknown", VERDICTS, lambda verdict: verdict.entry)

    def story(self, run: str, after: str | None = None) -> Iterator[RunHappening]:
        """What has happened in the run behind the cursor `after`, oldest first, until now."""
        while True:
            found = self.call("GET", of(run, "/events"), after=after, limit=PAGE)
            page = as_model(self.url, RunStory, found)
            yield from page.events
            if not page.more or page.next == after:
                return
            after = page.next

    def follow(self, run: str, after: str = "", silence_s: float = SILENCE_S) -> Iterator[RunHappening]:
        """What happens in the run behind the cursor `after`, as it happens, until the run has ended."""
        for event in self.events(run, after, silence_s):
            yield as_model(self.url, RunHappening, event.document)

    def events(self, run: str, after: str = "", silence_s: float = SILENCE_S) -> Iterator[StreamEvent]:
        """The server-sent events behind `follow`; a lost connection continues where it was.

        A connection without a line for `silence_s` seconds is lost.
        """
        return self._stream(of(run, "/events"), after, silence_s)

    def logs(self, run: str) -> list[ProcessLog]:
        """The processes of the run that have a log; also those that ended within a week."""
        return as_model(self.url, ProcessLogs, self.call("GET", of(run, "/logs"))).processes

    def log(self, run: str, process: str, after: str | None = None) -> Iterator[ProcessLogLine]:
        """The last lines of a process's log behind the cursor `after`, oldest first, until now."""
        while True:
            found = self.call("GET", of(run, f"/logs/{quote(process, safe='')}"), after=after)
            page = as_model(self.url, ProcessLogPage, found)
            yield from page.lines
            if not page.more or page.next == after:
                return
            after = page.next

    def follow_log(self, run: str, process: str, after: str = "") -> Iterator[ProcessLogLine]:
        """The lines of a process's log behind the cursor `after`, as they are written, until the run has ended."""
        for event in self._stream(of(run, f"/logs/{quote(process, safe='')}"), after, SILENCE_S):
            yield as_model(self.url, ProcessLogLine, event.document)

    def _stream(self, path: str, after: str, silence_s: float) -> Iterator[StreamEvent]:
        def open_lines(cursor: str) -> Iterator[str]:
            return self._http.lines(path, None, {"last-event-id": cursor} if cursor else {}, silence_s)

        return follow_events(open_lines, after)
