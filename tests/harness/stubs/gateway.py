"""Owns a gateway without Ray: the real API and controller, whose cluster writes down which processes a run wants.

Must not start a process: the stack that reads those files does, and so outlives a killed gateway.
`python -m tests.harness.stubs.gateway --redis URL --port N --runs DIR`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

from services.api.server import serve_api
from services.contracts import HostPid
from services.controller.service import Controller
from services.process.hosting import configure_logging
from services.settings import resource_requests
from services.streams.connection.client import connect
from services.streams.runs.places import AvoidedPlace
from services.streams.state.run_record import RunRecord
from tests.harness.api_access import ACCESS

WANTED = ".wanted"
"""The folder with one file per started run: how many processes of each service it wants."""
POLL_S = 0.05


class WrittenCluster:
    """Implements services.controller.cluster.Cluster. `folder`: the stack's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / WANTED
        self._folder.mkdir(parents=True, exist_ok=True)

    def _path(self, run: str) -> Path:
        return self._folder / f"{run}.json"

    def _write(self, run: str, wanted: dict[str, int]) -> None:
        partial = self._path(run).with_suffix(".new")
        partial.write_text(json.dumps(wanted))
        partial.replace(self._path(run))

    def _running(self, run: str) -> dict[str, list[int]]:
        """The pids that the stack has started, by service."""
        try:
            found: dict[str, list[int]] = json.loads((self._folder / f"{run}.pids").read_text())
        except FileNotFoundError:
            return {}
        return found

    async def prepare_model(self, record: RunRecord) -> str:
        """Nothing is loaded."""
        return str(record.recipe.model.path)

    async def check_memory(self, record: RunRecord) -> None:
        """Nothing is loaded, so everything fits."""

    async def start(self, record: RunRecord) -> None:
        """Want the processes of the recipe, and one sampler."""
        requests = resource_requests(record.recipe, record.rollout_replicas)
        self._write(record.id, {"sampler": 1} | {service: len(each) for service, each in requests.items()})

    async def restart_learner(self, record: RunRecord) -> None:
        """Kill the learner; the stack replaces it."""
        self._kill(record.id, "learner")

    async def restart_sampler(self, run: str) -> None:
        """Kill the sampler; the stack replaces it."""
        self._kill(run, "sampler")

    def _kill(self, run: str, service: str) -> None:
        for pid in self._running(run).get(service, ()):
            os.kill(pid, signal.SIGKILL)

    async def scale_rollout(self, run: str, replicas: int) -> None:
        """Want another number of replicas."""
        self._write(run, json.loads(self._path(run).read_text()) | {"rollout": replicas})

    async def scale_verifier(self, run: str, replicas: int) -> None:
        """Want another number of verifiers."""
        self._write(run, json.loads(self._path(run).read_text()) | {"verifier": replicas})

    async def faults(self, run: str, ready: Collection[HostPid], joining: Collection[HostPid]) -> list[str]:
        """The stack replaces what dies, however often."""
        return []

    async def avoid(self, run: str, places: Collection[AvoidedPlace]) -> None:
        """There is one node."""

    async def used_up(self, run: str) -> list[AvoidedPlace]:
        """There is one node."""
        return []

    async def blamed(self, record: RunRecord) -> list[AvoidedPlace]:
        """There is one node."""
        return []

    async def learner_fault(self, run: str) -> str | None:
        """The stack replaces a dead learner too."""
        return None

    async def shortage(self, record: RunRecord) -> str | None:
        """There is always room."""
        return None

    async def fits_alone(self, record: RunRecord) -> bool:
        """There is always room."""
        return True

    async def stop(self, run: str, deadline_s: float) -> None:
        """Want nothing, and wait until the stack has stopped everything."""
        self._path(run).unlink(missing_ok=True)
        ends = time.monotonic() + deadline_s
        while any(self._running(run).values()):
            if time.monotonic() > ends:
                raise TimeoutError(f"run {run}: still running after {deadline_s:g} s: {self._running(run)}")
            await asyncio.sleep(POLL_S)


async def serve(redis_url: str, port: int, runs: Path) -> None:
    """Serve and control until SIGTERM."""
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    redis = await connect(redis_url)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(Controller(redis, WrittenCluster(runs), runs).run(stopping))
            tasks.create_task(serve_api(redis, ACCESS, "127.0.0.1", port, stopping))
    finally:
        await redis.aclose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redis", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    given = parser.parse_args()
    configure_logging("gateway")
    asyncio.run(serve(given.redis, given.port, given.runs))
