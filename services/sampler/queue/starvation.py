"""Owns the starvation ladder: what is done, rung by rung, when groups that can be kept come too slowly.

Must not act, nor look at a clock: the sampler acts, and rungs are measured in judged groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import NamedTuple


class Rung(IntEnum):
    """Each rung does what those below it do, except that PAUSE generates nothing."""

    NORMAL = 0
    WIDEN = 1
    BOUNDARY = 2
    PARTIAL = 3
    PAUSE = 4


@dataclass(frozen=True)
class Ladder:
    """After how many batches' worth of judged groups, since the last batch went out, each rung begins; None: never.

    One batch's worth is limits.groups_per_step groups, kept or not. The numbers must rise.
    """

    widen_after: int | None = 4
    boundary_after: int | None = 8
    partial_after: int | None = 16
    pause_after: int | None = 32

    def __post_init__(self) -> None:
        below = 0
        for field in fields(self):
            after = getattr(self, field.name)
            if after is None:
                continue
            if after <= below:
                raise ValueError(
                    f"{field.name}: {after} is not valid: expected more than {below}, or null to skip the level"
                )
            below = after

    def rung(self, judged: int, kept: int, groups_per_step: int) -> Rung:
        """The rung after `judged` groups since the last batch went out, with `kept` groups at hand.

        With a whole batch at hand nothing starves, however long the learner takes to want it. A partial batch needs a
        kept group; the run pauses only if there is none, or no partial batch is wanted.
        """
        if kept >= groups_per_step:
            return Rung.NORMAL
        possible = {
            Rung.WIDEN: self.widen_after,
            Rung.BOUNDARY: self.boundary_after,
            Rung.PARTIAL: self.partial_after if kept else None,
            Rung.PAUSE: self.pause_after if not kept or self.partial_after is None else None,
        }
        reached = [rung for rung, after in possible.items() if after is not None and judged >= after * groups_per_step]
        return max(reached, default=Rung.NORMAL)


class Change(NamedTuple):
    """A change of rung, for the run's event log."""

    rung: Rung
    kind: str
    text: str


DOES: Mapping[Rung, str] = {
    Rung.WIDEN: "as many groups as limits.max_inflight_groups lets in are under way now",
    Rung.BOUNDARY: "prompts that are likely to give a mixed group are preferred now",
    Rung.PARTIAL: "the kept ones are trained as a partial batch, normalised by what it holds",
    Rung.PAUSE: "the run pauses",
}


class Starvation:
    """Where a run stands on its ladder. `judged` and `rung` are its state."""

    def __init__(self, ladder: Ladder, groups_per_step: int, judged: int = 0, rung: Rung = Rung.NORMAL) -> None:
        self._ladder = ladder
        self._groups_per_step = groups_per_step
        self.judged = judged
        self.rung = rung

    def group_judged(self) -> None:
        """One more group was judged, however it goes on; one that a screen filtered counts too."""
        self.judged += 1

    def begin(self) -> None:
        """Count anew: a batch went out, or somebody took the paused run on."""
        self.judged = 0

    def update(self, kept: int, histogram: str) -> Change | None:
        """The change of rung since the last call, to be told once; None if there is none.

        `kept`: groups at hand for the next batch; `histogram`: the judged groups by correct answers, in words.
        """
        return self._take(self._ladder.rung(self.judged, kept, self._groups_per_step), kept, histogram)

    def force(self, kept: int, histogram: str) -> Change | None:
        """As `update`, where no more may be generated for this batch: a partial one of what is kept, else a pause."""
        if kept >= self._groups_per_step:
            return self._take(Rung.NORMAL, kept, histogram)
        return self._take(Rung.PARTIAL if kept else Rung.PAUSE, kept, histogram)

    def _take(self, rung: Rung, kept: int, histogram: str) -> Change | None:
        if rung is self.rung:
            return None
        self.rung = rung
        at_hand = f"{self.judged} groups judged since the last batch, {kept} of {self._groups_per_step} kept"
        if rung is Rung.NORMAL:
            return Change(rung, "starvation-over", f"sampling goes on as usual: {at_hand}")
        return Change(rung, f"starvation-{rung.name.lower()}", f"{at_hand}: {DOES[rung]}; {histogram}")
