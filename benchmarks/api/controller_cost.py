"""Owns the benchmark of the controller: CPU per run with many processes, alone and beside a long past.

Must not measure Ray: the cluster answers at once. Run it as `python -m benchmarks.api.controller_cost`; takes a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from deploy.local.valkey import EmbeddedValkey
from services.contracts import EvaluationRecord, Event, HostPid, Message, ProcessInfo, RunState
from services.controller.service import Controller
from services.settings import load_recipe
from services.streams.connection.client import Redis, connect
from services.streams.keys import RunKeys
from services.streams.runs.places import AvoidedPlace
from services.streams.state.heartbeat import Heartbeat, live_processes
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import RunRecords
from services.waits import Waits

RECIPE = load_recipe(Path(__file__).parents[2] / "deploy/recipes/qwen2.5-32b-dapo.yaml")
ENDED_RUNS, EVALUATIONS, EVENTS = 1_000, 2_000, 10_000
OTHERS = ("sampler", *["learner"] * RECIPE.learner.ranks, *["verifier"] * RECIPE.verifier.replicas)
"""The processes of the run that are no replicas of rollout."""
PER_PIPELINE = 500
START_S = 60.0
CALM_S = 3.0


class IdleCluster:
    """A cluster in which nothing happens."""

    async def prepare_model(self, record: RunRecord) -> str:
        """See Cluster."""
        return "/model"

    async def prepare_data(self, record: RunRecord) -> dict[str, str]:
        """See Cluster."""
        return {}

    async def check_memory(self, record: RunRecord) -> None:
        """See Cluster."""

    async def start(self, record: RunRecord) -> None:
        """See Cluster."""

    async def restart_learner(self, record: RunRecord) -> None:
        """See Cluster."""

    async def restart_sampler(self, run: str) -> None:
        """See Cluster."""

    async def scale_rollout(self, run: str, replicas: int) -> None:
        """See Cluster."""

    async def scale_verifier(self, run: str, replicas: int) -> None:
        """See Cluster."""

    async def faults(self, run: str, ready: Collection[HostPid], joining: Collection[HostPid]) -> list[str]:
        """See Cluster."""
        return []

    async def avoid(self, run: str, places: Collection[AvoidedPlace]) -> None:
        """See Cluster."""

    async def used_up(self, run: str) -> list[AvoidedPlace]:
        """See Cluster."""
        return []

    async def blamed(self, record: RunRecord) -> list[AvoidedPlace]:
        """See Cluster."""
        return []

    async def learner_fault(self, run: str) -> str | None:
        """See Cluster."""
        return None

    async def shortage(self, record: RunRecord) -> str | None:
        """See Cluster."""
        return None

    async def fits_alone(self, record: RunRecord) -> bool:
        """See Cluster."""
        return True

    async def stop(self, run: str, deadline_s: float) -> None:
        """See Cluster."""


async def announce(url: str, run: str, processes: int) -> None:
    """Send the heartbeats of a run's processes, until this process is killed."""
    redis = await connect(url)
    services = [*OTHERS, *["rollout"] * (processes - len(OTHERS))]
    async with AsyncExitStack() as stack:
        for number, service in enumerate(services):
            waits = Waits()
            waits.pending("tasks", "work", 600.0, idle=True)
            host, name = f"10.0.0.{number}", f"{service}-{number}"
            info = ProcessInfo(
                id=name, service=service, run=run, host=host, pid=1, metrics=f"{host}:9400", state="ready", version=0
            )
            await stack.enter_async_context(Heartbeat(redis, info, waits))
        await asyncio.Event().wait()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition. Raises TimeoutError after START_S."""
    async with asyncio.timeout(START_S):
        met = await condition()
        while not met:
            await asyncio.sleep(0.2)
            met = await condition()


async def all_live(redis: Redis, run: str, processes: int) -> bool:
    """Whether all processes have a heartbeat."""
    return len(await live_processes(redis, run)) == processes


async def is_running(redis: Redis, run: str) -> bool:
    """Whether the run is running."""
    return (await RunRecords(redis).get(run)).state is RunState.RUNNING


@asynccontextmanager
async def announced(redis: Redis, url: str, run: str, processes: int) -> AsyncIterator[None]:
    """Another process sends the run's heartbeats."""
    command = [sys.executable, "-m", __spec__.name, "--announce", url, run, "--processes", str(processes)]
    child = await asyncio.create_subprocess_exec(*command)
    try:
        await until(partial(all_live, redis, run, processes))
        yield
    finally:
        child.kill()
        await child.wait()


