"""Owns a running run: whether it is done, paused, or no longer makes progress.

Must not restart processes; `health` does.
"""

from __future__ import annotations

import asyncio
import time

from services.contracts import AFTER, ALONE, Lane, RunState
from services.controller.fleet.accounts import Accounts
from services.controller.fleet.scaling import FleetScaling
from services.controller.health import HealthMonitor, learner_recovery
from services.controller.retry import RunFailedError
from services.controller.run_context import PERIOD_S, PROGRESS_WAIT, RunContext
from services.controller.tuning.tuner import Tuner
from services.streams.state.events import EvaluationFollower
from services.streams.state.group_counts import group_counts
from services.streams.state.heartbeat import live_processes
from services.streams.state.policy_history import read_policy
from services.streams.state.run_record import RunRecord


class RunMonitor:
    """Follows one run from running until it has succeeded or failed."""

    def __init__(self, context: RunContext, fleet: FleetScaling, health: HealthMonitor, accounts: Accounts) -> None:
        self._context = context
        self._fleet = fleet
        self._health = health
        self._accounts = accounts
        self._evaluations = EvaluationFollower(context.redis, context.keys)
        self._tuner = Tuner(context)

    async def follow(self) -> str:
        """Follow the run until it is done; the reason of its success. Raises RunFailedError when it stalls."""
        context = self._context
        stall_s = (await context.current()).recipe.limits.stall_timeout_s
        seen, since = await self._progress(), time.monotonic()
        recovered: set[str] = set()
        while True:
            record = await context.current()
            await self._evaluations.look()
            if reason := self._done(record):
                return reason
            processes = await live_processes(context.redis, context.run)
            await self._accounts.look(record, processes)
            restarting = await self._health.check(record, processes)
            await self._fleet.scale(record, processes)
            await self._fleet.show(record, processes)
            paused = await self._pause_or_resume(record)
            await self._tuner.look(record, steady=self._fleet.complete(processes) and not paused and not restarting)
            now, news = await self._progress(), learner_recovery(processes)
            if now != seen or paused or restarting or news - recovered:
                recovered = news if now != seen else recovered | news
                seen, since = now, time.monotonic()
                context.waits.done(PROGRESS_WAIT)
            context.waits.pending(PROGRESS_WAIT, f"any progress since {now}", stall_s)
            if paused:
                context.waits.done(PROGRESS_WAIT)
            elif time.monotonic() - since > stall_s:
                text = f"no progress for {stall_s:g} s (limits.stall_timeout_s) since {now}"
                raise RunFailedError(text + await self._health.background())
            await asyncio.sleep(PERIOD_S)

    async def _pause_or_resume(self, record: RunRecord) -> bool:
        """Pause or resume the run, as requested or because it starves; whether it is paused."""
        context = self._context
        starved = await context.redis.get(context.keys.starved)
        wanted = "paused on request" if record.pause_requested else starved.decode() if starved else None
        if wanted and record.state is RunState.RUNNING:
            await context.change(RunState.PAUSED, wanted)
            await context.event_log.write("paused", f"{wanted}; resume it with `penstock resume {context.run}`")
        elif wanted is None and record.state is RunState.PAUSED:
            await context.change(RunState.RUNNING, "resumed")
            await context.event_log.write("resumed", "the run continues")
        return wanted is not None

    def _done(self, record: RunRecord) -> str | None:
        """Why the run has succeeded, once every set has its last evaluation and there is an export; else None."""
        trains = record.recipe.limits.rollout_steps > 0
        last = AFTER if trains else ALONE
        if not all((name, last) in self._evaluations.done for name in record.recipe.evaluated_sets):
            return None
        if not trains:
            return "evaluated; limits.rollout_steps = 0 trains nothing"
        return "all rollout steps trained, evaluated and exported" if record.export_path is not None else None

    async def _progress(self) -> str:
        redis, keys = self._context.redis, self._context.keys
        counts = await group_counts(redis, keys)
        # An evaluation of a large set may take longer than any step.
        evaluating = await group_counts(redis, keys, Lane.EVALUATION)
        policy = await read_policy(redis, keys)
        reached = f"rollout step {policy.step}, policy version {policy.version}" if policy else "no policy version"
        return (
            f"{reached}, {self._evaluations.count} evaluations, {evaluating.pending} of {evaluating.dispatched} "
            f"evaluation prompts pending, groups {counts.model_dump()}"
        )
