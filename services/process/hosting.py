"""Owns the hosting of a service: connection, heartbeat, metrics page, signals. It runs as a process or as a thread.

Must not know any service.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from services.contracts import ProcessInfo
from services.contracts.listening import advertised_host
from services.metrics import expose, forget, serve_metrics
from services.streams.connection.client import RECONNECT_S, Redis, RedisUnavailableError, connect
from services.streams.connection.url import EXPECTED
from services.streams.delivery.process_logs import LogShipping
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog
from services.streams.state.heartbeat import Heartbeat
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import RunRecords, UnknownRunError
from services.waits import Waits

log = logging.getLogger(__name__)

GARBAGE_AFTER = 50_000
"""New objects after which unused cycles are collected."""
GRACE_S = 8.0
"""How long a service may take to drain, unless its host says otherwise."""
LOOK_S = 0.2
"""How often a service that waits for its model reads the record."""
START_S = 10.0
"""How long a service that is started by hand waits for Redis."""


@dataclass
class Context:
    """What a service needs: its connections, its signals and its list of waits.

    `record`: as it was at the start, with the edits of the recipe that `refresh` has taken over since.

    The service must return from run() soon after `stopping` is set, and list everything that it waits for in `waits`.
    `grace_s`: how long it may take then, in seconds; known once `stopping` is set.
    """

    redis: Redis
    keys: RunKeys
    record: RunRecord
    heartbeat: Heartbeat
    event_log: EventLog
    stopping: asyncio.Event
    host: str
    waits: Waits
    grace_s: Callable[[], float] = lambda: GRACE_S

    async def refresh(self) -> None:
        """Take over edits of the run's recipe. A service calls it where a setting may change."""
        self.record = await RunRecords(self.redis).with_edits(self.record)

    async def model(self) -> str | None:
        """The name of the run's model, once the controller has prepared it; None when this service is to stop before.

        A service may be started while its model is prepared, and loads its libraries meanwhile. Raises UnknownRunError,
        and TimeoutError after limits.startup_timeout_s.
        """
        records, deadline_s = RunRecords(self.redis), self.record.recipe.limits.startup_timeout_s
        with self.waits.on("prepared", "the controller to prepare the model", deadline_s):
            async with asyncio.timeout(deadline_s):
                while self.record.model_path is None and not self.stopping.is_set():
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self.stopping.wait(), LOOK_S)
                    self.record = replace(self.record, model_path=(await records.get(self.record.id)).model_path)
        return self.record.model_path


class Service(Protocol):
    """A service of one run. `name` is also its role in Redis."""

    name: str

    async def run(self, context: Context) -> None:
        """Run until the job is done or `context.stopping` is set, then drain. Raises to report a failure."""


async def host_service(
    service: Service,
    run: str,
    redis_url: str,
    stopping: asyncio.Event,
    *,
    workers: int = 1,
    connect_timeout_s: float = RECONNECT_S,
    on_change: Callable[[ProcessInfo], None] = lambda _: None,
    grace_s: Callable[[], float] = lambda: GRACE_S,
) -> None:
    """Run one service of one run to its end; waits `connect_timeout_s` seconds for Redis.

    `on_change` is called with each change of the service's state. `grace_s`: see Context.
    """
    redis = await connect(redis_url, connect_timeout_s)
    try:
        keys = RunKeys(run)
        record = await RunRecords(redis).get(run)
        host = advertised_host()
        info = ProcessInfo(
            id=f"{service.name}-{uuid.uuid4().hex[:8]}",
            service=service.name,
            run=run,
            host=host,
            pid=os.getpid(),
            metrics=f"{host}:{serve_metrics(host)}",
            workers=workers,
            started_at=time.time(),
        )
        expose(run, service.name)
        event_log, waits = EventLog(redis, keys, service.name), Waits()
        async with (
            LogShipping(redis, keys, info, redis_url),
            Heartbeat(redis, info, waits, event_log, on_change) as heartbeat,
        ):
            try:
                await service.run(Context(redis, keys, record, heartbeat, event_log, stopping, host, waits, grace_s))
            except Exception as error:
                await event_log.write("service-failed", f"{info.id}: {type(error).__name__}: {error}")
                raise
    finally:
        forget(run)
        await redis.aclose()


class ServiceThread:
    """A service in a thread with its own event loop, so that its host stays responsive."""

    def __init__(
        self,
        service: Service,
        run: str,
        redis_url: str,
        workers: int = 1,
        on_change: Callable[[ProcessInfo], None] = lambda _: None,
    ) -> None:
        self._service = service
        self._arguments = (run, redis_url)
        self._workers = workers
        self._on_change = on_change
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._grace_s = GRACE_S
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name=service.name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            hosting = host_service(
                self._service,
                *self._arguments,
                self._stopping,
                workers=self._workers,
                on_change=self._on_change,
                grace_s=lambda: self._grace_s,
            )
            self._loop.run_until_complete(hosting)
        except BaseException as error:
            log.exception("%s failed", self._service.name)
            self.error = error
        finally:
            self._loop.close()

    @property
    def alive(self) -> bool:
        """Whether the service is still running."""
        return self._thread.is_alive()

    def stop(self, deadline_s: float) -> bool:
        """Let the service drain; whether it ended within `deadline_s` seconds, of which it is told."""
        self._grace_s = deadline_s
        with suppress(RuntimeError):  # the loop is closed: the service has ended by itself
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(deadline_s)
        return not self.alive


def collect_garbage_rarely() -> None:
    """For processes that move messages or answer requests.

    They leave hardly any cycles, but make many objects that live for a while.

    With Python's own thresholds, looking for cycles takes a tenth of their CPU time.
    """
    gc.set_threshold(GARBAGE_AFTER, 10, 10)


def configure_logging(service: str) -> None:
    """One line per record on standard error, with the service's name."""
    logging.basicConfig(
        level=os.environ.get("PENSTOCK_LOG_LEVEL", "INFO"),
        format=f"%(asctime)s {service} %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )


async def _until_signalled(service: Service, run: str, redis_url: str) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    await host_service(service, run, redis_url, stopping, connect_timeout_s=START_S)


def add_redis_option(parser: argparse.ArgumentParser) -> None:
    """Add the option --redis, which defaults to PENSTOCK_REDIS. `connect` reports a missing address."""
    default = os.environ.get("PENSTOCK_REDIS", "")
    parser.add_argument("--redis", metavar="URL", default=default, help=f"default: PENSTOCK_REDIS; {EXPECTED}")


def main(make: Callable[[], Service], argv: list[str] | None = None) -> int:
    """The command line of every service: `python -m SERVICE --run ID --redis URL`; the exit status."""
    service = make()
    parser = argparse.ArgumentParser(prog=f"python -m {service.name}")
    parser.add_argument("--run", required=True, help="id of a submitted run")
    add_redis_option(parser)
    arguments = parser.parse_args(argv)
    configure_logging(service.name)
    try:
        asyncio.run(_until_signalled(service, arguments.run, arguments.redis))
    except (RedisUnavailableError, UnknownRunError) as error:
        print(f"{service.name}: {error}", file=sys.stderr)
        return 2
    return 0