async def append(redis: Redis, stream: str, messages: list[Message]) -> None:
    """Append messages to a stream, many at once."""
    for start in range(0, len(messages), PER_PIPELINE):
        async with redis.pipeline(transaction=False) as pipe:
            for message in messages[start : start + PER_PIPELINE]:
                pipe.xadd(stream, {"m": message.model_dump_json()})
            await pipe.execute()


async def write_past(redis: Redis, run: str) -> None:
    """Ended runs, and events and evaluations of `run`."""
    records, keys = RunRecords(redis), RunKeys(run)
    for number in range(ENDED_RUNS):
        await records.create(f"ended-{number:04d}", RECIPE)
        await records.transition(f"ended-{number:04d}", RunState.FAILED, "an example")
    record = EvaluationRecord(
        name="step-0",
        set="held-out",
        version=0,
        prompts=30,
        samples_per_prompt=32,
        accuracy=0.5,
        standard_error=0.1,
        unknown=0,
    )
    names = (f"step-{number}" for number in range(EVALUATIONS))
    await append(redis, keys.evaluations, [record.model_copy(update={"name": name}) for name in names])
    event = Event(service="rollout", phase="rollout-joining", text="rollout-1: engine is up", at=1.0)
    await append(redis, keys.events, [event] * EVENTS)


async def cpu_share(redis: Redis, folder: Path, run: str, seconds: float) -> float:
    """The share of one core that the controller of a running run takes, in `seconds` seconds."""
    stopping = asyncio.Event()
    loop = asyncio.create_task(Controller(redis, IdleCluster(), folder).run(stopping))
    try:
        await until(partial(is_running, redis, run))
        await asyncio.sleep(CALM_S)
        began, cpu = time.monotonic(), time.process_time()
        await asyncio.sleep(seconds)
        return (time.process_time() - cpu) / (time.monotonic() - began)
    finally:
        stopping.set()
        await loop


async def measure(folder: Path, processes: int, seconds: float) -> None:
    """Print the controller's share of one core, without and with a past."""
    server = EmbeddedValkey(folder / "valkey")
    url = server.start()
    try:
        redis = await connect(url)
        past = f"{ENDED_RUNS:,} ended runs, {EVALUATIONS:,} evaluations, {EVENTS:,} events"
        for run, what in (("fresh", "no past"), ("old", past)):
            await RunRecords(redis).create(run, RECIPE)
            if run == "old":
                await RunRecords(redis).transition("fresh", RunState.CANCELLED, "measured")
                await write_past(redis, run)
            async with announced(redis, url, run, processes):
                share = await cpu_share(redis, folder, run, seconds)
            print(f"{processes} processes, {what}: {share:.2%} of a core", flush=True)
        await redis.aclose()
    finally:
        server.stop()


def main() -> None:
    """Measure on an embedded server, or announce processes for the measurement."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("--processes", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--announce", nargs=2, metavar=("URL", "RUN"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.processes <= len(OTHERS):
        parser.error(f"--processes: {options.processes} is not valid: expected more than {len(OTHERS)}")
    if options.announce:
        url, run = options.announce
        asyncio.run(announce(url, run, options.processes))
        return
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder), options.processes, options.seconds))


if __name__ == "__main__":
    main()
