"""Owns the measurement of a group's story over REST: any of 10,000 groups, of a run that has trained many steps since.

Must not share a process with the gateway that it measures.

`python -m benchmarks.api.lineage [--groups 10000] [--steps 2500] [--requests 500]` writes an archive and step records,
starts a Redis and a gateway, asks for groups chosen at random one after the other, and prints p50, p99 and worst of the
answers, and the gateway's CPU time of each. The run's model is not there, so the texts of tokens are unknown: decoding
them is not measured. `--together 4` asks for so many at once.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from benchmarks.api.streams import RECIPE, RUN, TOKEN, Cpu, gateway, percentiles, started
from benchmarks.data_plane.archive import GROUPS, fill
from services.contracts import StepRecord
from services.settings import parse_recipe
from services.storage.groups.merging import merge_once
from services.storage.mirror import NO_MIRROR
from services.streams.connection.client import Redis, connect
from services.streams.keys import RunKeys
from services.streams.state.events import append_message
from services.streams.state.runs import RunRecords

METRICS = 70
"""Of a step record; as many as a run's records have."""


async def prepare(redis: Redis, steps: int) -> None:
    """The run's record, and those of its steps."""
    await RunRecords(redis).create(RUN, parse_recipe(RECIPE))
    keys, metrics = RunKeys(RUN), {f"metric_{number}": number / 7 for number in range(METRICS)}
    for step in range(1, steps + 1):
        names = tuple(f"g{number:08d}" for number in range(64 * step, 64 * step + 64))
        record = StepRecord(
            step=step,
            version=step,
            optimizer_steps=4,
            groups=names,
            metrics=metrics,
            generation_started_at=step,
            generation_finished_at=step + 0.5,
            learning_started_at=step + 0.5,
            learning_finished_at=step + 1,
        )
        await append_message(redis, keys, keys.steps, record, 0)


async def measure(url: str, port: int, server: psutil.Process, options: argparse.Namespace) -> None:
    """Ask for groups, and print what was measured."""
    redis = await connect(url)
    await prepare(redis, options.steps)
    await redis.aclose()
    await started(port)
    chosen = random.Random(1)
    names = [f"g{chosen.randrange(options.groups):08d}" for _ in range(options.requests)]
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60.0) as client:
        turns = asyncio.Semaphore(options.together)

        async def ask(name: str) -> tuple[float, int]:
            async with turns:
                began = time.monotonic()
                answer = await client.get(f"/v1/runs/{RUN}/groups/{name}")
                if answer.is_error:
                    raise RuntimeError(f"group {name}: {answer.status_code} {answer.text[:500]}")
                return time.monotonic() - began, len(answer.content)

        for title in ("while the gateway reads the files' indices", "afterwards"):
            cpu = Cpu(server)
            found = await asyncio.gather(*(ask(name) for name in names))
            print(f"{title}: {percentiles([seconds for seconds, _ in found])}; {cpu}")
            size = sum(length for _, length in found) / len(found) / 1024
            print(f"  {cpu.gateway_s / len(found) * 1000:.1f} ms of the gateway's CPU time for {size:.0f} KiB")


def main() -> int:
    """Write the archive, start the servers, measure, and stop them; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.api.lineage", description=__doc__)
    parser.add_argument("--groups", type=int, default=GROUPS)
    parser.add_argument("--steps", type=int, default=2500, help="of the run; the groups are of the first ones")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--together", type=int, default=1)
    parser.add_argument("--port", type=int, default=8479)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / RUN / "groups"
        folder.mkdir(parents=True)
        fill(folder.parent, options.groups)
        while merge_once(folder.parent, NO_MIRROR):
            pass
        with gateway(options.port, {"PENSTOCK_RUNS": name}) as (url, server):
            asyncio.run(measure(url, options.port, server, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
