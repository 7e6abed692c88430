"""Owns a replica's side of weight syncs: read plans, stage and apply weights, send acks.

Must not generate or touch tensors; the workers do (rollout.processes.vllm_worker).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from rollout.engine import PoisonedError, RolloutEngine
from rollout.staging import StagingProgress
from services.contracts import EPOCH_SHIFT, UNOWNED, WeightAck, WeightPlan, parse_manifest
from services.metrics import POLICY_VERSION, SYNC_FAILURES, SYNC_SECONDS
from services.process.hosting import Context
from services.settings import Recipe
from services.streams.delivery.consumer import discard_entry, rejection, tail_messages
from services.streams.retention import WEIGHT_MESSAGES_KEPT
from services.streams.state.events import append_message
from services.streams.state.ownership import newest_owner

log = logging.getLogger(__name__)

POLL_S = 0.05
"""How often a newer plan is looked for."""
LOOK_S = 0.5
"""How often the workers are asked for their progress; each says itself when its staging has ended."""
PLANS_WAIT_S = 0.5
FAILURES_ALLOWED = 5


class PlanFailedError(RuntimeError):
    """A plan could not be followed; the weights in use are intact and stay."""


@dataclass(frozen=True)
class SyncTimes:
    """How long a plan's phases took, in seconds: staging beside generation, and the pause of generation."""

    staging_s: float
    pause_s: float


class EndedStagings:
    """What a replica's workers report on a Unix socket: `ended` is set when a staging has ended.

    An engine answers questions only between two decoding steps, so that to ask often would delay both.
    """

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        # In Linux' abstract namespace: no file remains if this process is killed.
        self.address = f"\0penstock-staging-{uuid.uuid4().hex}"

    @classmethod
    @contextmanager
    def listening(cls) -> Iterator[EndedStagings]:
        """Listen during the body, in the running event loop."""
        found, loop = cls(), asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
            listener.setblocking(False)
            listener.bind(found.address)
            # Not a datagram endpoint of asyncio: uvloop, on which Ray Serve runs replicas, has none for Unix sockets.
            loop.add_reader(listener.fileno(), found._receive, listener)
            try:
                yield found
            finally:
                loop.remove_reader(listener.fileno())

    def _receive(self, listener: socket.socket) -> None:
        """One worker's staging has ended."""
        with suppress(BlockingIOError):
            listener.recv(64)
        self.ended.set()


