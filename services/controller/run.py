"""Owns one run from queued to its end: place it, wait for it, follow it, stop it.

Must not start processes itself; it asks the cluster.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections import Counter
from dataclasses import replace
from pathlib import Path

from services.contracts import AFTER, ALONE, Lane, ProcessInfo, RunState
from services.controller.capacity import shortage
from services.controller.cluster import Cluster
from services.controller.health import Recovery
from services.controller.retry import Attempts, RunFailedError
from services.controller.run_metrics import RunFigures
from services.controller.summary import summarise, write_summary
from services.process import advertised_host
from services.settings import ClusterLimitsError, Recipe, load_cluster_limits
from services.storage.errors import StoreAwayError, StoreError
from services.storage.mirror import run_mirror
from services.streams.connection.client import Redis, RedisUnavailableError
from services.streams.connection.functions import FencedError
from services.streams.keys import RunKeys
from services.streams.state.cleanup import sweep
from services.streams.state.events import EventLog
from services.streams.state.group_state import become_owner, group_counts
from services.streams.state.heartbeat import Heartbeat, live_processes
from services.streams.state.runs import OWNER, RunRecord, RunRecords
from services.waits import Waits

log = logging.getLogger(__name__)

PERIOD_S = 0.5
STOP_DEADLINE_S = 12.0
STOPPING_S = 2 * STOP_DEADLINE_S
SERVICES = ("sampler", "verifier", "rollout", "learner")
SCALING_S = 60.0
QUEUED_S = 7 * 24 * 3600.0
"""After a week without room for a run somebody should hear of it."""
FLEET = "fleet"
"""The wait for replicas that a fleet lacks: one that hangs while it starts cannot tell of itself."""
WITHOUT_TRAINING = ("sampler", "verifier", "rollout")


def services_of(recipe: Recipe) -> tuple[str, ...]:
    """The services of a run; one of no rollout steps only evaluates, and learns nothing."""
    return SERVICES if recipe.limits.rollout_steps else WITHOUT_TRAINING


class RunCancelledError(RuntimeError):
    """A person asked for the run's end."""


class ControllerStoppingError(RuntimeError):
    """The controller ends; the run's services stop, its record stays for the next controller."""


