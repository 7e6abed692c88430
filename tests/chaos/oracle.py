"""Owns the judgement of a run: all checks, and their findings.

Must not import the code under test: it judges by the streams' entries, Redis' raw content and the files on disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.chaos import group_checks, history_checks
from tests.chaos.evidence import Evidence
from tests.chaos.finding import Finding, Kind
from tests.chaos.story import Story

CHECKS: tuple[Callable[[Story], Iterator[Finding]], ...] = (
    history_checks.the_tail_is_complete,
    group_checks.every_group_is_accounted_for,
    group_checks.every_prompt_was_answered,
    group_checks.nothing_is_stranded,
    group_checks.nothing_is_duplicated,
    history_checks.no_group_is_trained_twice,
    history_checks.each_batch_is_published_once,
    group_checks.counters_reconcile,
    group_checks.groups_were_judged_by_the_rule,
    group_checks.only_what_was_injected_is_invalid,
    history_checks.steps_and_versions_rise,
    history_checks.steps_train_their_batches,
    history_checks.payloads_are_archived_once,
    history_checks.staleness_is_kept,
    history_checks.evaluations_are_complete,
)


@dataclass(frozen=True)
class Judgement:
    """The oracle's findings in one run; `figures` count what was checked."""

    findings: tuple[Finding, ...]
    figures: dict[str, int]

    def of(self, kind: Kind) -> list[Finding]:
        """The findings of one kind."""
        return [finding for finding in self.findings if finding.kind is kind]

    @property
    def lost(self) -> int:
        """How many groups are lost."""
        return len({finding.subject for finding in self.of(Kind.LOST)})

    @property
    def duplicated(self) -> int:
        """How many groups, steps or evaluations are duplicated."""
        return len({finding.subject for finding in self.of(Kind.DUPLICATED)})

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {value}" for name, value in self.figures.items())
        return "\n".join([counts, *map(str, self.findings[:50])])


def judge(evidence: Evidence) -> Judgement:
    """Run all checks."""
    story = Story(evidence)
    return Judgement(tuple(found for check in CHECKS for found in check(story)), _figures(story))


def _figures(story: Story) -> dict[str, int]:
    evidence = story.evidence
    endings = Counter(fields.get("state", "?") for fields in evidence.groups.values())
    return {
        "dispatched": len(story.dispatched("train")),
        "trained": len(story.trained),
        **{name: endings[name] for name in (*group_checks.RELEASED, *group_checks.OPEN)},
        "evaluated": len(story.dispatched("evaluation")),
        "steps": len(evidence.steps),
        "rewinds": len(story.rewinds),
        "letters": len(evidence.entries["dead"]),
        "filled": evidence.filled,
        "entries": sum(len(entries) for entries in evidence.entries.values()),
    }
