"""Owns the rules on unknown verdicts: when so many are unknown that a run pauses, and when a prompt is unjudgeable.

Must not do I/O: the sampler pauses the run and drops the prompt.
"""

from __future__ import annotations

from collections import deque

from services.contracts import Outcome, Verdict
from services.sampler.groups import Group
from services.settings import Recipe
from services.streams.delivery.payloads import is_damage

LEAST_VERDICTS = 64
GROUPS_IN_A_ROW = 2
"""So many groups of a prompt without any judgement make it unjudgeable."""


class UnknownShare:
    """The share of unknown verdicts among the last `size` training verdicts.

    Above `limit` (verifier.max_unknown_share; None: never) the run has to pause. Nothing is decided on fewer than
    `size` verdicts. Once the limit was exceeded, nothing more is counted until `clear`: verdicts on groups in flight
    must not hide why the run is paused.
    """

    def __init__(self, limit: float | None, size: int) -> None:
        self._limit = limit
        self._last: deque[bool] = deque(maxlen=size)
        self._unknown = 0
        self._reason = ""
        self.excess: str | None = None
        """Why the run has to pause; None if it does not."""

    @classmethod
    def of(cls, recipe: Recipe) -> UnknownShare:
        """For a run: at least LEAST_VERDICTS verdicts, and at least a batch of them."""
        batch = recipe.limits.groups_per_step * recipe.algorithm.group_size
        return cls(recipe.verifier.max_unknown_share, max(LEAST_VERDICTS, batch))

    @property
    def share(self) -> float:
        """Of the verdicts counted, 0 to 1; 0 while they are fewer than `size`."""
        return self._unknown / len(self._last) if len(self._last) == self._last.maxlen else 0.0

    def judged(self, verdict: Verdict) -> None:
        """Count a verdict, which the caller passes once."""
        if self.excess is not None:
            return
        unknown = verdict.outcome is Outcome.UNKNOWN
        if len(self._last) == self._last.maxlen:
            self._unknown -= self._last[0]
        self._last.append(unknown)
        self._unknown += unknown
        if unknown:
            self._reason = f"sample {verdict.index} of group {verdict.group}: {verdict.reason or 'no reason given'}"
        if self._limit is not None and self.share > self._limit:
            self.excess = (
                f"{self._unknown} of the last {len(self._last)} verdicts ({self.share:.0%}) are unknown, more than "
                f"verifier.max_unknown_share = {self._limit}: the run pauses; the last one, {self._reason}"
            )

    def clear(self) -> None:
        """Start again without verdicts, because a paused run was resumed."""
        self._last.clear()
        self._unknown, self._reason, self.excess = 0, "", None


class UnjudgedPrompts:
    """Counts, by prompt, groups in a row whose verdicts are all unknown for lack of a judgement."""

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}

    def judged(self, group: Group) -> str | None:
        """Count a judged group. Returns the last reason if its prompt is unjudgeable, and forgets that prompt.

        A damaged payload says nothing of the prompt: its group neither counts nor ends a row.
        """
        prompt = group.task.prompt.id
        if any(outcome is not Outcome.UNKNOWN for outcome in group.outcomes):
            self._in_a_row.pop(prompt, None)
            return None
        if any(is_damage(verdict.facts.payload, verdict.reason) for verdict in group.in_order):
            return None
        self._in_a_row[prompt] = self._in_a_row.get(prompt, 0) + 1
        if self._in_a_row[prompt] < GROUPS_IN_A_ROW:
            return None
        del self._in_a_row[prompt]
        return group.in_order[-1].reason or "no reason given"

    def clear(self) -> None:
        """Forget all counts, because the judging as a whole may have failed: that is no fault of a prompt."""
        self._in_a_row.clear()
