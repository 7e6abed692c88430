"""Owns rank 0's publications and commits: copy the policy, send it to the fleet, make it the current version.

Must not train, nor decide when a step is committed. A step is published and committed in the background, while the next
batch is already in training; no optimizer step of that batch is taken before the commit (`wait_committed`), so that the
policy in training stays the one of the committed step until then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from learner.rank.commands import Command
from learner.rank.worker import RankWorker
from learner.weight_sync.publisher import Publisher
from learner.weight_sync.snapshot import Snapshot
from services.contracts import CommittedPolicy, StepRecord
from services.metrics import POLICY_VERSION
from services.process.hosting import Context
from services.streams.state.heartbeat import held_version
from services.streams.state.policy_history import History
from services.waits import cancel_and_wait

AfterCommit = Callable[[StepRecord], Awaitable[None]]
"""What follows the commit of a step, in the background too."""


class Publication:
    """The policy as this learner published and committed it.

    `policy`: the committed version. `latest`: the one in training, which may still be on its way to the fleet.
    `record`: the record of the committed step, None before the first. `snapshot`: the weights of `latest`.
    """

    snapshot: Snapshot

    def __init__(self, context: Context, worker: RankWorker, history: History, publisher: Publisher) -> None:
        self.history = history
        self.policy = self.latest = CommittedPolicy(version=0, step=0)
        self.record: StepRecord | None = None
        self._commit: asyncio.Task[StepRecord] | None = None
        self._following: asyncio.Task[None] | None = None
        self._waited_s = 0.0
        self._context = context
        self._worker = worker
        self._publisher = publisher

    def check(self) -> None:
        """Raise the error that stopped the publisher or the work in the background, if any."""
        self._publisher.check()
        if self._following is not None and self._following.done():
            self._following.result()

    async def settle(self) -> None:
        """Wait until the last trained step is committed, with what follows. Raises what stopped it."""
        if self._following is not None:
            with self._waiting():
                await asyncio.shield(self._following)

    def wait_committed(self) -> None:
        """Block the training thread until the last trained step is committed. Raises what stopped that."""
        if self._commit is not None and not self._commit.done():
            waiting = asyncio.run_coroutine_threadsafe(self._until_committed(self._commit), self._commit.get_loop())
            waiting.result(self._patience_s)

    async def _until_committed(self, commit: asyncio.Task[StepRecord]) -> None:
        with self._waiting():
            await asyncio.shield(commit)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        started, what = time.monotonic(), f"rollout step {self.latest.step} to be committed"
        with self._context.waits.on("commit", what, self._patience_s):
            yield
        self._waited_s += time.monotonic() - started

    def take_waited_s(self) -> float:
        """The seconds for which training waited for commits since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    async def close(self) -> None:
        """Abandon the commit in the background: the next learner trains that step again."""
        await cancel_and_wait(*(task for task in (self._following, self._commit) if task and not task.done()))

    async def take_snapshot(self) -> Snapshot:
        """Copy the policy. All ranks take part, at rank 0's command."""
        await self._worker.send(Command(do="snapshot"))
        snapshot = await self._worker.snapshot()
        assert snapshot is not None, "rank 0 keeps the copy"
        self.snapshot = snapshot
        return snapshot

    async def publish(self, version: int) -> float:
        """Send the last snapshot to the fleet as `version`. Returns the seconds until every replica held it."""
        what = f"the fleet to hold policy version {version}"
        with self._context.waits.on("weight-sync", what, self._patience_s):
            seconds = await self._publisher.publish(self.snapshot.numbered(version))
        POLICY_VERSION.labels(run=self._context.record.id, service="learner").set(version)
        return seconds

    @property
    def _patience_s(self) -> float:
        return 3 * self._context.record.recipe.weights.timeout_s

    async def commit_start(self, step: int) -> int:
        """Commit the last snapshot as the policy of `step`, without training. Returns its version."""
        version = await self._announce(step, await held_version(self._context.redis, self._context.keys.run))
        await self.history.commit_policy(version, step, self.snapshot.digest)
        self.policy = self.latest = CommittedPolicy(version=version, step=step, weights=self.snapshot.digest)
        return version

    async def _announce(self, step: int, held: int = -1) -> int:
        """The version under which to publish the last snapshot. `held`: the newest that a replica holds."""
        max_staleness = self._context.record.recipe.limits.max_staleness
        return await self.history.announce(step, self.snapshot.digest, max_staleness, held)

    async def start_commit(self, trained: StepRecord, entry: str, after: AfterCommit) -> None:
        """Copy the policy; then, in the background, publish it, commit the step of the batch of `entry`, do `after`.

        Only once the previous step is settled. The commit is one Redis call: it marks the groups as trained, makes the
        version current and frees the slots.
        """
        snapshot = await self.take_snapshot()
        version = await self._announce(trained.step)
        self.latest = CommittedPolicy(version=version, step=trained.step, weights=snapshot.digest)
        record = trained.model_copy(update={"version": version, "weights": snapshot.digest})
        self._commit = asyncio.create_task(
            self._publish_and_commit(record, entry), name=f"commit of step {record.step}"
        )
        self._following = asyncio.create_task(_follow(self._commit, after), name=f"after the commit of {record.step}")

    async def _publish_and_commit(self, record: StepRecord, entry: str) -> StepRecord:
        committed = self.latest
        seconds = await self.publish(record.version)
        record = record.model_copy(update={"metrics": record.metrics | {"publish_seconds": seconds}})
        await self.history.commit_step(record, entry)
        self.policy = committed
        self.record = record
        return record


async def _follow(commit: asyncio.Task[StepRecord], after: AfterCommit) -> None:
    await after(await commit)