class WeightFollower:
    """Follows the run's weight plans. `version`: the published version that the engine holds; None before the first.

    It follows the newest plan that names this replica, and interrupts the staging of an older plan for it.
    """

    def __init__(self, context: Context, engine: RolloutEngine) -> None:
        self._context = context
        self._engine = engine
        self._recipe: Recipe = context.record.recipe
        self._member = context.heartbeat.info.id
        self._read_to = "0-0"
        self._next: WeightPlan | None = None
        self._generation = 0
        self._learner = UNOWNED
        self._stagings: EndedStagings
        self._failures = 0
        self._closing = False
        self.ready = asyncio.Event()
        self.version: int | None = None

    def close(self) -> None:
        """Start no further plan; run() returns when the current plan is done."""
        self._closing = True

    async def run(self) -> None:
        """Follow plans until `close`.

        Raises PoisonedError when weights were applied in part, and PlanFailedError after FAILURES_ALLOWED failed plans
        in a row; the host then replaces this replica.
        """
        with EndedStagings.listening() as self._stagings:
            while not self._closing:
                await self._read_plans(PLANS_WAIT_S)
                if self._next is None:
                    continue
                plan, self._next = self._next, None
                await self._follow(plan)

    async def serve_folder(self) -> None:
        """Serve the weights in the model's folder as policy version 0: a run that only evaluates has no learner."""
        await self._engine.declare(0)
        await self._set_version(0)
        self.ready.set()

    async def _set_version(self, version: int) -> None:
        self.version = version
        state = self._context.heartbeat.info.state
        await self._context.heartbeat.update(state="ready" if state in ("joining", "ready") else state, version=version)
        POLICY_VERSION.labels(self._context.record.id, "rollout").set(version)

    async def _read_plans(self, wait_s: float) -> None:
        """Read new plans; keep the newest that names this replica."""
        redis, keys = self._context.redis, self._context.keys
        for entry, plan in await tail_messages(redis, keys, keys.weight_plans, WeightPlan, self._read_to, 1000, wait_s):
            self._read_to = entry
            learner = await newest_owner(redis, keys, "learner")
            if plan.generation >> EPOCH_SHIFT > learner.epoch:
                # Its generation would make this replica ignore every valid plan.
                letter = rejection(keys.weight_plans, entry, plan, f"no learner formed group {plan.generation}")
                await discard_entry(redis, keys, keys.weight_plans, entry, letter)
                continue
            # Generations grow with the learner's epoch: an older generation is a previous learner's. A failover that
            # lost an epoch gives it to another learner, whose generations start again.
            if learner != self._learner:
                self._learner, self._generation = learner, 0
            if plan.generation >= self._generation and self._member in plan.members:
                self._next, self._generation = plan, plan.generation

    async def _follow(self, plan: WeightPlan) -> None:
        if self.version is not None and plan.version < self.version:
            await self._ack(plan, "failed", f"version {plan.version} is older than the version in use, {self.version}")
            return
        try:
            times = await self._receive(plan)
        except PlanFailedError as error:
            log.warning("receiving version %d (generation %d) failed: %s", plan.version, plan.generation, error)
            await self._ack(plan, "failed", str(error))
            self._failures += 1
            if self._failures >= FAILURES_ALLOWED:
                raise
            return
        except PoisonedError as error:
            await self._context.heartbeat.update(state="poisoned")
            await self._ack(plan, "failed", str(error))
            raise
        self._failures = 0
        await self._set_version(plan.version)
        await self._ack(plan, "applied", "", times)
        self.ready.set()
        self._measure(times)
        log.info(
            "version %d: received in %.2f s while generating, generation paused for %.2f s",
            plan.version,
            times.staging_s,
            times.pause_s,
        )

    def _measure(self, times: SyncTimes) -> None:
        run = self._context.record.id
        SYNC_SECONDS.labels(run, "staging").observe(times.staging_s)
        SYNC_SECONDS.labels(run, "pause").observe(times.pause_s)

    async def _receive(self, plan: WeightPlan) -> SyncTimes:
        """Stage the plan's version and apply it. Raises PlanFailedError, PoisonedError.

        A version that is in use already is received too, because the broadcast needs every member, and then dropped.
        """
        manifest = await self._context.redis.get(self._context.keys.manifest)
        if manifest is None:
            raise PlanFailedError(f"no manifest is stored under {self._context.keys.manifest}")
        staging_s = await self._stage(plan, manifest.decode())
        if plan.version == self.version:
            await self._engine.call_workers("abandon_staging", deadline_s=plan.timeout_s)
            return SyncTimes(staging_s, 0.0)
        started = time.monotonic()
        await self._engine.apply_staged(plan.version, plan.timeout_s)
        return SyncTimes(staging_s, time.monotonic() - started)

    async def _stage(self, plan: WeightPlan, manifest: str) -> float:
        """Receive into the workers' staging buffers; returns the seconds it took. Raises PlanFailedError."""
        parts = len(parse_manifest(manifest).buckets) + 2
        try:
            # Each worker limits each part (group, buckets, checksums) to plan.timeout_s; this limits the workers.
            async with asyncio.timeout(plan.timeout_s * parts):
                await self._engine.call_workers(
                    "stage_weights",
                    plan.model_dump_json(),
                    manifest,
                    plan.members[self._member],
                    self._recipe.weights.backend,
                    self._recipe.weights.staging == "host",
                    self._stagings.address,
                    deadline_s=plan.timeout_s,
                )
                return await self._wait_staged(plan)
        except TimeoutError:
            await self._engine.call_workers("abandon_staging", deadline_s=plan.timeout_s)
            raise PlanFailedError(f"the workers did not finish within {plan.timeout_s * parts:g} s") from None

    async def _wait_staged(self, plan: WeightPlan) -> float:
        ended = self._stagings.ended
        while True:
            ended.clear()
            answers = await self._engine.call_workers("staging_progress", deadline_s=plan.timeout_s)
            workers = [StagingProgress(**answer) for answer in answers]
            if broken := [worker.detail for worker in workers if worker.phase == "failed"]:
                raise PlanFailedError("; ".join(broken))
            if all(worker.phase == "staged" for worker in workers):
                return max(worker.seconds for worker in workers)
            looks_at = time.monotonic() + LOOK_S
            while not ended.is_set() and time.monotonic() < looks_at:
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), POLL_S)
                await self._read_plans(0.0)
                if self._next is not None:
                    # Starting the staging of the newer plan abandons this one.
                    raise PlanFailedError(f"superseded by generation {self._next.generation}")

    async def _ack(
        self, plan: WeightPlan, phase: Literal["applied", "failed"], detail: str, times: SyncTimes | None = None
    ) -> None:
        if phase == "failed":
            SYNC_FAILURES.labels(self._context.record.id, "rollout").inc()
        ack = WeightAck(
            member=self._member,
            generation=plan.generation,
            version=plan.version,
            phase=phase,
            detail=detail,
            staging_s=times.staging_s if times else 0.0,
            pause_s=times.pause_s if times else 0.0,
        )
        keys = self._context.keys
        await append_message(self._context.redis, keys, keys.weight_acks, ack, WEIGHT_MESSAGES_KEPT)
