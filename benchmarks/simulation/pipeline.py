"""Owns the simulation of a run: dispatch, generation, verdicts, batches, training, weight syncs, failures.

Must not contain a rule of the sampler: its own table, back-pressure, starvation levels and order of training decide
what is dispatched, trained and released. What is drawn and how it is judged, a `Tasks` says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Protocol

from benchmarks.simulation.clock import Clock
from benchmarks.simulation.replica import Engine, SimulatedGroup
from benchmarks.simulation.replicas import NEVER, Failures, Fleet
from services.sampler.advantage.filtering import KEPT
from services.sampler.backpressure import REFILLS, SlotLimits, SurvivalEstimate, staleness
from services.sampler.groups import GroupTable
from services.sampler.queue.starvation import Level, Starvation
from services.sampler.queue.state import NO_ESCALATION
from services.settings import StarvationSettings

MORE = "more"
"""The decision on a group whose screen is mixed: its other samples are wanted too."""


class Tasks(Protocol):
    """Where groups come from, and what they are worth."""

    def draw(self, step: int, level: Level) -> tuple[SimulatedGroup, int]:
        """A new group for the policy of a rollout step at a starvation level, and how many samples are wanted first."""

    def decide(self, group: SimulatedGroup) -> str:
        """KEPT, the name of a release, or MORE, once all requested samples are judged."""


@dataclass(frozen=True)
class Plan:
    """A run. The learner takes `step_s` per rollout step and trains `learner_tokens` per second besides.

    `publish_s`: until the fleet has its weights; the learner waits for it. `verdict_s`: from a group's last sample to
    its last verdict. `whole_groups`: how replicas lease, see `Fleet`. `refill`, `batch_factor`, `consumption` and
    `starvation`: settings of dynamic sampling.
    """

    engine: Engine
    groups_per_step: int
    group_size: int
    step_s: float
    learner_tokens: float
    publish_s: float
    steps: int
    verdict_s: float = 0.0
    failures: Failures = NEVER
    whole_groups: bool = False
    refill: str = "continuous"
    batch_factor: int = 1
    consumption: str = "oldest_first"
    starvation: StarvationSettings = NO_ESCALATION


@dataclass(frozen=True)
class Tokens:
    """Response tokens so far: all that were drawn, and by what became of them. The rest is in flight."""

    drawn: float = 0.0
    trained: float = 0.0
    filtered: float = 0.0
    stale: float = 0.0
    lost: float = 0.0

    def __sub__(self, other: Tokens) -> Tokens:
        return Tokens(*(mine - theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class Committed:
    """A rollout step. `at`: seconds since the start; `wall_s`: since the previous one was trained; `waited_s`: of it.

    `tokens`: of its groups; `staleness` and `stalest`: mean and most of them. `kept`, `filtered`, `stale`: groups since
    the previous one. `in_flight`: the most groups. `ledger` and `replica_s`: the fleet's, so far.
    """

    step: int
    at: float
    wall_s: float
    waited_s: float
    groups: int
    tokens: float
    staleness: float
    stalest: int
    kept: int
    filtered: int
    stale: int
    in_flight: int
    steady: bool
    replica_s: float
    ledger: Tokens


@dataclass
class _Batch:
    step: int
    groups: list[SimulatedGroup]


@dataclass
class _Window:
    """What happened since the last commit."""

    kept: int = 0
    filtered: int = 0
    stale: int = 0
    peak: int = 0


@dataclass
class Groups:
    """Groups so far, by what became of them."""

    dispatched: int = 0
    trained: int = 0
    filtered: int = 0
    stale: int = 0


@dataclass
class Pipeline:
    """One simulated run. `max_inflight` and `max_staleness` are limits that may be edited.

    `on_commit` is called with each rollout step, before the learner takes the next batch.
    """

    plan: Plan
    tasks: Tasks
    replicas: int
    max_inflight: int
    max_staleness: int
    seed: int = 0
    on_commit: Callable[[Committed], None] = lambda _: None
    clock: Clock = field(default_factory=Clock)
    table: GroupTable = field(default_factory=GroupTable)
    groups: Groups = field(default_factory=Groups)
    log: list[Committed] = field(default_factory=list)

    def __post_init__(self) -> None:
        plan = self.plan
        self.fleet = Fleet(
            self.clock,
            plan.engine,
            self.replicas,
            plan.group_size,
            self._generated,
            plan.failures,
            self.seed,
            plan.whole_groups,
        )
        self._survival = SurvivalEstimate()
        self._starvation = Starvation(plan.starvation, plan.groups_per_step)
        self._step, self._next_step, self._numbers = 0, 1, 0
        self._batches: deque[_Batch] = deque()
        self._open: deque[_Batch] = deque()  # those that are not committed
        self._free_at: float | None = 0.0  # since when the learner waits
        self._finished_at = 0.0
        self._window = _Window()
        self._tokens = Tokens()

    def run(self) -> list[Committed]:
        """Simulate every rollout step. Raises RuntimeError if the run would pause, because no group is kept."""
        self._dispatch()
        while self._step < self.plan.steps:
            self.clock.tick()
        return self.log

    @property
    def tokens(self) -> Tokens:
        """The response tokens so far."""
        return replace(self._tokens, drawn=self.fleet.drawn, lost=self.fleet.lost)

    @property
    def tokens_in_flight(self) -> float:
        """Response tokens of groups that are generated, kept or in a batch."""
        generating = sum(
            length
            for group in self.table.generating.values()
            if isinstance(group, SimulatedGroup)
            for length in group.lengths[: group.requested]
        )
        batched = sum(group.tokens for batch in self._open for group in batch.groups)
        kept = sum(group.tokens for group in self.table.kept.values() if isinstance(group, SimulatedGroup))
        return generating - self.fleet.missing + kept + batched

    # --- the sampler

    def _dispatch(self) -> None:
        plan, table = self.plan, self.table
        if len(table.kept) >= plan.groups_per_step:
            self._starvation.begin()
        self._starvation.update(len(table.kept), "")
        level = self._starvation.level
        if level is Level.PAUSE:
            raise RuntimeError(f"the run starves: {self._starvation.judged} groups judged, none kept")
        limits = SlotLimits(
            groups_per_step=plan.groups_per_step,
            max_staleness=self.max_staleness,
            steps_left=self.max_staleness + 1,  # the run does not end where the simulation does
            max_inflight=self.max_inflight,
            generation_batch=plan.groups_per_step * plan.batch_factor,
            widened=level >= Level.WIDEN,
        )
        for _ in range(REFILLS[plan.refill](table.flow(self._survival.value), limits)):
            group, wanted = self.tasks.draw(self._step, level)
            table.add(group.name, group)
            self.groups.dispatched += 1
            self.fleet.request(group, wanted)
        self._window.peak = max(self._window.peak, table.in_flight)
        self.fleet.lease()

    def _generated(self, group: SimulatedGroup) -> None:
        if self.plan.verdict_s:
            self.clock.at(self.clock.now + self.plan.verdict_s, self._judge, group)
        else:
            self._judge(group)

    def _judge(self, group: SimulatedGroup) -> None:
        decision = self.tasks.decide(group)
        if decision == MORE:
            self.fleet.request(group, len(group.lengths))
            self.fleet.lease()
            return
        self._survival.observe(decision == KEPT)
        self._starvation.group_judged()
        if decision == KEPT:
            self._window.kept += 1
            self.table.keep(group.name)
            self._publish_due()
        else:
            self._window.filtered += 1
            self.groups.filtered += 1
            self._count(filtered=group.tokens)
            self.table.remove(group.name)
        self._dispatch()

    def _publish_due(self) -> None:
        plan, table = self.plan, self.table
        while staleness(self._next_step - 1, self._step) <= self.max_staleness:
            self._release_stale()
            enough = 1 if self._starvation.level is Level.PARTIAL else plan.groups_per_step
            if len(table.kept) < enough:
                return
            names = table.next_batch(plan.consumption, plan.groups_per_step)
            groups = [group for name in names if isinstance(group := table.kept[name], SimulatedGroup)]
            table.batch_published(self._next_step, names)
            self._open.append(_Batch(self._next_step, groups))
            self._batches.append(self._open[-1])
            self._starvation.begin()
            self._next_step += 1
            if self._free_at is not None:
                self._train()

    def _release_stale(self) -> None:
        consuming = self._next_step - 1
        for name in self.table.kept_where(lambda oldest: staleness(consuming, oldest) > self.max_staleness):
            group = self.table.kept[name]
            assert isinstance(group, SimulatedGroup)
            self._window.stale += 1
            self.groups.stale += 1
            self._count(stale=group.tokens)
            self.table.remove(name)

    def _count(self, **tokens: float) -> None:
        self._tokens = replace(
            self._tokens, **{name: getattr(self._tokens, name) + more for name, more in tokens.items()}
        )

    # --- the learner

    def _train(self) -> None:
        batch = self._batches.popleft()
        assert self._free_at is not None
        waited, self._free_at = self.clock.now - self._free_at, None
        seconds = self.plan.step_s + sum(group.tokens for group in batch.groups) / self.plan.learner_tokens
        self.clock.at(self.clock.now + seconds, self._trained, batch, waited)

    def _trained(self, batch: _Batch, waited: float) -> None:
        wall_s, self._finished_at = self.clock.now - self._finished_at, self.clock.now
        self.clock.at(self.clock.now + self.plan.publish_s, self._commit, batch, waited, wall_s)

    def _commit(self, batch: _Batch, waited: float, wall_s: float) -> None:
        found = [staleness(self._step, group.oldest_version) for group in batch.groups]
        tokens = float(sum(group.tokens for group in batch.groups))
        self._open.popleft()
        self._step += 1
        self.table.trained(self._step)
        self.groups.trained += len(batch.groups)
        self._count(trained=tokens)
        self.fleet.max_staleness = self.max_staleness
        self.fleet.hold(self._step)
        window, self._window = self._window, _Window()
        step = Committed(
            step=self._step,
            at=self.clock.now,
            wall_s=wall_s,
            waited_s=waited,
            groups=len(found),
            tokens=tokens,
            staleness=fmean(found),
            stalest=max(found),
            kept=window.kept,
            filtered=window.filtered,
            stale=window.stale,
            in_flight=window.peak,
            steady=self.fleet.steady and not self.fleet.starting,
            replica_s=self.fleet.replica_s,
            ledger=self.tokens,
        )
        self.fleet.steady = True
        self.log.append(step)
        self.on_commit(step)
        self._free_at = self.clock.now
        if self._batches:
            self._train()
        self._publish_due()
        self._dispatch()
