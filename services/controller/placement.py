"""Owns a run's start: queue it until the cluster has room, prepare its model, check that it fits, start its services.

Must not place processes itself; it asks the cluster.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from services.contracts import ProcessInfo, RunState
from services.controller.fleet.accounts import Accounts
from services.controller.fleet.capacity import shortage
from services.controller.fleet.scaling import FleetScaling
from services.controller.health import HealthMonitor, learner_recovery
from services.controller.retry import RetriedRequest, RunFailedError
from services.controller.run_context import PERIOD_S, RunContext
from services.controller.run_metrics import replicas_desired
from services.retry import Retry
from services.settings import ClusterLimitsError, load_cluster_limits
from services.storage.errors import StoreOutageError
from services.storage.hub.address import is_hub, is_pinned
from services.storage.kept_files import keep_files
from services.storage.mirror import files_place, run_mirror
from services.streams.runs.places import avoided_places, forget_unproven
from services.streams.runs.queue import PLACEMENT, queued
from services.streams.state.heartbeat import live_processes
from services.streams.state.rewards.reward_files import read_reward_files
from services.streams.state.run_record import RunRecord

R = TypeVar("R")

QUEUED_S = 7 * 24 * 3600.0
"""A run that has been queued for a week is reported as stalled."""


class Placement:
    """The start of one run, from queued to running."""

    def __init__(self, context: RunContext, fleet: FleetScaling, accounts: Accounts) -> None:
        self._context = context
        self._fleet = fleet
        self._accounts = accounts
        self._asking = RetriedRequest(
            context.event_log,
            context.waits,
            phase="look-failed",
            failure="the cluster's free capacity could not be read",
            wait="room",
        )

    async def place(self) -> RunRecord:
        """Wait for room, prepare the model, and start the services if it fits; the record they were started with."""
        context = self._context
        record = await context.current()
        if record.state is RunState.QUEUED or not record.place:
            place = await asyncio.to_thread(files_place, context.folder.parent)
            await context.records.set_paths(context.run, context.fence, place=place)
        if record.state is RunState.QUEUED and record.resumptions:
            await context.stop_services()  # its previous processes would be mistaken for the new ones
            # What made it fail may have been mended, and was perhaps no fault of a place.
            await forget_unproven(context.redis, context.keys)
        record = await self._wait_for_room(record)
        if record.state is RunState.QUEUED:
            await context.change(RunState.STARTING, "placing services")
            record = await context.current()
        if record.state is RunState.STARTING and record.files:
            await self._keep_files(record)
        if record.model_path is None and record.recipe.model.package is not None and not _has_hub_data(record):
            return await self._start_while_preparing(record)
        if record.model_path is None:
            await self._prepare(record)
        elif record.state in (RunState.QUEUED, RunState.STARTING):
            await self._restore_copies(record)
        if record.state in (RunState.QUEUED, RunState.STARTING):
            # A resumed run may have fewer ranks than when its model was prepared.
            await self._check_memory(await context.current())
        return await self._start()

    async def _start_while_preparing(self, record: RunRecord) -> RunRecord:
        """Start the services of a run whose model has to be made; they load their libraries, and wait for its name.

        Only of a package, which takes seconds of one core. A download may take minutes, in which devices would be held
        for nothing, and a folder only has to be looked at. The sampler does not wait, so no data may be downloaded.
        """
        # Both to their end: what is being placed would be left behind by the stop of a failed run.
        done = await asyncio.gather(self._prepare(record, check=True), self._start(), return_exceptions=True)
        if errors := [each for each in done if isinstance(each, BaseException)]:
            raise errors[0]
        return await self._context.current()

    async def wait_until_running(self, health: HealthMonitor) -> None:
        """Wait until a rollout replica is ready with a policy version. Raises RunFailedError at the deadline."""
        context = self._context
        deadline = (await context.current()).recipe.limits.startup_timeout_s
        ends = time.monotonic() + deadline
        announced: set[str] = set()
        recovered: set[str] = set()
        while not _hold_weights(processes := await live_processes(context.redis, context.run)):
            record = await context.current()
            await self._accounts.look(record, processes)
            restarting = await health.check(record, processes)
            await self._fleet.scale(record, processes)
            await context.metrics.show(self._fleet.sized(record), processes)
            ready = {process.service for process in processes if process.state == "ready"}
            for service in sorted(ready - announced):
                await context.event_log.write("service-ready", service)
            announced |= ready
            lacking = sorted(replicas_desired(record).keys() - ready)
            context.waits.pending("start", f"{', '.join(lacking) or 'a replica'} to be ready", deadline)
            if (news := learner_recovery(processes)) - recovered or restarting:
                # The more archived steps there are, the longer training them again takes. Failed requests to the
                # cluster have a limit of their own.
                recovered |= news
                ends = time.monotonic() + deadline
                context.waits.done("start")
            if time.monotonic() > ends:
                text = f"not ready within {deadline:g} s (limits.startup_timeout_s): {', '.join(lacking)}"
                raise RunFailedError(text + await health.background())
            await asyncio.sleep(PERIOD_S)
        context.waits.done("start")
        if (await context.current()).state is RunState.STARTING:
            await context.change(RunState.RUNNING, "the rollout fleet has loaded a policy version")

    async def _wait_for_room(self, record: RunRecord) -> RunRecord:
        context = self._context
        reported = ""
        while shortage := await self._shortage(record):
            context.waits.pending(PLACEMENT, shortage, QUEUED_S, idle=True)
            if shortage != reported:
                await context.event_log.write("queued", shortage)
                reported = shortage
            await asyncio.sleep(PERIOD_S)
            record = await context.current()
        context.waits.done(PLACEMENT)
        return record

    async def _shortage(self, record: RunRecord) -> str | None:
        """Why the run cannot be placed now, or None. Raises RunFailedError when the cluster keeps failing to answer."""
        if self._asking.due:
            async with self._asking:
                try:
                    limits = load_cluster_limits()
                except ClusterLimitsError as error:
                    # A run that was given room continues with what it has; a queued one waits until the file is valid.
                    return str(error) if record.state is RunState.QUEUED else None
                if limits is None:
                    return await self._shortage_here(record)
                if record.state is not RunState.QUEUED:
                    return None  # it was given room; if the limits were lowered since, its fleet shrinks
                return shortage(limits, record, await self._context.records.active())
        return "the cluster does not report its free capacity"

    async def _shortage_here(self, record: RunRecord) -> str | None:
        """The same in a cluster that states no limits. A run that would not fit alone blocks none behind it."""
        cluster = self._context.cluster
        if (found := await cluster.shortage(record)) or record.state is not RunState.QUEUED:
            return found
        for other in queued(await self._context.records.active()):
            if other.id == record.id:
                return None
            if not other.problem and not other.cancel_requested and await cluster.fits_alone(other):
                return f"run {other.id!r} is placed first (priority {other.priority})"
        return None

    async def _keep_files(self, record: RunRecord) -> None:
        """Write the user's files into the run's folder and its store, where they stay when Redis has forgotten them."""
        context = self._context
        files = await read_reward_files(context.redis, record)

        async def keep(_: RunRecord) -> list[str]:
            return await asyncio.to_thread(keep_files, context.folder, run_mirror(context.run), files)

        for text in await self._retried("files", "the run's files to be kept", record, keep):
            await context.event_log.write("reward-file-differs", text)
        digests = ", ".join(f"{name} {digest[:12]}" for name, digest in record.files.items())
        await context.event_log.write("reward-files-kept", digests)

    async def _prepare(self, record: RunRecord, *, check: bool = False) -> None:
        """Record the names of the model and of data on the hub, so that later processes get the same files.

        With `check` only of a model that fits: services that wait for its name load it at once.
        """
        context, cluster, inputs = self._context, self._context.cluster, dict[str, str]()
        shown, began = record.recipe.model.package or str(record.recipe.model.path), time.monotonic()
        await context.event_log.write("preparing-model", shown)
        model = await self._retried("model", "the model to be ready", record, cluster.prepare_model)
        if _has_hub_data(record):
            inputs = await self._retried("inputs", "the data of the hub to be ready", record, cluster.prepare_data)
        for name in (model, *inputs.values()):
            if is_hub(name):
                await context.event_log.write("downloaded", name)
        if check:
            await self._check_memory(dataclasses.replace(record, model_path=model))
        paths = {"model_path": model} | ({"inputs": json.dumps(inputs)} if inputs else {})
        await context.records.set_paths(context.run, context.fence, **paths)
        await context.event_log.write("model-prepared", f"{shown}, in {time.monotonic() - began:.1f} s")

    async def _check_memory(self, record: RunRecord) -> None:
        await self._retried("memory", "the size of the model to be known", record, self._context.cluster.check_memory)

    async def _restore_copies(self, record: RunRecord) -> None:
        """Download copies of the hub again that were deleted since: services have neither token nor connection."""
        cluster, recipe = self._context.cluster, record.pinned_recipe
        if is_pinned(str(record.model_path)):
            model = recipe.model.model_copy(update={"path": record.model_path})
            recipe = recipe.model_copy(update={"model": model})
        pinned = dataclasses.replace(record, stored_recipe=recipe.model_dump_json().encode())
        if is_pinned(str(record.model_path)):
            await self._retried("model", "the model to be ready", pinned, cluster.prepare_model)
        if record.inputs:
            await self._retried("inputs", "the data of the hub to be ready", pinned, cluster.prepare_data)

    async def _retried(self, wait: str, what: str, record: RunRecord, do: Callable[[RunRecord], Awaitable[R]]) -> R:
        """The result of a request. An unavailable store or hub is retried until the startup deadline."""
        deadline = record.recipe.limits.startup_timeout_s
        about = f"run {self._context.run}"
        outages = Retry(lambda error: isinstance(error, StoreOutageError), PERIOD_S, deadline, about=about)

        async def prepare() -> R:
            await self._context.current()
            return await do(record)

        with self._context.waits.on(wait, what, deadline):
            return await outages.run_async(prepare)

    async def _start(self) -> RunRecord:
        """Start the services. A run whose services exist already does not fail because of one time-out."""
        context = self._context
        starts = RetriedRequest(
            context.event_log,
            context.waits,
            phase="restart-failed",
            failure="the run's services could not be found",
            wait="start-again",
        )
        record = await context.current()
        await context.event_log.write("starting-services", ", ".join(replicas_desired(record)))
        while True:
            record = await context.current()
            record = await self._fleet.set_initial(record, await live_processes(context.redis, context.run))
            # A run that is resumed, or has a new controller, leaves these places again.
            await context.cluster.avoid(context.run, await avoided_places(context.redis, context.keys))
            with context.waits.on("placing", "services to be placed", record.recipe.limits.startup_timeout_s):
                if record.state is RunState.STARTING:
                    await context.cluster.start(record)
                    return record
                async with starts:
                    await context.cluster.start(record)
            if not starts.retry_pending:
                return record
            while not starts.due:
                await context.current()
                await asyncio.sleep(PERIOD_S)


def _has_hub_data(record: RunRecord) -> bool:
    """Whether data of the run has to be downloaded from the hub."""
    return any(is_hub(source.path) for source in record.recipe.data_sources.values())


def _hold_weights(processes: list[ProcessInfo]) -> bool:
    """Whether a rollout replica is ready with a policy version."""
    return any(
        process.service == "rollout" and process.state == "ready" and process.version is not None
        for process in processes
    )
