"""Owns the settings that tuning moves, the values that they have, and between which bounds.

Must not do I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum


class Knob(StrEnum):
    """A setting that tuning moves, by its name in the recipe."""

    INFLIGHT = "limits.max_inflight_groups"
    STALENESS = "limits.max_staleness"
    REPLICAS = "rollout.replicas"

    @property
    def attribute(self) -> str:
        """The attribute of Values that has it."""
        return self.value.partition(".")[2]


@dataclass(frozen=True)
class Values:
    """The values of the knobs."""

    max_inflight_groups: int
    max_staleness: int
    replicas: int

    def of(self, knob: Knob) -> int:
        """The value of a knob."""
        return int(getattr(self, knob.attribute))

    def moved(self, knob: Knob, value: int) -> Values:
        """The same values but for one knob."""
        return replace(self, **{knob.attribute: value})


@dataclass(frozen=True)
class Bounds:
    """Between which values a knob moves; both are allowed."""

    least: int
    most: int

    def within(self, value: int) -> int:
        """The nearest value within the bounds."""
        return max(self.least, min(self.most, value))


@dataclass(frozen=True)
class Rules:
    """What tuning holds, and how. A knob without bounds stays.

    `idle_share`: the learner's share of the time spent waiting for a batch that is not to be exceeded. `staleness`: the
    mean that is not to be exceeded, in rollout steps. `cool_down`: the rollout steps that are measured between two
    decisions. `extra_batches`: how many batches limits.max_inflight_groups has to allow above max_staleness + 1.
    """

    idle_share: float
    staleness: float
    cool_down: int
    groups_per_step: int
    group_size: int
    max_sequences: int
    bounds: Mapping[Knob, Bounds] = field(default_factory=dict)
    extra_batches: int = 0

    def least_inflight(self, max_staleness: int) -> int:
        """The smallest valid limits.max_inflight_groups."""
        return self.groups_per_step * (max_staleness + 1 + self.extra_batches)
