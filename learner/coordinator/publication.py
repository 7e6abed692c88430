"""Owns rank 0's publications and commits: copy the policy, send it to the fleet, make it the current version.

Must not train, nor decide when a step is committed.
"""

from __future__ import annotations

from learner.coordinator.waiting import idle_during
from learner.rank.commands import Command
from learner.rank.worker import RankWorker
from learner.weight_sync.publisher import Publisher
from learner.weight_sync.snapshot import Snapshot
from services.contracts import CommittedPolicy, StepRecord
from services.metrics import POLICY_VERSION
from services.process.hosting import Context
from services.streams.state.heartbeat import held_version
from services.streams.state.policy_history import History


class Publication:
    """The policy as this learner published and committed it.

    `policy`: the committed version. `record`: the record of its step, None before the first. `snapshot`: the weights
    of the last published version.
    """

    snapshot: Snapshot

    def __init__(self, context: Context, worker: RankWorker, history: History, publisher: Publisher) -> None:
        self.history = history
        self.policy = CommittedPolicy(version=0, step=0)
        self.record: StepRecord | None = None
        self._context = context
        self._worker = worker
        self._publisher = publisher

    def check(self) -> None:
        """Raise the error that stopped the publisher, if any."""
        self._publisher.check()

    async def take_snapshot(self) -> Snapshot:
        """Copy the policy. All ranks take part, at rank 0's command."""
        await self._worker.send(Command(do="snapshot"))
        snapshot = await self._worker.snapshot()
        assert snapshot is not None, "rank 0 keeps the copy"
        self.snapshot = snapshot
        return snapshot

    async def publish(self, version: int) -> float:
        """Send the last snapshot to the fleet as `version`. Returns the seconds until every replica held it."""
        what, patience_s = (
            f"the fleet to hold policy version {version}",
            3 * self._context.record.recipe.weights.timeout_s,
        )
        with self._context.waits.on("weight-sync", what, patience_s):
            seconds = await idle_during(self._worker, self._publisher.publish(self.snapshot.numbered(version)))
        POLICY_VERSION.labels(run=self._context.record.id, service="learner").set(version)
        return seconds

    async def commit_start(self, step: int) -> int:
        """Commit the last snapshot as the policy of `step`, without training. Returns its version."""
        version = await self._announce(step, await held_version(self._context.redis, self._context.keys.run))
        await self.history.commit_policy(version, step, self.snapshot.digest)
        self.policy = CommittedPolicy(version=version, step=step, weights=self.snapshot.digest)
        return version

    async def _announce(self, step: int, held: int = -1) -> int:
        """The version under which to publish the last snapshot. `held`: the newest that a replica holds."""
        max_staleness = self._context.record.recipe.limits.max_staleness
        return await self.history.announce(step, self.snapshot.digest, max_staleness, held)

    async def commit_step(self, trained: StepRecord, entry: str) -> StepRecord:
        """Copy and publish the policy, then commit the step that trained the batch of `entry`.

        Returns the record with the new version. The commit is one Redis call: it marks the groups as trained, makes the
        version current and frees the slots.
        """
        snapshot = await self.take_snapshot()
        version = await self._announce(trained.step)
        record = trained.model_copy(update={"version": version, "weights": snapshot.digest})
        seconds = await self.publish(version)
        record = record.model_copy(update={"metrics": record.metrics | {"publish_seconds": seconds}})
        await self.history.commit_step(record, entry)
        self.policy = CommittedPolicy(version=version, step=record.step, weights=snapshot.digest)
        self.record = record
        return record
