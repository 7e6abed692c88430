"""Owns the calls that read samples, the story of a group, and ledgers.

Must not change anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from penstock_client.answers import as_model
from penstock_client.calls.base import ApiCalls, of
from penstock_client.models import GroupLineage, LedgerOfPlatform, LedgerOfRun, SampleEntries, SampleEntry

MOST_AT_ONCE = 200


class SampleReading(ApiCalls):
    """Calls about samples and what they cost."""

    def sample_pages(self, run: str, *, limit: int | None = None, **wanted: Any) -> Iterator[SampleEntries]:
        """The pages of the samples of ended groups that match, the last ones first; a page may be empty.

        `wanted`: `lane`, `outcome`, `release`, `step`, `version`, `prompt`, `text` (a part of the response), `reward`
        (a name) with `score_min` and `score_max`. `limit`: of one page.
        """
        after: str | None = None
        while True:
            found = self.call("GET", of(run, "/samples"), after=after, limit=limit or MOST_AT_ONCE, **wanted)
            page = as_model(self.url, SampleEntries, found)
            yield page
            if page.next is None or page.next == after:
                return
            after = page.next

    def samples(self, run: str, **wanted: Any) -> Iterator[SampleEntry]:
        """The samples that match; see `sample_pages`."""
        for page in self.sample_pages(run, **wanted):
            yield from page.samples

    def lineage(self, run: str, group: str) -> GroupLineage:
        """The story of a group: prompt, attempts with samples and verdicts, why it was kept or dropped, the step."""
        return as_model(self.url, GroupLineage, self.call("GET", of(run, f"/groups/{quote(group, safe='')}")))

    def ledger(self, run: str) -> LedgerOfRun:
        """What a run has used: tokens, seconds of GPUs and CPUs, money, by what for."""
        return as_model(self.url, LedgerOfRun, self.call("GET", of(run, "/ledger")))

    def project_ledgers(self, project: str | None = None) -> LedgerOfPlatform:
        """What projects have used, their deleted runs included: all that are visible to who asks, or one."""
        return as_model(self.url, LedgerOfPlatform, self.call("GET", "/v1/ledger", project=project))
