"""Owns weight publication: it brings every live replica to the current policy version, including those that join later.

Must not read the policy in training. It sends the last snapshot, so it also works while a batch is trained.
Reads the heartbeats and the stream of acks; writes the manifest and the stream of plans.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from learner.weight_sync.broadcast import BroadcastGroup, Rendezvous, send_snapshot
from learner.weight_sync.snapshot import Snapshot
from services.contracts import EPOCH_SHIFT, ProcessInfo, WeightAck, WeightManifest, WeightPlan
from services.metrics import SYNC_FAILURES, SYNC_SECONDS
from services.settings import WeightsSettings
from services.streams.connection.client import Redis
from services.streams.delivery.consumer import tail_messages
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog
from services.streams.state.heartbeat import live_processes
from services.streams.state.policy_history import History
from services.waits import cancel_and_wait

log = logging.getLogger(__name__)

R = TypeVar("R")

POLL_S = 0.1
LONGEST_PAUSE_S = 10.0
RECEIVING_STATES = frozenset({"joining", "ready"})


class BroadcastFailedError(RuntimeError):
    """One broadcast failed. The next round retries it with the remaining replicas."""


@dataclass
class _Broadcast:
    """One plan in progress. `missing`: the replicas that have not applied it yet. `applied`: ends when all have."""

    plan: WeightPlan
    missing: set[str]
    applied: asyncio.Task[None]

    def check(self, done: asyncio.Future[Any], what: str) -> None:
        """Raise BroadcastFailedError if `done` has failed; the error itself if Redis could not be read."""
        error = done.exception()
        if error is None:
            return
        if done is self.applied and not isinstance(error, BroadcastFailedError):
            raise error
        raise BroadcastFailedError(f"{what}: {error}") from error


@dataclass
class _Held:
    """A group whose last broadcast succeeded. It is used again for the next one to the same members."""

    generation: int
    members: dict[str, int]
    group: BroadcastGroup


def in_thread(work: Callable[[], R]) -> asyncio.Future[R]:
    """Run blocking `work` in a thread of its own. It may be abandoned: its own deadline ends it."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the awaiting code raises it
            future.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    wrapped = asyncio.wrap_future(future)
    # If the future was abandoned, the code that abandoned it has already reported a failure.
    wrapped.add_done_callback(lambda done: done.cancelled() or done.exception())
    return wrapped


