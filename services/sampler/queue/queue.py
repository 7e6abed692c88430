"""Owns the loop of the dynamic-sampling queue: its order of work, pauses and starvation levels.

Must not hold a rule of its own. What each part of the loop waits for, and what unblocks it:

    free slot --> dispatch --task--> rollout --sample--> verifier --verdict--> decision (all verdicts of a group)
     ^  ^  ^       ^    ^               ^                                       |   |   |
     |  |  |       |    |               +------ rest of a screened group -------+   |   |
     |  |  |       |    +-- Redis below 85 % of maxmemory (memory, relief); archive    |   |
     |  |  |       +-- not paused; starved (level 4) or unjudged: until resumed     |   |
     |  |  +-- released <-- filtered <----------------------------------------------+   |
     |  +-- released <-- dead letter or orphaned (in flight), too stale (kept)          v
     +-- commit <-- learner <-- batch <-- groups_per_step groups (level 3: any) <-- kept groups
           |                      ^
           +-- newer policy ------+   (its step is at least next_step - 1 - max_staleness)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from services.contracts import CommittedPolicy
from services.metrics import UNKNOWN_SHARE
from services.process.hosting import Context
from services.sampler.data import Splits
from services.sampler.evaluation.schedule import EvaluationSchedule
from services.sampler.queue.faults.dead_letters import DeadLetterWatch
from services.sampler.queue.faults.reconcile import Reconciler
from services.sampler.queue.intake import VerdictIntake
from services.sampler.queue.maintenance import EVERY_S, Maintenance
from services.sampler.queue.publication import BatchPublisher
from services.sampler.queue.relief import MemoryRelief
from services.sampler.queue.starvation import Level
from services.sampler.queue.state import QueueState
from services.sampler.queue.waits import QueueWaits
from services.streams.connection.functions import RedisFullError
from services.streams.state.group_state import GroupTransitions
from services.streams.state.policy_history import read_policy
from services.streams.state.runs import is_paused


class SamplingQueue:
    """The training lane: dispatch with refill until the run's steps are done."""

    def __init__(
        self, state: QueueState, maintenance: Maintenance, archive_room: Callable[[int], Awaitable[int]]
    ) -> None:
        self._state = state
        self._context = state.context
        self._maintenance = maintenance
        self._archive_room = archive_room
        self._intake = VerdictIntake(state)
        self._publisher = BatchPublisher(state)
        self._relief = MemoryRelief(state, maintenance.memory, self._publisher)
        self._dead_letters = DeadLetterWatch(state)
        self._reconciler = Reconciler(state)
        self._waits = QueueWaits(state)

    @classmethod
    async def open(
        cls,
        context: Context,
        transitions: GroupTransitions,
        splits: Splits,
        maintenance: Maintenance,
        archive_room: Callable[[int], Awaitable[int]],
    ) -> SamplingQueue:
        """Continue where an earlier sampler of this run stopped, or start.

        `archive_room`: how many groups may be dispatched beside those in flight, so that the archive keeps up.
        """
        state = await QueueState.load(context, transitions, splits.train)
        maintenance.report_level(state.starvation.level)
        queue = cls(state, maintenance, archive_room)
        await queue._intake.open()
        return queue

    @property
    def last_step(self) -> int:
        """The run's last rollout step; a spent token budget lowers it."""
        return self._state.last_step

    async def run(self, schedule: EvaluationSchedule) -> None:
        """Sample until the last step is trained, and start the evaluations that are due. Raises what a part raises."""
        try:
            while not self._context.stopping.is_set():
                await self._context.refresh()
                policy = await read_policy(self._context.redis, self._context.keys) or CommittedPolicy(
                    version=0, step=0
                )
                if policy.step >= self._state.last_step:
                    return
                paused = await self._paused()
                if not paused:
                    await schedule.tick(policy.step)
                await self._turn(policy, paused)
        finally:
            self._waits.clear()
            UNKNOWN_SHARE.labels(self._context.keys.run).set(0)

    async def yield_memory(self) -> None:
        """After training, until cancelled: whenever memory is short, withdraw the groups that no batch takes."""
        while True:
            await self._relief.end()
            await asyncio.sleep(EVERY_S)

    async def _turn(self, policy: CommittedPolicy, paused: bool) -> None:
        """One turn of the loop; a paused run dispatches nothing."""
        UNKNOWN_SHARE.labels(self._context.keys.run).set(self._state.unknown_share.share)
        self._state.table.trained(policy.step)
        await self._publisher.publish_due(policy)
        await self._dead_letters.release_groups()
        if not paused:
            await self._dispatch(policy)
        await self._intake.read(policy)
        await self._reconciler.look(policy.step)
        self._waits.update()

    async def _paused(self) -> bool:
        """Whether nothing may be dispatched now: a pause was requested, or the run starves or is not judged."""
        starvation = self._state.starvation
        if await is_paused(self._context.redis, self._context.keys):
            starvation.level = Level.PAUSE
            return True
        if starvation.level is Level.PAUSE:
            self._state.resume()
            starvation.level = Level.NORMAL
            self._maintenance.report_level(Level.NORMAL)
        return False

    async def _dispatch(self, policy: CommittedPolicy) -> None:
        """Fill the free slots, unless the run pauses, Redis is short of memory, or it lost the fleet's version."""
        state = self._state
        if await self._reconciler.fleet_waits(policy):
            return
        await self._pause_if_unjudged()
        await self._escalate()
        if state.starvation.level is Level.PAUSE:
            return
        room = await self._relief.room(policy)
        if room == 0:
            return
        archive_room = await self._archive_room(state.table.in_flight)
        room = archive_room if room is None else min(room, archive_room)
        try:
            await state.dispatcher.dispatch(
                state.last_step - policy.step, state.survival.value, policy.step, state.starvation.level, room
            )
        except RedisFullError as error:
            self._maintenance.memory.refused(str(error))

    async def _pause_if_unjudged(self) -> None:
        """Pause the run if too many verdicts are unknown: what is generated now would not be judged either."""
        state = self._state
        if (why := state.unknown_share.excess) is not None:
            await state.transitions.mark_starved(why)
            await self._context.event_log.write("verdicts-unknown", why)
            state.starvation.level = Level.PAUSE

    async def _escalate(self) -> None:
        """Set the starvation level that applies, and report a change. At the last level the run pauses."""
        state = self._state
        if state.starvation.level is Level.PAUSE:
            return
        kept = len(state.table.kept)
        if kept >= state.recipe.limits.groups_per_step:
            state.starvation.begin()
        if state.dispatcher.exhausted and not state.table.generating:
            change = state.starvation.force(kept, state.window.histogram)
        else:
            change = state.starvation.update(kept, state.window.histogram)
        if change is None:
            return
        if change.level is Level.PAUSE:
            await state.transitions.mark_starved(change.text)
        await self._context.event_log.write(change.kind, change.text)
        self._maintenance.report_level(change.level)
