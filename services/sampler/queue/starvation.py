"""Owns starvation escalation: which level applies when too few judged groups are kept.

Must not act or read a clock: the sampler acts, and levels are measured in judged groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

from services.settings import StarvationSettings


class Level(IntEnum):
    """A starvation level. Each includes the measures of the lower ones, except PAUSE, which dispatches nothing."""

    NORMAL = 0
    WIDEN = 1
    BOUNDARY = 2
    PARTIAL = 3
    PAUSE = 4


def level_of(escalation: StarvationSettings, judged: int, kept: int, groups_per_step: int) -> Level:
    """The level after `judged` groups since the last batch was published, with `kept` groups in stock.

    NORMAL while a whole batch is kept, even if the learner is not ready for it. A partial batch needs a kept group. The
    run pauses only without kept groups, or if `partial_after` is None.
    """
    if kept >= groups_per_step:
        return Level.NORMAL
    possible = {
        Level.WIDEN: escalation.widen_after,
        Level.BOUNDARY: escalation.boundary_after,
        Level.PARTIAL: escalation.partial_after if kept else None,
        Level.PAUSE: escalation.pause_after if not kept or escalation.partial_after is None else None,
    }
    reached = [level for level, after in possible.items() if after is not None and judged >= after * groups_per_step]
    return max(reached, default=Level.NORMAL)


class Change(NamedTuple):
    """A change of level, for the run's event log."""

    level: Level
    kind: str
    text: str


MEASURES: Mapping[Level, str] = {
    Level.WIDEN: "as many groups as limits.max_inflight_groups allows are now in flight",
    Level.BOUNDARY: "prompts that are likely to give a mixed group are now preferred",
    Level.PARTIAL: "the kept groups are trained as a partial batch, normalised by its own size",
    Level.PAUSE: "the run pauses",
}


class Starvation:
    """The starvation state of a run: `judged` groups since the last batch, and the current `level`."""

    def __init__(
        self, escalation: StarvationSettings, groups_per_step: int, judged: int = 0, level: Level = Level.NORMAL
    ) -> None:
        self._escalation = escalation
        self._groups_per_step = groups_per_step
        self.judged = judged
        self.level = level

    def group_judged(self) -> None:
        """Count a judged group, whatever was decided; a group that screening filtered counts too."""
        self.judged += 1

    def begin(self) -> None:
        """Restart the count, because a batch was published or a paused run was resumed."""
        self.judged = 0

    def update(self, kept: int, histogram: str) -> Change | None:
        """Move to the level that applies now. Returns the change, or None if the level stays.

        `kept`: groups in stock for the next batch; `histogram`: the judged groups by correct answers, as text.
        """
        return self._move_to(level_of(self._escalation, self.judged, kept, self._groups_per_step), kept, histogram)

    def force(self, kept: int, histogram: str) -> Change | None:
        """Like `update`, when no more groups may be dispatched: a partial batch if any are kept, else a pause."""
        if kept >= self._groups_per_step:
            return self._move_to(Level.NORMAL, kept, histogram)
        return self._move_to(Level.PARTIAL if kept else Level.PAUSE, kept, histogram)

    def _move_to(self, level: Level, kept: int, histogram: str) -> Change | None:
        if level is self.level:
            return None
        self.level = level
        counts = f"{self.judged} groups judged since the last batch, {kept} of {self._groups_per_step} kept"
        if level is Level.NORMAL:
            return Change(level, "starvation-over", f"sampling is back to normal: {counts}")
        return Change(level, f"starvation-{level.name.lower()}", f"{counts}: {MEASURES[level]}; {histogram}")
