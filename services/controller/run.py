"""Owns one run from queued to its end: become its owner, place it, follow it, end it and clean up.

Must not start processes itself; it asks the cluster.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from pathlib import Path

from services.contracts import ProcessInfo, RunState
from services.contracts.listening import advertised_host
from services.controller.ended.summary import summarise, write_summary
from services.controller.fleet.accounts import Accounts
from services.controller.fleet.scaling import FleetScaling
from services.controller.health import HealthMonitor
from services.controller.monitor import RunMonitor
from services.controller.placement import Placement
from services.controller.run_context import ControllerStoppingError, RunCancelledError, RunContext
from services.storage.errors import StoreError
from services.storage.mirror import run_mirror
from services.streams.connection.client import RedisUnavailableError
from services.streams.connection.functions import FencedError
from services.streams.state.ended.cleanup import sweep
from services.streams.state.heartbeat import Heartbeat
from services.streams.state.ownership import become_owner
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import OWNER, UnknownRunError

log = logging.getLogger(__name__)


class RunController:
    """Controls one run through its life. Calling `run` again after a crash continues from the record."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._fleet = FleetScaling(context)
        self._accounts = Accounts(context)
        self._placement = Placement(context, self._fleet, self._accounts)

    async def run(self) -> None:
        """Control the run until it ends, and leave none of its services running.

        Raises RedisUnavailableError: the run continues, and gets a new controller when Redis is back; FencedError:
        another controller owns it, and may have adopted its services, so they are left alone; FencedError or
        UnknownRunError: Redis has lost the run, see `end_lost`.
        """
        context = self._context
        info = ProcessInfo(
            id=f"{OWNER}-{uuid.uuid4().hex[:8]}",
            service=OWNER,
            run=context.run,
            host=advertised_host(),
            pid=os.getpid(),
            metrics="",
            state="ready",
            started_at=time.time(),
        )
        recipe = (await context.records.get(context.run)).recipe
        context.fence = await become_owner(context.redis, context.keys, OWNER, info.id)
        await context.metrics.open(recipe)
        try:
            async with Heartbeat(context.redis, info, context.waits, context.event_log):
                await self._until_ended()
        finally:
            context.metrics.close()

    async def _until_ended(self) -> None:
        try:
            state, reason = RunState.SUCCEEDED, await self._until_done()
        except RunCancelledError:
            state, reason = RunState.CANCELLED, "cancelled on request"
        except ControllerStoppingError:
            await self._context.stop_services()
            await self._close_accounts()
            return
        except (RedisUnavailableError, FencedError, UnknownRunError):
            raise
        except Exception as error:
            log.exception("run %s failed", self._context.run)
            state, reason = RunState.FAILED, str(error) or type(error).__name__
        await self._end(state, reason)

    async def end_lost(self, record: RunRecord) -> None:
        """Stop the services of a run that Redis has lost, and leave a record that says so. `record`: the last known."""
        context = self._context
        reason = (
            "Redis lost the state of this run: it was emptied, or restarted without its data; the run's files are in "
            f"{context.folder}; adopt it (POST /v1/runs/adopt), or submit the recipe under another id"
        )
        if await context.records.restore_failed(record, reason + await self._stop_services()):
            log.error("run %s: %s", context.run, reason)
        else:
            log.warning("run %s was deleted while another controller owned it", context.run)

    async def _until_done(self) -> str:
        record = await self._placement.place()
        context = self._context
        health = HealthMonitor(context.redis, context.cluster, context.event_log, context.waits, record)
        try:
            await self._placement.wait_until_running(health)
            return await RunMonitor(context, self._fleet, health, self._accounts).follow()
        finally:
            health.close()

    async def _end(self, state: RunState, reason: str) -> None:
        """Write the summary, stop the services, clean up, and only then set the final state."""
        context = self._context
        summary = await summarise(context.redis, await context.records.get(context.run, context.fence))
        document = summary | {"state": state.value, "reason": reason}
        file = await asyncio.to_thread(write_summary, context.folder, document)
        await context.records.set_summary(context.run, document, context.fence)
        reason += await self._stop_services()
        await self._close_accounts(discard=state is RunState.SUCCEEDED)
        if state is RunState.SUCCEEDED:
            await sweep(context.redis, context.keys)
        await self._store(file)
        await context.change(state, reason)

    async def _stop_services(self) -> str:
        """Stop the run's services; what the reason of its end has to add if that fails."""
        try:
            await self._context.stop_services()
        except Exception as error:
            log.exception("run %s: its services could not be stopped", self._context.run)
            return f"; stopping its services failed: {error}"
        return ""

    async def _close_accounts(self, *, discard: bool = False) -> None:
        """Charge the run until its services have ended; with `discard`, nothing in flight will be trained."""
        record = await self._context.records.get(self._context.run, self._context.fence)
        await self._accounts.close(record, discard=discard)

    async def _store(self, summary: Path) -> None:
        """Put the summary into the store. The record has it too, so one attempt is enough."""
        try:
            await asyncio.to_thread(run_mirror(self._context.run).put, summary.name, summary)
        except StoreError as error:
            await self._context.event_log.write("summary-not-stored", str(error))