class Publisher:
    """The learner's side of the weight protocol, on rank 0. Generations increase with the epoch of `history`.

    `device`: the one from which NCCL sends.
    """

    def __init__(
        self,
        redis: Redis,
        keys: RunKeys,
        event_log: EventLog,
        settings: WeightsSettings,
        host: str,
        history: History,
        device: torch.device | None = None,
    ) -> None:
        self._history = history
        self._redis = redis
        self._keys = keys
        self._event_log = event_log
        self._settings = settings
        self._host = host
        self._device = device
        self._generation = history.fence.epoch << EPOCH_SHIFT
        self._acks_read = "0-0"
        self._current: Snapshot | None = None
        self._held: _Held | None = None
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self, manifest: WeightManifest) -> None:
        """Store the manifest, serve the rendezvous and start the reconcile loop."""
        await self._history.publish_manifest(manifest)
        self._rendezvous = Rendezvous(self._host, self._settings.backend, self._settings.timeout_s, self._device)
        self._task = asyncio.create_task(self._reconcile())

    async def publish(self, snapshot: Snapshot) -> float:
        """Make `snapshot` the current version and wait until every live replica holds it, for at most two timeouts.

        Returns the seconds it took. Replicas that do not hold it by then are named in an event and served in the
        background. Raises the error that stopped the reconcile loop.
        """
        started = time.monotonic()
        self._current = snapshot
        self._settled.clear()
        self._changed.set()
        assert self._task is not None, "open() must be called first"
        settled = asyncio.create_task(self._settled.wait())
        await asyncio.wait({settled, self._task}, timeout=2 * self._settings.timeout_s, return_when="FIRST_COMPLETED")
        settled.cancel()
        if self._task.done():
            self._task.result()
        if not self._settled.is_set():
            outdated = ", ".join(replica.id for replica in await self._outdated(snapshot.version))
            await self._event_log.write("weights-late", f"replicas without version {snapshot.version}: {outdated}")
        seconds = time.monotonic() - started
        SYNC_SECONDS.labels(run=self._keys.run, phase="publish").observe(seconds)
        return seconds

    def check(self) -> None:
        """Raise the error that stopped the reconcile loop, if any. Call it between publications."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def close(self) -> None:
        """Stop the reconcile loop and drop the group."""
        if self._task:
            await cancel_and_wait(self._task)
        self._drop_group()

    async def _reconcile(self) -> None:
        failures = 0
        while True:
            snapshot = self._current
            if snapshot is not None:
                outdated = await self._outdated(snapshot.version)
                if not outdated and snapshot is self._current:
                    self._settled.set()
                elif outdated:
                    failures = 0 if await self._attempt(snapshot, outdated) else failures + 1
                    await asyncio.sleep(min(LONGEST_PAUSE_S, 0.5 * failures))
                    continue
            await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        try:
            async with asyncio.timeout(POLL_S):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()

    async def _receivers(self) -> list[ProcessInfo]:
        live = await live_processes(self._redis, self._keys.run)
        return [process for process in live if process.service == "rollout" and process.state in RECEIVING_STATES]

    async def _outdated(self, version: int) -> list[ProcessInfo]:
        """The receivers that do not hold `version`. Raises VersionLostError if one holds what was never announced."""

        def holds(replica: ProcessInfo) -> bool:
            return replica.state == "ready" and replica.version is not None and replica.version >= version

        receivers = await self._receivers()
        newest = max((replica.version for replica in receivers if replica.version is not None), default=-1)
        if newest > version:  # a previous learner may have announced it
            await self._history.check_held(newest)
        return [replica for replica in receivers if not holds(replica)]

    async def _attempt(self, snapshot: Snapshot, outdated: list[ProcessInfo]) -> bool:
        """Broadcast to the `outdated` replicas. Returns whether all of them applied it."""
        members, world = _ranks(outdated)
        held = self._held if self._held and self._held.members == members else None
        if held is None:
            self._drop_group()
            self._generation += 1
        self._held = None
        plan = WeightPlan(
            generation=self._generation,
            version=snapshot.version,
            host=self._host,
            port=self._rendezvous.port,
            world=world,
            members=members,
            timeout_s=self._settings.timeout_s,
        )
        try:
            group = await self._carry_out(plan, snapshot, held.group if held else None)
        except BroadcastFailedError as error:
            text = f"version {plan.version} to {', '.join(members)} (group {plan.generation}) failed: {error}"
            SYNC_FAILURES.labels(run=self._keys.run, service="learner").inc()
            await self._event_log.write("weight-sync-failed", text)
            return False
        self._held = _Held(plan.generation, members, group)
        return True

    async def _carry_out(self, plan: WeightPlan, snapshot: Snapshot, group: BroadcastGroup | None) -> BroadcastGroup:
        await self._history.publish_plan(plan)
        missing = set(plan.members)
        applied = asyncio.create_task(self._all_applied(plan, missing), name=f"acks of version {plan.version}")
        broadcast = _Broadcast(plan, missing, applied)
        formed = group or self._rendezvous.group(plan.generation, plan.world)
        try:
            if group is None:
                started = time.monotonic()
                await self._watched(in_thread(formed.form), broadcast, "forming the group")
                self._observe("form", time.monotonic() - started)
            sending = in_thread(lambda: send_snapshot(formed, snapshot))
            self._observe("broadcast", await self._watched(sending, broadcast, "the broadcast"))
            await self._watched(applied, broadcast, "applying the weights")
        except BaseException:
            formed.abort()
            raise
        finally:
            if not applied.done():
                await cancel_and_wait(applied)
        return formed

    async def _watched(self, work: asyncio.Future[R], broadcast: _Broadcast, what: str) -> R:
        """Wait for the result of `work`, which is noticed at once.

        Raises BroadcastFailedError if a member that has not applied the plan leaves, reports a failure, or exceeds the
        deadline.
        """
        ends = time.monotonic() + broadcast.plan.timeout_s
        while not work.done():
            if broadcast.applied.done():
                broadcast.check(broadcast.applied, what)
            if (remaining_s := ends - time.monotonic()) <= 0:
                names = ", ".join(sorted(broadcast.missing))
                limit = f"{broadcast.plan.timeout_s:g} s"
                raise BroadcastFailedError(f"{what} took longer than {limit}; no ack from {names}")
            watched = {each for each in (work, broadcast.applied) if not each.done()}
            await asyncio.wait(watched, timeout=remaining_s, return_when=asyncio.FIRST_COMPLETED)
        broadcast.check(work, what)
        return work.result()

    async def _all_applied(self, plan: WeightPlan, missing: set[str]) -> None:
        """Remove the members that have applied the plan from `missing`, until there are none.

        Raises BroadcastFailedError if one of the others reports a failure, or leaves.
        """
        while missing:
            acks = await tail_messages(
                self._redis, self._keys, self._keys.weight_acks, WeightAck, self._acks_read, block_s=POLL_S
            )
            for entry, ack in acks:
                self._acks_read = entry
                if (ack.generation, ack.version) != (plan.generation, plan.version):
                    continue
                if ack.phase == "failed":
                    raise BroadcastFailedError(f"{ack.member} reports: {ack.detail}")
                missing.discard(ack.member)
            if missing and (gone := missing - {replica.id for replica in await self._receivers()}):
                raise BroadcastFailedError(f"{', '.join(sorted(gone))} left")

    def _observe(self, phase: str, seconds: float) -> None:
        SYNC_SECONDS.labels(run=self._keys.run, phase=phase).observe(seconds)

    def _drop_group(self) -> None:
        if self._held:
            self._held.group.abort()
            self._held = None


def _ranks(replicas: list[ProcessInfo]) -> tuple[dict[str, int], int]:
    """(rank of the first worker of each replica, size of the group). Rank 0 is the learner."""
    members = {}
    world = 1
    for replica in replicas:
        members[replica.id] = world
        world += replica.workers
    return members, world
