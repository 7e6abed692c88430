"""Owns the comparison of verdicts with labels: a confusion table, and the rows that disagree.

Must not judge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from services.contracts import Outcome
from verifier.sandbox.finding import Finding

MOST_SHOWN = 20
LABELS = {True: "correct", False: "wrong"}


class ConfusionTable:
    """Counts verdicts by label, and keeps the first MOST_SHOWN that disagree with theirs."""

    def __init__(self) -> None:
        self._counts = Counter[tuple[bool, Outcome]]()
        self._differ: list[str] = []

    def add(self, place: str, correct: bool, finding: Finding) -> None:
        """Count the verdict on a text that is labelled; `place` names it."""
        self._counts[correct, finding.outcome] += 1
        if finding.outcome.value != LABELS[correct] and len(self._differ) < MOST_SHOWN:
            judged = f"{finding.outcome.value}, answer {finding.answer!r}" if finding.answer else finding.outcome.value
            self._differ.append(f"{place}: labelled {LABELS[correct]}, judged {judged}: {finding.reason}")

    @property
    def labelled(self) -> int:
        """How many verdicts were counted."""
        return self._counts.total()

    @property
    def differing(self) -> int:
        """How many disagree with their labels, unknown ones included."""
        return sum(count for (label, outcome), count in self._counts.items() if outcome.value != LABELS[label])

    def lines(self) -> Iterator[str]:
        """The table, and the verdicts that disagree."""
        yield f"{'':<17}  {'judged correct':>14}  {'judged wrong':>12}  {'unknown':>7}"
        for label in (True, False):
            correct, wrong, unknown = (
                self._counts[label, outcome] for outcome in (Outcome.CORRECT, Outcome.WRONG, Outcome.UNKNOWN)
            )
            yield f"labelled {LABELS[label]:<8}  {correct:>14}  {wrong:>12}  {unknown:>7}"
        yield f"{self.differing} of {self.labelled} disagree{':' if self._differ else ''}"
        yield from self._differ
        if (more := self.differing - len(self._differ)) > 0:
            yield f"and {more} more"
