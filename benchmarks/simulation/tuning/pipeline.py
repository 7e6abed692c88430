"""Owns a simulated run that tuning moves, or whose values stay: its groups, its score.

Must not contain a rule of tuning or of the sampler.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import fmean

from benchmarks.simulation import pipeline
from benchmarks.simulation.pipeline import Committed, Plan
from benchmarks.simulation.replica import SimulatedGroup
from benchmarks.simulation.tuning.scenarios import Scenario
from services.contracts import Release
from services.controller.tuning.knobs import Knob, Values
from services.controller.tuning.moves import Move
from services.controller.tuning.policy import Policy
from services.controller.tuning.signals import StepSignals
from services.sampler.advantage.filtering import KEPT
from services.sampler.queue.starvation import Level


@dataclass(frozen=True)
class Score:
    """What a run did after its warm-up. `tokens_per_s`, `groups_per_s`: trained ones; `staleness`: their mean.

    `idle`: the learner's share of the time without a batch. `gpu_s`: GPU-seconds per trained group, those of replicas
    that start included. `values`: those at the end; `moves`: tuning's, by rollout step.
    """

    tokens_per_s: float
    groups_per_s: float
    staleness: float
    idle: float
    gpu_s: float
    values: Values
    moves: tuple[tuple[int, Move], ...] = ()


class Pipeline:
    """One simulated run. With a `policy`, it moves the values; else they stay as given."""

    def __init__(self, scenario: Scenario, values: Values, policy: Policy | None = None, seed: int = 0) -> None:
        self._scenario, self._policy = scenario, policy
        self.values = values
        self._random = random.Random(seed)
        self._numbers = 0
        plan = Plan(
            engine=scenario.engine,
            groups_per_step=scenario.groups_per_step,
            group_size=scenario.group_size,
            step_s=scenario.step_s,
            learner_tokens=scenario.learner_tokens,
            publish_s=scenario.publish_s,
            steps=scenario.steps,
            whole_groups=True,
        )
        self._run = pipeline.Pipeline(
            plan, self, values.replicas, values.max_inflight_groups, values.max_staleness, seed, self._committed
        )
        self._survivors = set[str]()
        self.log: list[StepSignals] = []
        self.moves: list[tuple[int, Move]] = []

    def run(self) -> Score:
        """Simulate every rollout step."""
        self._run.run()
        return self.score()

    def draw(self, step: int, level: Level) -> tuple[SimulatedGroup, int]:
        """A new group, all samples of which are wanted; see `Tasks`."""
        scenario, rng, progress = self._scenario, self._random, min(1.0, step / self._scenario.steps)
        lengths = scenario.lengths(progress).draw(rng, scenario.group_size)
        self._numbers += 1
        group = SimulatedGroup(self._numbers, lengths)
        if rng.random() < scenario.kept.at(progress):
            self._survivors.add(group.name)
        return group, scenario.group_size

    def decide(self, group: SimulatedGroup) -> str:
        """Whether the group is kept was decided when it was drawn; see `Tasks`."""
        return KEPT if group.name in self._survivors else Release.FILTERED.value

    def _committed(self, step: Committed) -> None:
        signals = StepSignals(
            step.step,
            step.wall_s,
            step.waited_s,
            step.groups,
            step.tokens,
            step.staleness,
            kept=step.kept,
            filtered=step.filtered,
            stale=step.stale,
            in_flight=step.in_flight,
            steady=step.steady,
        )
        self.log.append(signals)
        if self._policy is None or not (move := self._policy.observe(signals, self.values)):
            return
        self.values = self.values.moved(move.knob, move.after)
        self.moves.append((signals.step, move))
        self._policy.taken(move, signals.step)
        self._run.max_inflight = self.values.max_inflight_groups
        self._run.max_staleness = self.values.max_staleness
        if move.knob is Knob.REPLICAS:
            self._run.fleet.scale(move.after)

    def score(self) -> Score:
        """The score of the rollout steps after the warm-up."""
        steps, warm_up = self._run.log, self._scenario.warm_up
        before, last, found = steps[warm_up - 1], steps[-1], steps[warm_up:]
        groups = sum(step.groups for step in found)
        seconds = last.at - before.at
        learner, replica = self._scenario.gpus
        return Score(
            tokens_per_s=sum(step.tokens for step in found) / seconds,
            groups_per_s=groups / seconds,
            staleness=fmean(step.staleness for step in found),
            idle=sum(step.waited_s for step in found) / seconds,
            gpu_s=(learner * seconds + replica * (last.replica_s - before.replica_s)) / groups,
            values=self.values,
            moves=tuple(self.moves),
        )
