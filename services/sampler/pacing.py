"""Owns back-pressure by slots: how many groups may be under way, and which have grown too old.

Must not do I/O; every rule is a pure function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Flow:
    """Where the groups of a run stand. `survival` estimates the share of judged groups that is kept."""

    generating: int
    kept: int
    batched: int
    survival: float


def slots(groups_per_step: int, max_staleness: int, steps_left: int) -> int:
    """How many surviving groups may be in flight: (max_staleness + 1) batches, never more than are needed."""
    return groups_per_step * min(max_staleness + 1, steps_left)


def groups_to_dispatch(flow: Flow, wanted: int, max_inflight: int) -> int:
    """How many groups to dispatch now, so that `wanted` survivors are expected and `max_inflight` holds.

    A batched group keeps its slot until the version it leads to is published.
    """
    missing = wanted - flow.kept - flow.batched - flow.generating * flow.survival
    if missing <= 0:
        return 0
    room = max_inflight - flow.generating - flow.kept - flow.batched
    return max(0, min(room, math.ceil(missing / max(flow.survival, 0.05) - 1e-9)))


def staleness(consuming_version: int, oldest_version: int) -> int:
    """Versions between a sample's oldest span and the policy that consumes it."""
    return consuming_version - oldest_version


class SurvivalEstimate:
    """Exponential average of the share of judged groups that were kept; starts at 1, the cautious end."""

    def __init__(self, half_life: float = 16.0) -> None:
        self._decay = 0.5 ** (1.0 / half_life)
        self.value = 1.0

    def observe(self, kept: bool) -> None:
        """Take one judged group into account."""
        self.value = self._decay * self.value + (1.0 - self._decay) * float(kept)
