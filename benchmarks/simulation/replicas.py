"""Owns the fleet: which replica leases the next task, what their failures cost, who replaces them, how many there are.

Must not contain the rule of leasing; `rollout.service` says when a replica leases another task.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.simulation.clock import Clock
from benchmarks.simulation.replica import Engine, Piece, Replica, SimulatedGroup
from rollout.half_drawn import KEEP_EVERY_S
from rollout.service import slots
from services.sampler.backpressure import staleness


@dataclass(frozen=True)
class Failures:
    """Replicas end without notice after `mtbf_s` seconds on average, each by itself. `lease_s`: until others notice."""

    mtbf_s: float = math.inf
    lease_s: float = 0.0


NEVER = Failures()


class Fleet:
    """The replicas, and the stream of tasks. `finished` is called with each group that has no sample left to draw.

    A replica that has room waits for a task, and the one that has waited longest gets it, as with blocked readers of a
    stream. With `whole_groups`, a group counts with all of its samples until its last one is finished, and the replica
    with the fewest groups gets the task. `lost`: tokens that were drawn in vain. `steady`: no replica joined since it
    was set.
    """

    def __init__(
        self,
        clock: Clock,
        engine: Engine,
        replicas: int,
        group_size: int,
        finished: Callable[[SimulatedGroup], None],
        failures: Failures = NEVER,
        seed: int = 0,
        whole_groups: bool = False,
    ) -> None:
        self._clock, self._engine, self._finished = clock, engine, finished
        self._failures, self._random = failures, random.Random(f"{seed}:failures")
        self._slots, self._group_size = slots(engine.max_sequences, group_size), group_size
        self._whole_groups = whole_groups
        self._tasks: deque[list[Piece]] = deque()
        self._away: dict[Replica, list[list[Piece]]] = {}  # tasks of failed replicas, under their leases
        self._members: dict[Replica, None] = {}
        self._hungry: dict[Replica, None] = {}
        self._drawn_before = 0.0
        self._replica_s = self._paid_at = 0.0
        self.policy_step, self.max_staleness = 0, 0
        self.starting = self.failed = 0
        self.lost = 0.0
        self.steady = True
        for _ in range(replicas):
            self._add()

    # --- tasks

    def request(self, group: SimulatedGroup, samples: int) -> None:
        """Put a task for the group's samples up to `samples` on the stream."""
        wanted = range(group.requested, samples)
        group.requested, group.left = samples, len(wanted)
        self._tasks.append([Piece(group, index, group.lengths[index]) for index in wanted])

    def lease(self) -> None:
        """Let the replicas with room lease the tasks."""
        now = self._clock.now
        while self._tasks and self._hungry:
            replica = self._next()
            del self._hungry[replica]
            replica.forward(now)
            replica.add(self._tasks.popleft(), self.policy_step)
            self._look(replica)
            self._expect(replica)

    def _next(self) -> Replica:
        if not self._whole_groups:
            return next(iter(self._hungry))
        return min((each for each in self._members if each in self._hungry), key=lambda each: each.groups)

    def _look(self, replica: Replica) -> None:
        """Let it wait for a task if it has room."""
        held = replica.groups * self._group_size if self._whole_groups else replica.unfinished
        if held < self._slots and not replica.draining:
            self._hungry.setdefault(replica)

    def _expect(self, replica: Replica) -> None:
        replica.stamp += 1
        ends = replica.next_end()
        if ends < math.inf:
            self._clock.at(ends, self._sequence_ends, replica, replica.stamp)

    def _sequence_ends(self, replica: Replica, stamp: int) -> None:
        if stamp != replica.stamp:
            return
        replica.forward(self._clock.now)
        done = replica.end_one(self.policy_step)
        self._look(replica)
        self.lease()
        if stamp == replica.stamp:
            self._expect(replica)
        if replica.draining and not replica.unfinished:
            self._remove(replica)
        if done is not None:
            self._finished(done)

    def hold(self, policy_step: int) -> None:
        """Let all replicas pause to apply the weights of a rollout step."""
        self.policy_step = policy_step
        for replica in self._members:
            replica.forward(self._clock.now)
            replica.paused_until = self._clock.now + self._engine.pause_s
            self._expect(replica)

    # --- replicas

    def scale(self, wanted: int) -> None:
        """Drain or start replicas until there are so many."""
        self._pay()
        able = [replica for replica in self._members if not replica.draining]
        for replica in sorted(able, key=lambda found: found.groups)[: max(0, len(able) + self.starting - wanted)]:
            replica.draining = True
            self._hungry.pop(replica, None)
            if not replica.unfinished:
                self._remove(replica)
        for _ in range(wanted - len(able) - self.starting):
            self._start()

    def _start(self) -> None:
        self._pay()
        self.starting += 1
        self._clock.at(self._clock.now + self._engine.start_s, self._joins)

    def _joins(self) -> None:
        self._pay()
        self.starting -= 1
        self.steady = False
        self._add()
        self.lease()

    def _add(self) -> None:
        replica = Replica(self._engine, self._clock.now)
        self._members[replica] = self._hungry[replica] = None
        if self._failures.mtbf_s < math.inf:
            lives = self._random.expovariate(1 / self._failures.mtbf_s)
            self._clock.at(self._clock.now + lives, self._fails, replica)

    def _remove(self, replica: Replica) -> None:
        self._pay()
        self._drawn_before += replica.drawn
        del self._members[replica]
        self._hungry.pop(replica, None)

    def _fails(self, replica: Replica) -> None:
        if replica not in self._members:
            return
        replica.forward(self._clock.now)
        replica.stamp += 1
        self._remove(replica)
        self.failed += 1
        self.steady = False
        by_group: dict[str, list[Piece]] = {}
        for piece in replica.left():
            by_group.setdefault(piece.group.name, []).append(self._half_drawn(piece))
        self._away[replica] = list(by_group.values())
        self._clock.at(self._clock.now + self._failures.lease_s, self._taken_over, replica)
        self._start()

    def _half_drawn(self, piece: Piece) -> Piece:
        """What is left of a failed replica's sample: it was kept a while ago, on average half of KEEP_EVERY_S."""
        group, index, left = piece
        whole = group.lengths[index]
        kept = max(0.0, whole - left - self._engine.per_sequence * KEEP_EVERY_S / 2)
        self.lost += whole - left - kept
        if not kept:
            group.oldest[index] = -1
        return Piece(group, index, whole - kept)

    def _taken_over(self, failed: Replica) -> None:
        """Redeliver its tasks before all others. What was drawn too long ago to be trained is drawn again."""
        tasks = self._away.pop(failed)
        for task in tasks:
            for place, (group, index, left) in enumerate(task):
                drawn = group.lengths[index] - left
                if drawn and staleness(self.policy_step, group.oldest[index]) > self.max_staleness:
                    self.lost += drawn
                    group.oldest[index] = -1
                    task[place] = Piece(group, index, group.lengths[index])
        self._tasks.extendleft(reversed(tasks))
        self.lease()

    # --- figures

    def _pay(self) -> None:
        self._replica_s += (len(self._members) + self.starting) * (self._clock.now - self._paid_at)
        self._paid_at = self._clock.now

    @property
    def replica_s(self) -> float:
        """Seconds of all replicas so far, those that start included."""
        self._pay()
        return self._replica_s

    @property
    def drawn(self) -> float:
        """Tokens drawn so far."""
        for replica in self._members:
            replica.forward(self._clock.now)
        return self._drawn_before + sum(replica.drawn for replica in self._members)

    @property
    def missing(self) -> float:
        """Tokens that the requested samples lack."""
        waiting = (task for tasks in (self._tasks, *self._away.values()) for task in tasks)
        held = (replica.left() for replica in self._members)
        return sum(piece.left for pieces in (*waiting, *held) for piece in pieces)

    @property
    def open_groups(self) -> int:
        """Groups with a sample in progress or waiting in a replica, added up over the replicas."""
        return sum(len({piece.group.name for piece in replica.left()}) for replica in self._members)
