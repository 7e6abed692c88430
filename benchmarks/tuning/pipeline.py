"""Owns the simulation of a run as discrete events: dispatch, generation, filtering, batches, training, weight syncs.

Must not contain a rule of the sampler: `services.sampler.backpressure` says what is dispatched and how stale it is.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import TypeAlias

from benchmarks.tuning.replica import Group, Replica
from benchmarks.tuning.scenarios import Scenario
from services.controller.tuning.knobs import Knob, Values
from services.controller.tuning.moves import Move
from services.controller.tuning.policy import Policy
from services.controller.tuning.signals import StepSignals
from services.sampler.backpressure import Flow, SlotLimits, SurvivalEstimate, continuous, staleness


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


_Action: TypeAlias = Callable[[], None]


class Pipeline:
    """One simulated run. With a `policy`, it moves the values; else they stay as given."""

    def __init__(self, scenario: Scenario, values: Values, policy: Policy | None = None, seed: int = 0) -> None:
        self._scenario, self._policy = scenario, policy
        self.values = values
        self._random = random.Random(seed)
        self._now = 0.0
        self._events: list[tuple[float, int, _Action]] = []
        self._order = itertools.count()
        self._fleet = [Replica(scenario.engine, 0.0) for _ in range(values.replicas)]
        self._starting = 0
        self._tasks: deque[Group] = deque()
        self._generating = self._batched = self._peak = 0
        self._kept: list[Group] = []
        self._survival = SurvivalEstimate()
        self._numbers = itertools.count()
        self._policy_step, self._next_step = 0, 1
        self._batches: deque[list[Group]] = deque()
        self._free_at: float | None = 0.0  # since when the learner waits
        self._finished_at = 0.0
        self._counts = {"kept": 0, "filtered": 0, "stale": 0}
        self._steady = True
        self._gpu_s = self._gpus_at = 0.0
        self.log: list[tuple[StepSignals, float, float]] = []  # with the time, and the GPU-seconds so far
        self.moves: list[tuple[int, Move]] = []

    def run(self) -> Score:
        """Simulate every rollout step."""
        self._dispatch()
        while self._policy_step < self._scenario.steps:
            self._now, _, action = heapq.heappop(self._events)
            action()
        return self._score()

    def _at(self, time: float, action: _Action) -> None:
        heapq.heappush(self._events, (time, next(self._order), action))

    @property
    def _progress(self) -> float:
        return min(1.0, self._policy_step / self._scenario.steps)

    # --- the sampler

    def _flow(self) -> Flow:
        return Flow(self._generating, len(self._kept), self._batched, self._survival.value)

    def _dispatch(self) -> None:
        limits = SlotLimits(
            groups_per_step=self._scenario.groups_per_step,
            max_staleness=self.values.max_staleness,
            steps_left=self._scenario.steps + 8 - self._policy_step,
            max_inflight=self.values.max_inflight_groups,
            generation_batch=self._scenario.groups_per_step,
        )
        for _ in range(continuous(self._flow(), limits)):
            self._tasks.append(self._new_group())
            self._generating += 1
        self._peak = max(self._peak, self._generating + len(self._kept) + self._batched)
        self._lease()

    def _new_group(self) -> Group:
        scenario, rng = self._scenario, self._random
        median = scenario.length.at(self._progress) * rng.lognormvariate(0.0, scenario.spread / 2)
        lengths = tuple(
            max(1, min(scenario.longest, round(median * rng.lognormvariate(0.0, scenario.spread))))
            for _ in range(scenario.group_size)
        )
        return Group(next(self._numbers), lengths, rng.random() < scenario.kept.at(self._progress))

    def _judge(self, group: Group) -> None:
        self._generating -= 1
        self._survival.observe(group.survives)
        self._counts["kept" if group.survives else "filtered"] += 1
        if group.survives:
            self._kept.append(group)
            self._publish_due()
        self._dispatch()

    def _publish_due(self) -> None:
        bound, size = self.values.max_staleness, self._scenario.groups_per_step
        while self._next_step - 1 - self._policy_step <= bound:
            fresh = [group for group in self._kept if staleness(self._next_step - 1, group.oldest) <= bound]
            self._counts["stale"] += len(self._kept) - len(fresh)
            self._kept = fresh
            if len(fresh) < size:
                return
            fresh.sort(key=lambda group: (group.oldest, group.number))
            batch, self._kept = fresh[:size], fresh[size:]
            self._batched += size
            self._next_step += 1
            self._batches.append(batch)
            if self._free_at is not None:
                self._train()

    # --- the fleet

    def _lease(self) -> None:
        scenario = self._scenario
        most = math.ceil(scenario.engine.max_sequences / scenario.group_size) + 1
        while self._tasks:
            able = [replica for replica in self._fleet if replica.groups < most and not replica.draining]
            if not able:
                return
            replica = min(able, key=lambda found: found.groups)
            replica.forward(self._now)
            replica.add(self._tasks.popleft(), self._policy_step)
            self._expect(replica)

    def _expect(self, replica: Replica) -> None:
        replica.stamp += 1
        stamp, ends = replica.stamp, replica.next_end()
        if ends < math.inf:
            self._at(ends, lambda: self._sequence_ends(replica, stamp))

    def _sequence_ends(self, replica: Replica, stamp: int) -> None:
        if stamp != replica.stamp:
            return
        replica.forward(self._now)
        done = replica.end_one(self._policy_step)
        self._expect(replica)
        if replica.draining and replica.groups == 0:
            self._pay()
            self._fleet.remove(replica)
        if done is not None:
            self._judge(done)

    def _scale(self, wanted: int) -> None:
        self._pay()
        able = [replica for replica in self._fleet if not replica.draining]
        for replica in sorted(able, key=lambda found: found.groups)[: max(0, len(able) + self._starting - wanted)]:
            replica.draining = True
            if replica.groups == 0:
                self._fleet.remove(replica)
        for _ in range(wanted - len(able) - self._starting):
            self._starting += 1
            self._at(self._now + self._scenario.engine.start_s, self._joins)

    def _joins(self) -> None:
        self._pay()
        self._starting -= 1
        self._steady = False
        self._fleet.append(Replica(self._scenario.engine, self._now))
        self._lease()

    def _pay(self) -> None:
        learner, replica = self._scenario.gpus
        gpus = learner + replica * (len(self._fleet) + self._starting)
        self._gpu_s += gpus * (self._now - self._gpus_at)
        self._gpus_at = self._now

    # --- the learner

    def _train(self) -> None:
        scenario, batch = self._scenario, self._batches.popleft()
        assert self._free_at is not None
        waited, self._free_at = self._now - self._free_at, None
        seconds = scenario.step_s + sum(group.tokens for group in batch) / scenario.learner_tokens
        self._at(self._now + seconds, lambda: self._trained(batch, waited))

    def _trained(self, batch: list[Group], waited: float) -> None:
        finished, before = self._now, self._finished_at
        self._finished_at = finished
        self._at(finished + self._scenario.publish_s, lambda: self._commit(batch, waited, finished - before))

    def _commit(self, batch: list[Group], waited: float, wall_s: float) -> None:
        stale = fmean(staleness(self._policy_step, group.oldest) for group in batch)
        self._policy_step += 1
        self._batched -= len(batch)
        for replica in self._fleet:
            replica.forward(self._now)
            replica.paused_until = self._now + self._scenario.engine.pause_s
            self._expect(replica)
        tokens, counts = float(sum(group.tokens for group in batch)), self._counts
        signals = StepSignals(
            self._policy_step,
            wall_s,
            waited,
            len(batch),
            tokens,
            stale,
            **counts,
            in_flight=self._peak,
            steady=self._steady and not self._starting,
        )
        self._counts, self._peak, self._steady = dict.fromkeys(counts, 0), 0, True
        self._pay()
        self.log.append((signals, self._now, self._gpu_s))
        self._tune(signals)
        self._free_at = self._now
        if self._batches:
            self._train()
        self._publish_due()
        self._dispatch()

    def _tune(self, signals: StepSignals) -> None:
        if self._policy is None or not (move := self._policy.observe(signals, self.values)):
            return
        self.values = self.values.moved(move.knob, move.after)
        self.moves.append((signals.step, move))
        self._policy.taken(move, signals.step)
        if move.knob is Knob.REPLICAS:
            self._scale(move.after)

    def _score(self) -> Score:
        warm_up = self._scenario.warm_up
        (_, begins, paid), found = self.log[warm_up - 1], self.log[warm_up:]
        groups = sum(signals.groups for signals, _, _ in found)
        seconds = found[-1][1] - begins
        return Score(
            tokens_per_s=sum(signals.tokens for signals, _, _ in found) / seconds,
            groups_per_s=groups / seconds,
            staleness=fmean(signals.staleness for signals, _, _ in found),
            idle=sum(signals.waiting_s for signals, _, _ in found) / seconds,
            gpu_s=(found[-1][2] - paid) / groups,
            values=self.values,
            moves=tuple(self.moves),
        )
