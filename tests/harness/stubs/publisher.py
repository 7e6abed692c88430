"""Owns the learner's side of weight syncs without weights: plans for the live replicas, and the wait for their acks.

Must not be used outside tests and benchmarks.
"""

from __future__ import annotations

import time

from services.contracts import EPOCH_SHIFT, ProcessInfo, WeightAck, WeightPlan
from services.process.hosting import Context
from services.streams.delivery.consumer import tail_messages
from services.streams.state.heartbeat import live_processes
from services.streams.state.policy_history import History

APPLIED_S = 5.0
"""How long a publication waits for a replica; one that has died meanwhile never acks."""
JOINING_S = 0.5
"""How often replicas that lack the current version are looked for."""
LOOK_S = 0.1


class StubPublisher:
    """Publishes plans that carry nothing."""

    def __init__(self, context: Context, history: History) -> None:
        self._context = context
        self._history = history
        self._generation = history.fence.epoch << EPOCH_SHIFT
        self._acks_after = "0-0"
        self._look_at = 0.0

    async def publish(self, version: int) -> None:
        """Have every live replica hold `version`; waits for each for at most APPLIED_S seconds."""
        await self._send(version, await self._replicas())

    async def serve_joining(self, version: int) -> None:
        """Every JOINING_S seconds, send `version` to the replicas that lack it."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + JOINING_S
        replicas = await self._replicas()
        await self._history.check_held(max((replica.version or 0 for replica in replicas), default=-1))
        lacking = [replica for replica in replicas if replica.version is None or replica.version < version]
        await self._send(version, lacking)

    async def _replicas(self) -> list[ProcessInfo]:
        live = await live_processes(self._context.redis, self._context.keys.run)
        return [process for process in live if process.service == "rollout" and process.state in ("joining", "ready")]

    async def _send(self, version: int, replicas: list[ProcessInfo]) -> None:
        if not replicas:
            return
        self._generation += 1
        members = {replica.id: rank for rank, replica in enumerate(replicas, 1)}
        plan = WeightPlan(
            generation=self._generation,
            version=version,
            host=self._context.host,
            port=0,
            world=len(members) + 1,
            members=members,
            timeout_s=APPLIED_S,
        )
        await self._history.publish_plan(plan)
        missing, ends = set(members), time.monotonic() + APPLIED_S
        redis, keys = self._context.redis, self._context.keys
        while missing and time.monotonic() < ends:
            for entry, ack in await tail_messages(
                redis, keys, keys.weight_acks, WeightAck, self._acks_after, block_s=LOOK_S
            ):
                self._acks_after = entry
                if ack.generation == plan.generation:
                    missing.discard(ack.member)
            if missing:
                missing &= {replica.id for replica in await self._replicas()}
