"""Owns the calls about the platform: the queue, who asks, projects, the audit log.

Must not change anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock_client.answers import as_model
from penstock_client.calls.base import ApiCalls
from penstock_client.models import AuditEntryView, AuditList, Identity, Project, ProjectPage, RunComparison, RunQueue

PAGE = 500


class PlatformReading(ApiCalls):
    """Calls about the platform."""

    def whoami(self) -> Identity:
        """Who asks, by the token."""
        return as_model(self.url, Identity, self.call("GET", "/v1/whoami"))

    def projects(self) -> list[Project]:
        """The projects that are visible to who asks."""
        return as_model(self.url, ProjectPage, self.call("GET", "/v1/projects")).projects

    def compare(
        self, runs: Sequence[str], metrics: Sequence[str] | None = None, points: int | None = None
    ) -> RunComparison:
        """Two to eight runs beside each other: settings that differ, and metrics by rollout step."""
        named = ",".join(metrics) if metrics else None
        found = self.call("GET", "/v1/compare", runs=",".join(runs), metrics=named, points=points)
        return as_model(self.url, RunComparison, found)

    def queue(self) -> RunQueue:
        """The runs that wait to be placed, in the order in which they will be."""
        return as_model(self.url, RunQueue, self.call("GET", "/v1/queue"))

    def audit(
        self, *, run: str | None = None, by: str | None = None, project: str | None = None
    ) -> Iterator[AuditEntryView]:
        """Changes and denied requests, newest first: all, or those of a run, by a principal, in a project."""
        before: str | None = None
        while True:
            found = self.call("GET", "/v1/audit", limit=PAGE, before=before, run=run, by=by, project=project)
            page = as_model(self.url, AuditList, found)
            yield from page.entries
            if page.next is None or page.next == before:
                return
            before = page.next
