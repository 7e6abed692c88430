"""Owns back-pressure by slots: how many groups may be in flight, and how stale a group is.

Must not do I/O; every rule is a pure function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

SURPLUS_DEVIATIONS = 2.0
"""How many standard deviations of the number of survivors are left free of the slots beyond the next two batches.

How many groups survive is binomial: if the expected number filled all slots, every second wave would overfill them, and
what is kept beyond the slots becomes stale before its turn.
"""


@dataclass(frozen=True)
class Flow:
    """How many groups of a run are in each state. `survival`: the estimated share of judged groups that are kept."""

    generating: int
    kept: int
    batched: int
    survival: float


@dataclass(frozen=True)
class SlotLimits:
    """The limits of a run, in groups.

    `generation_batch`: the size of one. `widened`: whether the starvation level is 1 or higher. `undispatched`: for how
    many groups of the current generation batch there was no memory yet.
    """

    groups_per_step: int
    max_staleness: int
    steps_left: int
    max_inflight: int
    generation_batch: int
    widened: bool = False
    undispatched: int = 0

    @property
    def slots(self) -> int:
        """How many surviving groups may be in flight: (max_staleness + 1) batches, at most one per remaining step."""
        return self.groups_per_step * min(self.max_staleness + 1, self.steps_left)

    def room(self, flow: Flow) -> int:
        """How many more groups fit below `max_inflight`."""
        return max(0, self.max_inflight - flow.generating - flow.kept - flow.batched)


def continuous(flow: Flow, limits: SlotLimits) -> int:
    """The number of groups to dispatch now so that the expected number of survivors fills the slots.

    A batched group keeps its slot until its rollout step is committed. Beyond the batch that is trained and the next
    one, survivors may be SURPLUS_DEVIATIONS more than expected without overfilling the slots: so few become stale, and
    the learner does not wait. The last slots are filled by one group at a time. When widened, and while kept and
    batched groups leave a slot free: as many groups as fit below `max_inflight`.
    """
    held = flow.kept + flow.batched
    free = limits.slots - held
    if limits.widened and free > 0:
        return limits.room(flow)
    surplus = SURPLUS_DEVIATIONS * math.sqrt(max(0, free) * (1.0 - flow.survival))
    due = min(free, 2 * limits.groups_per_step - held)
    expected, share = flow.generating * flow.survival, max(flow.survival, 0.05)
    count = max(math.ceil((due - expected) / share - 1e-9), math.floor((free - surplus - expected) / share))
    if count <= 0 and free > 0 and not flow.generating:
        count = 1
    return min(limits.room(flow), max(0, count))


def generation_batch(flow: Flow, limits: SlotLimits) -> int:
    """The number of groups to dispatch now: one whole generation batch, the rest of the current one, or none.

    As in the published script, a generation batch is dispatched only when every group of the previous one is judged,
    the kept groups do not fill the next batch, and that batch has slots. `widened` has no effect.
    """
    waits = (flow.generating > 0 and not limits.undispatched) or flow.kept >= limits.groups_per_step
    if waits or flow.batched + limits.groups_per_step > limits.slots:
        return 0
    return min(limits.room(flow), limits.undispatched or limits.generation_batch)


REFILLS: Mapping[str, Callable[[Flow, SlotLimits], int]] = {
    "continuous": continuous,
    "generation_batches": generation_batch,
}
"""The number of groups to dispatch now, by DynamicSamplingSettings.refill."""


def staleness(consuming_step: int, oldest_step: int) -> int:
    """Rollout steps between the policy of a sample's oldest span and the policy that trains it."""
    return consuming_step - oldest_step


class SurvivalEstimate:
    """Exponential average of the share of judged groups that are kept. Starts at 1, the cautious value."""

    def __init__(self, half_life: float = 16.0) -> None:
        self._decay = 0.5 ** (1.0 / half_life)
        self.value = 1.0

    def observe(self, kept: bool) -> None:
        """Add one judged group to the average."""
        self.value = self._decay * self.value + (1.0 - self._decay) * float(kept)
