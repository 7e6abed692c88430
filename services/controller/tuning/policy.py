"""Owns tuning's decisions over time: what is measured after each, when it is undone, and which knob rests.

Must not do I/O.

A decision follows `cool_down` rollout steps that are measured, and settles for as many steps as the pipeline has
batches. One that made the run slower, or nothing faster, is undone; the knob then rests in that direction, each
time for longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.controller.tuning.knobs import Knob, Rules, Values
from services.controller.tuning.moves import Move, generate_faster, lower_staleness, save
from services.controller.tuning.signals import StepSignals, StepWindow

LEAST_GAIN, MOST_LOSS = 0.02, 0.03
"""The shares of trained tokens per second that a rise has to gain, and may lose if the learner then has its target."""
RESTS = 8
"""How many cool-downs a knob rests after a decision that was undone; twice as many after the next one."""
QUIET = 4
"""How many windows the learner has to be the bottleneck before replicas are saved."""
UNSTEADY = 4
"""After so many cool-downs of steps that are not steady they are measured all the same."""


@dataclass(frozen=True)
class _Trial:
    """A move whose effect is being measured. `before`: the rollout steps before it."""

    move: Move
    before: StepWindow


class Policy:
    """The decisions for one run, at most one per rollout step."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._steps: list[StepSignals] = []
        self._window: StepWindow | None = None
        self._settling = 0
        self._unsteady = 0
        self._quiet = 0
        self._values: Values | None = None
        self._trial: _Trial | None = None
        self._rests: dict[tuple[Knob, bool], int] = {}  # the step until which a knob stays, by direction
        self._failures: dict[tuple[Knob, bool], int] = {}

    @property
    def window(self) -> StepWindow | None:
        """The rollout steps that were measured last; None before the first ones."""
        return self._window

    def interrupted(self) -> None:
        """Measure again: the next rollout step does not follow the last one."""
        self._steps.clear()

    def follow(self, rules: Rules) -> None:
        """Use these rules from now on: other bounds, or another target."""
        self._rules = rules

    def observe(self, signals: StepSignals, values: Values) -> Move | None:
        """The move after a rollout step, if any. `values`: those in force.

        The caller tells what it did with it (`taken`, `reported`), or nothing if it could not make the move now.
        """
        self._notice(values, signals.step)
        self._unsteady = 0 if signals.steady else self._unsteady + 1
        if 0 < self._unsteady <= UNSTEADY * self._rules.cool_down:
            self._steps.clear()
            return None
        if self._settling:
            self._settling -= 1
            return None
        self._steps.append(signals)
        if len(self._steps) < self._rules.cool_down:
            return None
        self._window, self._steps = StepWindow(tuple(self._steps)), []
        return self._judge(self._window, values, signals.step) or self._choose(self._window, values, signals.step)

    def taken(self, move: Move, step: int) -> None:
        """The move is in force after rollout step `step`."""
        assert self._values is not None
        assert self._window is not None
        self._values = self._values.moved(move.knob, move.after)
        self._trial = _Trial(move, self._window) if move.measured else None
        self._settle()

    def reported(self, move: Move, step: int) -> None:
        """The move was only reported: the same is not reported again soon."""
        self._trial = None
        self._rest(move.knob, move.up, step)
        self._settle()

    def _settle(self) -> None:
        assert self._values is not None
        self._steps.clear()
        self._quiet = 0
        self._settling = self._values.max_staleness + 1

    def _notice(self, values: Values, step: int) -> None:
        """Leave a knob alone that someone else has moved, and take its new value as given."""
        if self._values is not None and values != self._values:
            for knob in Knob:
                if values.of(knob) != self._values.of(knob):
                    until = step + 2 * self._rules.cool_down
                    self._rests.update({(knob, True): until, (knob, False): until})
            self._trial, self._values = None, values
            self._settle()
        self._values = values

    def _judge(self, window: StepWindow, values: Values, step: int) -> Move | None:
        """The move that undoes the last one, if its effect is not worth it."""
        if (trial := self._trial) is None:
            return None
        move, idle = trial.move, window.idle_share
        gain = window.throughput / trial.before.throughput - 1
        if move.up:
            # More groups in flight cost nothing while the staleness has its target; replicas do.
            least = LEAST_GAIN if move.knob is Knob.REPLICAS and idle > self._rules.idle_share else -MOST_LOSS
            good = gain + math.hypot(window.error, trial.before.error) >= least
        else:
            good = not move.saves or idle <= self._rules.idle_share
        way = (move.knob, move.up)
        if good:
            self._failures.pop(way, None)
        else:
            self._rest(*way, step)
            if self._valid(move.knob, values.moved(move.knob, move.before)):
                why = f"undone: {gain:+.0%} trained tokens per second, the learner idled {idle:.0%}"
                return Move(move.knob, move.after, move.before, why, measured=False)
        self._trial = None
        return None

    def _valid(self, knob: Knob, values: Values) -> bool:
        bounds, least = self._rules.bounds.get(knob), self._rules.least_inflight(values.max_staleness)
        within = bounds is not None and bounds.within(values.of(knob)) == values.of(knob)
        return within and values.max_inflight_groups >= least

    def _rest(self, knob: Knob, up: bool, step: int) -> None:
        failures = self._failures.get((knob, up), 0)
        self._failures[knob, up] = failures + 1
        self._rests[knob, up] = step + RESTS * 2**failures * self._rules.cool_down

    def _choose(self, window: StepWindow, values: Values, step: int) -> Move | None:
        def free(knob: Knob, up: bool) -> bool:
            return knob in self._rules.bounds and step >= self._rests.get((knob, up), 0)

        if move := lower_staleness(window, values, self._rules, free):
            if move.knob is Knob.STALENESS:
                self._rest(move.knob, True, step)
            return move
        if move := generate_faster(window, values, self._rules, free):
            return move
        self._quiet = self._quiet + 1 if window.idle_share < self._rules.idle_share / 2 else 0
        return save(window, values, self._rules, free) if self._quiet >= QUIET else None
