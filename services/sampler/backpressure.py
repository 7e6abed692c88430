"""Owns back-pressure by slots: how many groups may be under way, and which have grown too old.

Must not do I/O; every rule is a pure function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Flow:
    """Where the groups of a run stand. `survival` estimates the share of judged groups that is kept."""

    generating: int
    kept: int
    batched: int
    survival: float


@dataclass(frozen=True)
class Bounds:
    """What a run allows. `wave`: the groups of one generation batch; `widened`: too few groups are kept for a batch."""

    groups_per_step: int
    max_staleness: int
    steps_left: int
    max_inflight: int
    wave: int
    widened: bool = False

    @property
    def slots(self) -> int:
        """How many surviving groups may be in flight: (max_staleness + 1) batches, never more than are needed."""
        return self.groups_per_step * min(self.max_staleness + 1, self.steps_left)

    def room(self, flow: Flow) -> int:
        """How many groups more the memory bound lets in."""
        return max(0, self.max_inflight - flow.generating - flow.kept - flow.batched)


def continuous(flow: Flow, bounds: Bounds) -> int:
    """Groups to dispatch now so that as many survivors are expected as there are slots.

    A batched group keeps its slot until the version it leads to is published. Widened, while any slot is not taken by a
    survivor: all that the memory bound lets in.
    """
    free = bounds.slots - flow.kept - flow.batched
    if bounds.widened and free > 0:
        return bounds.room(flow)
    missing = free - flow.generating * flow.survival
    if missing <= 0:
        return 0
    return min(bounds.room(flow), math.ceil(missing / max(flow.survival, 0.05) - 1e-9))


def generation_batch(flow: Flow, bounds: Bounds) -> int:
    """A whole wave, or nothing: as the published script draws, only once the last wave is judged to its last group,
    what it left does not fill the next batch, and that batch has slots. Never widened: its waves are its shape."""
    waits = flow.generating > 0 or flow.kept >= bounds.groups_per_step
    if waits or flow.batched + bounds.groups_per_step > bounds.slots:
        return 0
    return min(bounds.room(flow), bounds.wave)


REFILLS: Mapping[str, Callable[[Flow, Bounds], int]] = {
    "continuous": continuous,
    "generation_batches": generation_batch,
}
"""By settings.DynamicSampling.refill: how many groups to dispatch now."""


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
