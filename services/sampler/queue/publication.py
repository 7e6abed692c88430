"""Owns the publication of batches: when a batch is due, which kept groups are too stale for it, and its snapshot.

Must not compute advantages or metrics; `batching` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from services.contracts import CommittedPolicy, Release, SamplerSnapshot
from services.sampler.backpressure import staleness
from services.sampler.queue.batching import Window, make_batch
from services.sampler.queue.starvation import Level
from services.sampler.queue.state import QueueState
from services.streams.state.group_counts import group_counts, response_tokens

LOST_VERSION = "a policy version that wrote it has no rollout step: Redis lost it"


class BatchPublisher:
    """Publishes the batches of the training lane."""

    def __init__(self, state: QueueState) -> None:
        self._state = state
        self._recipe = state.recipe

    async def publish_due(self, policy: CommittedPolicy, *, partial: bool = False) -> None:
        """Publish every batch that has its groups and is at most `max_staleness` steps ahead of the policy.

        `partial`: any kept group is enough, as at the starvation level PARTIAL.
        """
        state, limits = self._state, self._state.recipe.limits  # as edited last
        while state.next_step <= state.last_step:
            # Without a version of this history no staleness is known: the learner has to announce one first.
            if state.next_step - 1 - policy.step > limits.max_staleness or not policy.version_steps:
                return
            await self._release_stale(policy.version_steps)
            kept = len(state.table.kept)
            enough = 1 if partial or state.starvation.level is Level.PARTIAL else limits.groups_per_step
            if kept < enough:
                return
            names = state.table.next_batch(self._recipe.algorithm.dynamic_sampling.consumption, limits.groups_per_step)
            if not await self._release_lost(names, policy.version_steps):
                await self._publish(policy, names)

    async def _release_lost(self, names: list[str], version_steps: Mapping[int, int]) -> bool:
        """Release those of the groups that have a response of a version which a failover lost; whether there are any.

        It belongs to no step that is known.
        """
        kept = self._state.table.kept
        lost = [name for name in names if not kept[name].versions <= version_steps.keys()]
        await asyncio.gather(*(self._state.release(name, Release.STALE, LOST_VERSION) for name in lost))
        return bool(lost)

    async def _publish(self, policy: CommittedPolicy, names: list[str]) -> None:
        """Publish the next step's batch of these kept groups."""
        state, redis, keys = self._state, self._state.context.redis, self._state.context.keys
        groups = {name: state.table.kept[name] for name in names}
        metrics = state.window.metrics() | state.dispatcher.metrics
        metrics["groups_missing"] = float(self._recipe.limits.groups_per_step - len(names))
        state.begin_batch()
        tokens = await response_tokens(redis, keys)
        budget = self._recipe.limits.response_tokens
        if budget is not None and tokens >= budget:
            state.last_step = state.next_step
        batch = make_batch(
            self._recipe,
            state.next_step,
            policy,
            groups,
            state.dispatcher.state,
            metrics,
            last=state.next_step == state.last_step,
            snapshot=keys.snapshot(state.next_step),
        )
        snapshot = SamplerSnapshot(
            step=batch.step,
            state=batch.sampler_state,
            posteriors=state.dispatcher.rates.dump(),
            queue=tuple(name for name in state.table.open_groups if name not in groups),
            counts=await group_counts(redis, keys),
            response_tokens=tokens,
        )
        if not await state.transitions.publish_batch(batch, snapshot):
            raise RuntimeError(f"publishing the batch of rollout step {state.next_step} failed: a group is not kept")
        state.table.batch_published(state.next_step, names)
        state.window = Window(self._recipe)
        state.next_step += 1

    async def _release_stale(self, version_steps: Mapping[int, int]) -> None:
        """Release the kept groups that would exceed the staleness limit in the next step's batch."""
        bound, consuming = self._state.recipe.limits.max_staleness, self._state.next_step - 1

        def too_stale(version: int) -> bool:
            return version not in version_steps or staleness(consuming, version_steps[version]) > bound

        stale = self._state.table.kept_where(too_stale)
        reason = f"staler than limits.max_staleness = {bound} in the batch of rollout step {consuming + 1}"
        await asyncio.gather(*(self._state.release(name, Release.STALE, reason) for name in stale))
