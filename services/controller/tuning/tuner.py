"""Owns tuning of one run: it reads new step records, asks the policy, and makes its moves as edits of the record.

Must not decide; the policy does. A decision is an event, a metric and, unless it is only told, an edit by the
controller.

Only new step records are read. A controller that was restarted starts with the newest one, and measures again.
"""

from __future__ import annotations

import logging
from itertools import product

from services.contracts import StepRecord
from services.controller.run_context import RunContext
from services.controller.tuning.knobs import Bounds, Knob, Rules, Values
from services.controller.tuning.moves import Move
from services.controller.tuning.policy import Policy
from services.controller.tuning.signals import signals_of
from services.metrics import (
    TUNING_DECISIONS,
    TUNING_IDLE,
    TUNING_IDLE_TARGET,
    TUNING_STALENESS,
    TUNING_STALENESS_TARGET,
)
from services.settings import ClusterLimitsError, Recipe, RecipeError, load_cluster_limits
from services.streams.delivery.consumer import newest_messages
from services.streams.runs.edits import check_edit, edit_run
from services.streams.state.group_counts import group_counts
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import OWNER, StaleRevisionError

log = logging.getLogger(__name__)


class Tuner:
    """Tunes one run while its recipe says so."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._policy: Policy | None = None
        self._mode = "off"
        self._after = "0-0"
        self._before: StepRecord | None = None
        self._pending = self._in_flight = 0
        self._steady = True
        self._reported = ""

    async def look(self, record: RunRecord, *, steady: bool) -> None:
        """Take note of new rollout steps; at most one move. `steady`: neither paused nor without a replica now."""
        mode = record.recipe.tuning.mode
        if mode != self._mode:  # what was only told did not happen
            self._mode = mode
            self._stop()
        if mode == "off":
            return
        counts = await group_counts(self._context.redis, self._context.keys)
        self._pending = counts.pending
        self._in_flight = max(self._in_flight, counts.pending)
        self._steady = self._steady and steady
        if self._policy is None:
            await self._start(record.recipe)
            return
        for entry, step in await self._context.event_log.steps(self._after):
            self._after = entry
            if await self._moves(self._policy, record, step):
                return  # the next look has the record after it

    async def _start(self, recipe: Recipe) -> None:
        keys = self._context.keys
        found = await newest_messages(self._context.redis, keys, keys.steps, StepRecord, count=1)
        self._after, self._before = found[0] if found else ("0-0", None)
        self._policy = Policy(self._rules(recipe))
        self._start_measuring()
        for knob, direction in product(Knob, ("up", "down")):
            TUNING_DECISIONS.labels(self._context.run, knob.attribute, direction, recipe.tuning.mode)

    def _stop(self) -> None:
        self._policy = None
        for gauge in (TUNING_IDLE, TUNING_IDLE_TARGET, TUNING_STALENESS, TUNING_STALENESS_TARGET):
            gauge.remove_by_labels({"run": self._context.run})

    def _start_measuring(self) -> None:
        self._in_flight, self._steady = self._pending, True

    async def _moves(self, policy: Policy, record: RunRecord, step: StepRecord) -> bool:
        """Whether the rollout step led to a move."""
        signals = signals_of(step, self._before, self._in_flight, self._steady) if self._before else None
        self._before = step
        self._start_measuring()
        if signals is None:
            policy.interrupted()
            return False
        recipe = record.recipe
        policy.follow(self._rules(recipe))
        limits = recipe.limits
        values = Values(limits.max_inflight_groups, limits.max_staleness, record.rollout_replicas)
        move = policy.observe(signals, values)
        self._show(policy, recipe)
        if move is None:
            return False
        if recipe.tuning.mode == "report":
            policy.reported(move, step.step)
            await self._tell(move, "report", f"would move {move.text}")
            return True
        return await self._edit(policy, record, move, step.step)

    async def _edit(self, policy: Policy, record: RunRecord, move: Move, step: int) -> bool:
        """Make the move; False if someone else changed the run since `record` was read, or the recipe forbids it."""
        try:
            await edit_run(self._context.redis, record, check_edit(record, {move.knob.value: move.after}), OWNER)
        except StaleRevisionError:
            log.info("run %s was changed at this moment; tuning skips %s", self._context.run, move.text)
            return False
        except RecipeError as error:
            log.warning("run %s: tuning cannot move %s: %s", self._context.run, move.text, error)
            policy.reported(move, step)
            return False
        policy.taken(move, step)
        await self._tell(move, "on", f"{move.text} (after rollout step {step})")
        return True

    async def _tell(self, move: Move, mode: str, text: str) -> None:
        TUNING_DECISIONS.labels(self._context.run, move.knob.attribute, "up" if move.up else "down", mode).inc()
        await self._context.event_log.write("tuning", text)

    def _show(self, policy: Policy, recipe: Recipe) -> None:
        run = self._context.run
        TUNING_IDLE_TARGET.labels(run).set(recipe.tuning.idle_share)
        TUNING_STALENESS_TARGET.labels(run).set(recipe.tuning.staleness)
        if window := policy.window:
            TUNING_IDLE.labels(run).set(window.idle_share)
            TUNING_STALENESS.labels(run).set(window.staleness)

    def _rules(self, recipe: Recipe) -> Rules:
        tuning, sampling = recipe.tuning, recipe.algorithm.dynamic_sampling
        bounds = {
            Knob.INFLIGHT: tuning.inflight_groups,
            Knob.STALENESS: tuning.max_staleness,
            Knob.REPLICAS: self._replicas(recipe),
        }
        batches = sampling.generation_batch_factor if sampling.refill == "generation_batches" else 0
        return Rules(
            idle_share=tuning.idle_share,
            staleness=tuning.staleness,
            cool_down=tuning.cool_down_steps,
            groups_per_step=recipe.limits.groups_per_step,
            group_size=recipe.algorithm.group_size,
            max_sequences=recipe.rollout.max_sequences,
            bounds={knob: Bounds(*pair) for knob, pair in bounds.items() if pair},
            extra_batches=batches,
        )

    def _replicas(self, recipe: Recipe) -> tuple[int, int] | None:
        """The bounds of the replicas within the cluster's limits as they are now; None if these are unreadable."""
        bounds = recipe.tuning.replicas
        if bounds is None:
            return None
        try:
            limits = load_cluster_limits()
        except ClusterLimitsError as error:
            if (text := str(error)) != self._reported:
                log.warning("%s; tuning leaves the replicas of run %s", text, self._context.run)
                self._reported = text
            return None
        self._reported = ""
        most = limits.most_replicas(recipe) if limits else None
        least, largest = bounds
        return bounds if most is None else (min(least, max(1, most)), min(largest, max(1, most)))