class RunKeeper:
    """Carries one run through its life. Repeating `keep` after a crash goes on where the record stands."""

    def __init__(
        self, redis: Redis, records: RunRecords, cluster: Cluster, runs: Path, run: str, stopping: asyncio.Event
    ) -> None:
        self._stopping = stopping
        self._redis = redis
        self._records = records
        self._cluster = cluster
        self._folder = runs / run
        self._run = run
        self._replicas = 0
        self._unusable = ""
        self._epoch = 0
        self._keys = RunKeys(run)
        self._event_log = EventLog(redis, self._keys, OWNER)
        self._figures = RunFigures(run, self._event_log)
        self._waits = Waits()
        self._asking = Attempts(
            self._event_log, self._waits, "look-failed", "the cluster could not be asked for room", "room"
        )
        self._scaling = Attempts(
            self._event_log, self._waits, "scaling-failed", "the rollout fleet could not be scaled", "scaling-again"
        )

    async def keep(self) -> None:
        """Carry the run to its end, and leave nothing of it running.

        Raises RedisUnavailableError: the run goes on, and is taken up again when Redis is back; FencedError: another
        controller keeps it.
        """
        self._epoch = await become_owner(self._redis, self._keys, OWNER)
        info = ProcessInfo(
            id=f"{OWNER}-{uuid.uuid4().hex[:8]}", service=OWNER, run=self._run, host=advertised_host(), pid=os.getpid(),
            metrics="", state="ready", started_at=time.time(),
        )  # fmt: skip
        await self._figures.open((await self._records.get(self._run)).recipe)
        try:
            async with Heartbeat(self._redis, info, self._waits, self._event_log):
                await self._keep()
        finally:
            self._figures.close()

    async def _keep(self) -> None:
        try:
            recovery = Recovery(self._redis, self._cluster, self._event_log, self._waits, await self._place())
            await self._until_running(recovery)
            state, reason = RunState.SUCCEEDED, await self._follow(recovery)
        except RunCancelledError:
            state, reason = RunState.CANCELLED, "cancelled on request"
        except ControllerStoppingError:
            await self._stop()
            return
        except (RedisUnavailableError, FencedError):
            raise
        except Exception as error:
            log.exception("run %s failed", self._run)
            state, reason = RunState.FAILED, str(error) or type(error).__name__
        summary = await summarise(self._redis, await self._records.get(self._run))
        file = await asyncio.to_thread(write_summary, self._folder, summary | {"state": state.value, "reason": reason})
        await self._records.set_summary(self._run, summary, self._epoch)
        try:
            await self._stop()
        except Exception as error:
            log.exception("run %s: its services could not be stopped", self._run)
            reason += f"; stopping its services failed: {error}"
        if state is RunState.SUCCEEDED:
            await sweep(self._redis, self._keys)
        await self._store(file)
        await self._change(state, reason)

    async def _store(self, summary: Path) -> None:
        """The record has it too, so a run that has ended waits for the store once, and holds nothing meanwhile."""
        try:
            await asyncio.to_thread(run_mirror(self._run).put, summary.name, summary)
        except StoreError as error:
            await self._event_log.write("summary-not-stored", str(error))

    async def _stop(self) -> None:
        for over in ("progress", FLEET):
            self._waits.done(over)
        with self._waits.on("stopping", "the run's services to drain and end", STOPPING_S):
            await self._cluster.stop(self._run, STOP_DEADLINE_S)

    async def _change(self, state: RunState, reason: str) -> None:
        await self._records.transition(self._run, state, reason, self._epoch)

    async def _place(self) -> RunRecord:
        record = await self._current()
        if record.state is RunState.QUEUED and record.resumptions:
            await self._stop()  # what its former life may have left running would be taken for the new one's
        told = ""
        while shortage := await self._shortage(record):
            self._waits.pending("placement", shortage, QUEUED_S, idle=True)
            if shortage != told:
                await self._event_log.write("queued", shortage)
                told = shortage
            await asyncio.sleep(PERIOD_S)
            record = await self._current()
        self._waits.done("placement")
        if record.state is RunState.QUEUED:
            await self._change(RunState.STARTING, "placing services")
        if record.model_path is None:
            await self._event_log.write("preparing-model", record.recipe.model.package or str(record.recipe.model.path))
            await self._records.set_paths(self._run, self._epoch, model_path=await self._model(record))
        await self._event_log.write("starting-services", ", ".join(services_of(record.recipe)))
        return await self._start()

    async def _model(self, record: RunRecord) -> str:
        """The model's name for the record; a store that is away is asked again as long as a start may take."""
        deadline = record.recipe.limits.startup_timeout_s
        ends = time.monotonic() + deadline
        with self._waits.on("model", "the model to be made ready", deadline):
            while True:
                try:
                    return await self._cluster.prepare_model(record)
                except StoreAwayError as error:
                    if time.monotonic() > ends:
                        raise
                    log.warning("run %s: %s; asking again", self._run, error)
                await asyncio.sleep(PERIOD_S)
                await self._current()

    async def _shortage(self, record: RunRecord) -> str | None:
        """Why the run cannot be placed now, or None. Raises RunFailedError when the cluster will not say."""
        if self._asking.due:
            async with self._asking:
                try:
                    bounds = load_cluster_limits()
                except ClusterLimitsError as error:
                    # A run that was given room goes on with what it has; another waits until the file is mended.
                    return str(error) if record.state is RunState.QUEUED else None
                if bounds is None:
                    return await self._cluster.shortage(record)
                if record.state is not RunState.QUEUED:
                    return None  # it was given room; should the bounds have shrunk since, its fleet shrinks too
                return shortage(bounds, record, await self._records.all())
        return "the cluster does not say what is free"

    async def _start(self) -> RunRecord:
        """Have the services placed. A run whose services are there already is not given up because of one time-out."""
        starts = Attempts(
            self._event_log, self._waits, "restart-failed", "the run's services could not be found again", "start-again"
        )
        while True:
            record = await self._current()
            self._replicas = self._allowed(record)
            record = replace(record, rollout_replicas=self._replicas)
            with self._waits.on("placing", "services to be placed", record.recipe.limits.startup_timeout_s):
                if record.state is RunState.STARTING:
                    await self._cluster.start(record)
                    return record
                async with starts:
                    await self._cluster.start(record)
            if not starts.owed:
                return record
            while not starts.due:
                await self._current()
                await asyncio.sleep(PERIOD_S)

    async def _until_running(self, recovery: Recovery) -> None:
        recipe = (await self._current()).recipe
        deadline = recipe.limits.startup_timeout_s
        ends = time.monotonic() + deadline
        announced: set[str] = set()
        recovered: set[str] = set()
        while not await self._fleet_holds_weights():
            record = await self._current()
            owed = await recovery.look(record)
            processes = await live_processes(self._redis, self._run)
            await self._figures.show(replace(record, rollout_replicas=self._replicas), processes)
            ready = {p.service for p in processes if p.state == "ready"}
            for service in sorted(ready - announced):
                await self._event_log.write("service-ready", service)
            announced |= ready
            lacking = sorted(set(services_of(recipe)) - ready)
            self._waits.pending("start", f"{', '.join(lacking) or 'a replica'} to be ready", deadline)
            if (news := await self._recovering()) - recovered or owed:
                # A learner that trains archived steps again takes as long as they are many; what the cluster could not
                # do has a bound of its own.
                recovered |= news
                ends = time.monotonic() + deadline
                self._waits.done("start")
            if time.monotonic() > ends:
                missing = ", ".join(lacking)
                raise RunFailedError(f"not ready within {deadline:g} s (limits.startup_timeout_s): {missing}")
            await asyncio.sleep(PERIOD_S)
        self._waits.done("start")
        if (await self._current()).state is RunState.STARTING:
            await self._change(RunState.RUNNING, "the fleet holds a policy version")

    async def _follow(self, recovery: Recovery) -> str:
        """Watch over the run until it is done; why it has succeeded. Raises RunFailedError for want of progress."""
        stall_s = (await self._current()).recipe.limits.stall_timeout_s
        seen, since = await self._progress(), time.monotonic()
        recovered: set[str] = set()
        while True:
            record = await self._current()
            if reason := await self._done(record):
                return reason
            owed = await recovery.look(record)
            await self._scale(self._allowed(record), record.rollout_replicas)
            await self._note_fleet(record)
            paused = await self._pause(record)
            now, news = await self._progress(), await self._recovering()
            if now != seen or paused or owed or news - recovered:
                recovered = news if now != seen else recovered | news
                seen, since = now, time.monotonic()
                self._waits.done("progress")
            self._waits.pending("progress", f"any progress since {now}", stall_s)
            if paused:
                self._waits.done("progress")
            elif time.monotonic() - since > stall_s:
                raise RunFailedError(f"no progress for {stall_s:g} s (limits.stall_timeout_s) since {now}")
            await asyncio.sleep(PERIOD_S)

    async def _pause(self, record: RunRecord) -> bool:
        """Pause the run, or let it go on, as somebody or the sampler asked for; whether it is paused."""
        starved = await self._redis.get(self._keys.starved)
        wanted = "paused on request" if record.pause_requested else starved.decode() if starved else None
        if wanted and record.state is RunState.RUNNING:
            await self._change(RunState.PAUSED, wanted)
            await self._event_log.write("paused", f"{wanted}; `penstock resume {self._run}` takes it on")
        elif wanted is None and record.state is RunState.PAUSED:
            await self._change(RunState.RUNNING, "resumed")
            await self._event_log.write("resumed", "the run goes on")
        return wanted is not None

    def _allowed(self, record: RunRecord) -> int:
        """The number of rollout replicas to run: as wanted, within the cluster's bounds of this moment."""
        try:
            bounds = load_cluster_limits()
        except ClusterLimitsError as error:
            if (told := str(error)) != self._unusable:
                log.warning("%s; the fleet of run %s keeps %d replicas", told, self._run, self._replicas)
                self._unusable = told
            return self._replicas or record.rollout_replicas
        self._unusable = ""
        most = bounds.most_replicas(record.recipe) if bounds else None
        return record.rollout_replicas if most is None else max(1, min(most, record.rollout_replicas))

    async def _scale(self, replicas: int, wanted: int) -> None:
        if replicas != self._replicas:
            bounded = f" ({wanted} are wanted; the cluster's bounds allow no more)" if replicas < wanted else ""
            await self._event_log.write("scaling", f"rollout {self._replicas} -> {replicas} replicas{bounded}")
            self._replicas = replicas
        elif not self._scaling.owed:
            return
        if not self._scaling.due:
            return
        async with self._scaling:
            with self._waits.on("scaling", f"the fleet to be told of {replicas} replicas", SCALING_S):
                await self._cluster.scale_rollout(self._run, replicas)

    async def _note_fleet(self, record: RunRecord) -> None:
        """Name the replicas that are wanted and not ready; a paused run wants them too."""
        processes = await live_processes(self._redis, self._run)
        await self._figures.show(replace(record, rollout_replicas=self._replicas), processes)
        ready = Counter(one.service for one in processes if one.state == "ready")
        wanted = {"rollout": self._replicas, "verifier": record.recipe.verifier.replicas}
        lacking = [f"{name} ({ready[name]} of {count} ready)" for name, count in wanted.items() if ready[name] < count]
        if lacking:
            text = f"replicas of {' and '.join(lacking)}"
            self._waits.pending(FLEET, text, record.recipe.limits.startup_timeout_s)
        else:
            self._waits.done(FLEET)

    async def _done(self, record: RunRecord) -> str | None:
        """What the run has come to, once every set has its last evaluation and there is an export; else None."""
        trains = record.recipe.limits.rollout_steps > 0
        last = AFTER if trains else ALONE
        evaluated = {one.set for one in await self._event_log.evaluations() if one.name == last}
        if not evaluated.issuperset(record.recipe.evaluated_sets):
            return None
        if not trains:
            return "evaluated; limits.rollout_steps = 0 trains nothing"
        return "all rollout steps trained, evaluated and exported" if record.export_path is not None else None

    async def _fleet_holds_weights(self) -> bool:
        processes = await live_processes(self._redis, self._run)
        return any(p.service == "rollout" and p.state == "ready" and p.version is not None for p in processes)

    async def _recovering(self) -> set[str]:
        """What a learner that begins anew says of the archived steps that it trains again; each counts once."""
        processes = [one for one in await live_processes(self._redis, self._run) if one.service == "learner"]
        return {wait.waits_for for one in processes for wait in one.waits if wait.name == "recovery"}

    async def _progress(self) -> str:
        counts = await group_counts(self._redis, self._keys)
        # An evaluation of a big set may take longer than any step.
        evaluating = await group_counts(self._redis, self._keys, Lane.EVALUATION)
        evaluations = len(await self._event_log.evaluations())
        policy = await self._event_log.policy()
        stands = f"rollout step {policy.step}, policy version {policy.version}" if policy else "no policy version"
        return (
            f"{stands}, {evaluations} evaluations, {evaluating.pending} of {evaluating.dispatched} "
            f"evaluation prompts pending, groups {counts.model_dump()}"
        )

    async def _current(self) -> RunRecord:
        if self._stopping.is_set():
            raise ControllerStoppingError
        record = await self._records.get(self._run)
        if record.cancel_requested:
            raise RunCancelledError
        return record
