"""Owns which knob is moved next, and how far, from what some rollout steps showed.

Must not do I/O, nor remember earlier moves; the policy does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from services.controller.tuning.knobs import Knob, Rules, Values
from services.controller.tuning.signals import StepWindow

BINDING = 0.95
"""The limit of groups in flight binds when so large a share of it was in flight."""
SATURATED = 0.9
"""A replica is saturated when so large a share of rollout.max_sequences is generated at once."""
FACTORS = (1.25, 2.0)
"""The smallest and the largest factor of a rise."""
WASTE, STALE_SHARE = 0.05, 0.15
"""The shares of groups released as stale above which a higher staleness bound comes first, and above which an idle-free
learner needs fewer in flight."""
EXPONENT = 1.5
"""A rise is the missing factor of the throughput to this power, because more in flight or more replicas gain less."""
FEWER = 0.85
"""The factor of a fall that only saves replicas, or ends the release of stale groups."""
SLACK = 0.02
"""How far above its target a mean staleness may be, in rollout steps and as a share of it."""


@dataclass(frozen=True)
class Move:
    """A knob, its value before and after, and why. `measured`: its effect is judged, and it may be undone.

    `saves`: it only saves, so it must not make the learner idle.
    """

    knob: Knob
    before: int
    after: int
    why: str
    measured: bool = True
    saves: bool = False

    @property
    def up(self) -> bool:
        """Whether the value rises."""
        return self.after > self.before

    @property
    def text(self) -> str:
        """The move for people."""
        return f"{self.knob.value} {self.before} -> {self.after}: {self.why}"


Free: TypeAlias = Callable[[Knob, bool], bool]
"""Whether a knob may be moved now, up (True) or down."""


def lower_staleness(window: StepWindow, values: Values, rules: Rules, free: Free) -> Move | None:
    """The move towards the target of the mean staleness, if that is exceeded."""
    if _within(window.staleness, rules.staleness):
        return None
    why = f"the mean staleness is {window.staleness:.2f} (target {rules.staleness:g})"
    fewer = _reaching(window, rules.staleness)
    move = _move(Knob.INFLIGHT, fewer, values, rules, free, why, up=False)
    if move and move.after >= rules.least_inflight(values.max_staleness):
        return move
    lower = max(1, values.max_staleness - 1)
    return _move(Knob.STALENESS, lower, values, rules, free, why, up=False)


def generate_faster(window: StepWindow, values: Values, rules: Rules, free: Free) -> Move | None:
    """The move against an idle learner: more groups in flight while that is cheap, else more replicas.

    Of the two limits the one that stops the dispatch comes first: that of groups in flight, else the staleness bound.
    The bound comes first, too, where groups that became stale are what is lacking.
    """
    idle = window.idle_share
    if idle <= rules.idle_share:
        return None
    busy = (window.in_flight - rules.groups_per_step) * rules.group_size
    saturated = busy >= SATURATED * values.replicas * rules.max_sequences
    factor = max(FACTORS[0], min(FACTORS[1], (1 / (1 - idle + rules.idle_share)) ** EXPONENT))
    state = "saturated" if saturated else "not saturated"
    why = f"the learner idled {idle:.0%} (target {rules.idle_share:.0%}), replicas {state}"
    replicas = max(values.replicas + 1, math.ceil(values.replicas * factor))
    scaled = _move(Knob.REPLICAS, replicas, values, rules, free, why, up=True)
    wider = _wider(window, values, rules, free, why, factor)
    higher = _higher(window, values, rules, free, why)
    wasteful = window.stale_share > WASTE
    cheap = (scaled, wider, higher) if saturated else (wider, higher, scaled)
    order = (higher, scaled, wider) if wasteful else cheap
    return next((move for move in order if move), None)


def _wider(window: StepWindow, values: Values, rules: Rules, free: Free, why: str, factor: float) -> Move | None:
    """A higher limit of groups in flight, if that is what stops the dispatch."""
    limit = values.max_inflight_groups
    if window.in_flight < BINDING * limit:
        return None
    wanted = math.ceil(limit * factor)
    if values.max_staleness > rules.staleness:  # which the mean never exceeds
        wanted = min(wanted, _reaching(window, rules.staleness))
    return _move(Knob.INFLIGHT, wanted, values, rules, free, f"{why}, the limit binds", up=True)


def _higher(window: StepWindow, values: Values, rules: Rules, free: Free, why: str) -> Move | None:
    """A higher staleness bound, if the mean staleness is expected to stay within its target.

    It needs as many groups in flight, so their limit may have to rise first, or to fall so that it holds the mean.
    """
    bound, limit = values.max_staleness, values.max_inflight_groups
    bounds = rules.bounds.get(Knob.STALENESS)
    if bound == 0 or bounds is None or bound >= bounds.most or not free(Knob.STALENESS, True):
        return None
    needed = rules.least_inflight(bound + 1)
    if not _within(window.staleness * (bound + 1) / bound, rules.staleness):
        held = _reaching(window, rules.staleness)
        if held < needed or held <= window.in_flight:
            return None
        if limit > held:
            text = "it holds the mean staleness under a higher staleness bound"
            return _move(Knob.INFLIGHT, held, values, rules, free, text, up=False, measured=False)
    if limit < needed:
        text = f"{why}; a higher staleness bound needs it"
        move = _move(Knob.INFLIGHT, needed, values, rules, free, text, up=True, measured=False)
        return move if move and move.after == needed else None
    stale = f"{window.stale_share:.0%} of the groups became stale"
    return _move(Knob.STALENESS, bound + 1, values, rules, free, f"{why}, {stale}", up=True)


def save(window: StepWindow, values: Values, rules: Rules, free: Free) -> Move | None:
    """Fewer groups in flight or fewer replicas, where the learner is the bottleneck and more are generated in vain."""
    idle = f"the learner idled {window.idle_share:.0%} (target {rules.idle_share:.0%}) for long"
    if window.stale_share > STALE_SHARE:
        why = f"{idle}, {window.stale_share:.0%} of the groups became stale"
        reached = min(values.max_inflight_groups, window.in_flight)
        fewer = max(rules.least_inflight(values.max_staleness), math.floor(FEWER * reached))
        if move := _move(Knob.INFLIGHT, fewer, values, rules, free, why, up=False, saves=True):
            return move
    wanted = min(values.replicas - 1, math.ceil(values.replicas * FEWER))
    return _move(Knob.REPLICAS, wanted, values, rules, free, idle, up=False, saves=True)


def _within(staleness: float, goal: float) -> bool:
    return staleness <= goal * (1 + SLACK) + SLACK


def _reaching(window: StepWindow, staleness: float) -> int:
    """The groups in flight at which the mean staleness would be `staleness`: each batch of them adds a rollout step."""
    return math.floor(window.in_flight * (staleness + 1) / (window.staleness + 1))


def _move(
    knob: Knob,
    wanted: int,
    values: Values,
    rules: Rules,
    free: Free,
    why: str,
    *,
    up: bool,
    measured: bool = True,
    saves: bool = False,
) -> Move | None:
    """The move of a knob to `wanted` within its bounds; None if it would not go this way, or is not free."""
    bounds, before = rules.bounds.get(knob), values.of(knob)
    if bounds is None or not free(knob, up):
        return None
    after = bounds.within(wanted)
    return Move(knob, before, after, why, measured, saves) if after != before and (after > before) is up else None
