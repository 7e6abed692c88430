"""Owns a replica's side of weight syncs: plans in, staging, swapping the weights, acks out.

Must not generate. Everything that touches tensors happens in the workers (rollout.vllm_worker).
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Literal

from rollout.engine import PoisonedError, RolloutEngine
from rollout.staging import Progress
from services.contracts import EPOCH_SHIFT, WeightAck, WeightManifest, WeightPlan
from services.metrics import POLICY_VERSION, SYNC_FAILURES, SYNC_SECONDS
from services.process import Context
from services.settings import Recipe
from services.streams.delivery.consumer import reject_entry, tail_messages
from services.streams.retention import WEIGHT_MESSAGES_KEPT
from services.streams.state.events import append_message
from services.streams.state.ownership import owner_epoch

log = logging.getLogger(__name__)

POLL_S = 0.05
PLANS_WAIT_S = 0.5
FAILURES_ALLOWED = 5


class SyncError(RuntimeError):
    """A plan that could not be followed; the weights in use are whole and stay."""


@dataclass(frozen=True)
class Followed:
    """How a plan went; times in seconds."""

    staging_s: float
    pause_s: float


class WeightFollower:
    """Follows the run's weight plans. `version` is the published version the engine holds, None before the first.

    Only the newest plan that names this replica matters: it interrupts the staging of an older one.
    """

    def __init__(self, context: Context, engine: RolloutEngine) -> None:
        self._context = context
        self._engine = engine
        self._recipe: Recipe = context.record.recipe
        self._member = context.heartbeat.info.id
        self._read_to = "0-0"
        self._next: WeightPlan | None = None
        self._generation = 0
        self._failures = 0
        self._closing = False
        self.ready = asyncio.Event()
        self.version: int | None = None

    def close(self) -> None:
        """Take no further plan; run() returns when the present one is done."""
        self._closing = True

    async def run(self) -> None:
        """Follow plans until `close`.

        Raises PoisonedError when weights were applied in part, SyncError after FAILURES_ALLOWED plans in a row that
        were not received: the host then replaces this replica.
        """
        while not self._closing:
            await self._look(PLANS_WAIT_S)
            if self._next is None:
                continue
            plan, self._next = self._next, None
            await self._follow(plan)

    async def serve_folder(self) -> None:
        """Serve the weights of the model's folder as policy version 0: a run that only evaluates has no learner."""
        await self._engine.declare(0)
        await self._hold(0)
        self.ready.set()

    async def _hold(self, version: int) -> None:
        self.version = version
        state = self._context.heartbeat.info.state
        await self._context.heartbeat.update(state="ready" if state in ("joining", "ready") else state, version=version)
        POLICY_VERSION.labels(self._context.record.id, "rollout").set(version)

    async def _look(self, wait_s: float) -> None:
        """Read new plans; keep the newest that names this replica."""
        redis, keys = self._context.redis, self._context.keys
        for entry, plan in await tail_messages(redis, keys, keys.weight_plans, WeightPlan, self._read_to, 1000, wait_s):
            self._read_to = entry
            if plan.generation >> EPOCH_SHIFT > await owner_epoch(redis, keys, "learner"):
                # Heeded, it would make us deaf to every true one.
                await reject_entry(
                    redis, keys, keys.weight_plans, entry, plan, f"no learner formed group {plan.generation}"
                )
                continue
            # Generations rise with the learner's epoch: an older one is a former learner's.
            if plan.generation >= self._generation and self._member in plan.members:
                self._next, self._generation = plan, plan.generation

    async def _follow(self, plan: WeightPlan) -> None:
        if self.version is not None and plan.version < self.version:
            await self._ack(plan, "failed", f"version {self.version} is held; {plan.version} is older")
            return
        try:
            followed = await self._receive(plan)
        except SyncError as error:
            log.warning("version %d (generation %d) was not received: %s", plan.version, plan.generation, error)
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
        await self._hold(plan.version)
        await self._ack(plan, "applied", "", followed)
        self.ready.set()
        self._measure(followed)
        log.info(
            "version %d: received in %.2f s beside generation, generation paused for %.2f s",
            plan.version, followed.staging_s, followed.pause_s,
        )  # fmt: skip

    def _measure(self, followed: Followed) -> None:
        run = self._context.record.id
        SYNC_SECONDS.labels(run, "staging").observe(followed.staging_s)
        SYNC_SECONDS.labels(run, "pause").observe(followed.pause_s)

    async def _receive(self, plan: WeightPlan) -> Followed:
        """Stage the plan's version and swap it in. A version that is held already is received for the sake of the
        group's other members, and dropped. Raises SyncError, PoisonedError."""
        manifest = await self._context.redis.get(self._context.keys.manifest)
        if manifest is None:
            raise SyncError(f"no manifest under {self._context.keys.manifest}")
        staging_s = await self._stage(plan, manifest.decode())
        if plan.version == self.version:
            await self._engine.call_workers("abandon_staging", deadline_s=plan.timeout_s)
            return Followed(staging_s, 0.0)
        began = time.monotonic()
        await self._engine.apply_staged(plan.version, plan.timeout_s)
        return Followed(staging_s, time.monotonic() - began)

    async def _stage(self, plan: WeightPlan, manifest: str) -> float:
        """Receive into the workers' staging buffers; seconds. Raises SyncError."""
        parts = len(WeightManifest.model_validate_json(manifest).buckets) + 2
        try:
            # The workers bound each part (group, buckets, checksums) by plan.timeout_s; this bounds the workers.
            async with asyncio.timeout(plan.timeout_s * parts):
                await self._engine.call_workers(
                    "stage_weights", plan.model_dump_json(), manifest, plan.members[self._member],
                    self._recipe.weights.backend, self._recipe.weights.staging == "host", deadline_s=plan.timeout_s,
                )  # fmt: skip
                return await self._staged(plan)
        except TimeoutError:
            await self._engine.call_workers("abandon_staging", deadline_s=plan.timeout_s)
            raise SyncError(f"the workers did not finish within {plan.timeout_s * parts:g} s") from None

    async def _staged(self, plan: WeightPlan) -> float:
        while True:
            answers = await self._engine.call_workers("staging_progress", deadline_s=plan.timeout_s)
            workers = [Progress(**answer) for answer in answers]
            if broken := [worker.detail for worker in workers if worker.phase == "failed"]:
                raise SyncError("; ".join(broken))
            if all(worker.phase == "staged" for worker in workers):
                return max(worker.seconds for worker in workers)
            await asyncio.sleep(POLL_S)
            await self._look(0.0)
            if self._next is not None:
                # Starting the newer plan's staging abandons this one's.
                raise SyncError(f"superseded by generation {self._next.generation}")

    async def _ack(
        self, plan: WeightPlan, phase: Literal["applied", "failed"], detail: str, followed: Followed | None = None
    ) -> None:
        if phase == "failed":
            SYNC_FAILURES.labels(self._context.record.id, "rollout").inc()
        ack = WeightAck(
            member=self._member, generation=plan.generation, version=plan.version, phase=phase, detail=detail,
            staging_s=followed.staging_s if followed else 0.0, pause_s=followed.pause_s if followed else 0.0,
        )  # fmt: skip
        await append_message(self._context.redis, self._context.keys.weight_acks, ack, WEIGHT_MESSAGES_KEPT)
