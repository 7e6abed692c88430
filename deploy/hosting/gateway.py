"""Owns the gateway process: the controller, and on a laptop the REST API, in one Ray actor.

Must not hold state: a restarted gateway finds everything in Redis, and in Ray by name.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import uuid
from typing import Any

import ray

from deploy.hosting.cluster import RayCluster
from deploy.hosting.environment import NAMESPACE, place, process_environment
from services.contracts import ProcessInfo
from services.contracts.listening import advertised_host
from services.metrics import serve_metrics
from services.process.hosting import configure_logging
from services.storage.places import runs_folder
from services.streams.connection.client import Redis, connect
from services.streams.state.heartbeat import Heartbeat

log = logging.getLogger(__name__)

RESTARTS = -1  # unlimited; Session limits how many times in a row the gateway may die before it serves
CONNECT_S = 0.2


class Gateway:
    """The actor. Its work runs in a thread with its own event loop, so that it can be stopped at any moment."""

    def __init__(self, redis_url: str, listen: tuple[str, int] | None) -> None:
        configure_logging("gateway")
        self._redis_url = redis_url
        self._listen = listen
        self._cluster = RayCluster(redis_url)
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._serves = False
        self._thread = threading.Thread(target=self._main, name="gateway", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self.run())
        except BaseException:
            log.exception("the gateway failed; its process exits, and Ray restarts it")
            logging.shutdown()
            os._exit(1)

    async def run(self) -> None:
        """Run the controller and the API until `stop` is called. Raises what either of them raises."""
        from services.controller.service import Controller

        redis = await connect(self._redis_url)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(Controller(redis, self._cluster, runs_folder()).run(self._stopping))
                tasks.create_task(self._serve_api(redis, *self._listen) if self._listen else self._announce(redis))
        finally:
            await redis.aclose()

    async def _serve_api(self, redis: Redis, host: str, port: int) -> None:
        """Serve those who have access. Raises AccessFileError: without access nothing is served."""
        from services.api.access.platform import platform_access
        from services.api.server import serve_api

        access = platform_access()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(serve_api(redis, access, host, port, self._stopping))
            tasks.create_task(self._note_serving(host, port))

    async def _announce(self, redis: Redis) -> None:
        """Serve metrics and send a heartbeat for the controller, when other processes serve the API."""
        host = advertised_host()
        info = ProcessInfo(
            id=f"controller-{uuid.uuid4().hex[:8]}",
            service="controller",
            run=None,
            host=host,
            pid=os.getpid(),
            metrics=f"{host}:{serve_metrics(host)}",
            state="ready",
            started_at=time.time(),
        )
        async with Heartbeat(redis, info):
            self._serves = True
            await self._stopping.wait()

    async def _note_serving(self, host: str, port: int) -> None:
        """Return as soon as the API accepts connections. When its listener fails, the task group cancels this task."""
        while not self._serves and not self._stopping.is_set():
            try:
                _, writer = await asyncio.open_connection(host, port)
            except OSError:
                await asyncio.sleep(CONNECT_S)
            else:
                writer.close()
                self._serves = True

    def serves(self) -> bool:
        """Whether this process serves: the API answers, or the controller is connected to Redis."""
        return self._serves

    def stop(self, deadline_s: float) -> bool:
        """Stop the API and the controller, which stops every run's processes; the runs' records do not change.

        Returns whether both ended within `deadline_s` seconds.
        """
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(deadline_s)
        return not self._thread.is_alive()


def start_gateway(redis_url: str, listen: tuple[str, int] | None) -> Any:
    """Start the gateway, or find the running one; returns its handle. `listen`: host and port of the API, if any."""
    options = {
        "name": "gateway",
        "namespace": NAMESPACE,
        "get_if_exists": True,
        "num_cpus": 0,
        "resources": place("head"),
        "max_restarts": RESTARTS,
        "max_concurrency": 4,
        "runtime_env": {"env_vars": process_environment(threads=1)},
    }
    return ray.remote(Gateway).options(**options).remote(redis_url, listen)
