"""Owns the benchmark of ended runs: what a look of the controller and a page of the list cost beside many of them.

Must not measure Ray or processes of runs. Run it as `python -m benchmarks.api.ended_runs`; takes two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from deploy.local.valkey import EmbeddedValkey
from services.api.access.tokens import TokenAccess, local_principal, token_digest
from services.api.app import create_app
from services.contracts import RunState
from services.controller.ended.expiry import Expiry
from services.controller.ended.known_runs import KnownRuns
from services.controller.run_metrics import RunStates
from services.settings import load_recipe
from services.streams.connection.client import Redis, connect
from services.streams.state.runs import RunRecords

RECIPE = load_recipe(Path(__file__).parents[2] / "deploy/recipes/qwen2.5-32b-dapo.yaml")
TOGETHER, WARM_UP = 200, 10
TOKEN = "token-of-the-benchmark"
PAGE = 50
FILLED = ("page of 50", "page of 50 failed")
"""What only so many ended runs fill."""


async def add_ended(redis: Redis, first: int, count: int) -> None:
    """Add runs that have failed."""
    records = RunRecords(redis)

    async def add(number: int) -> None:
        await records.create(f"ended-{number:06d}", RECIPE)
        await records.transition(f"ended-{number:06d}", RunState.FAILED, "an example")

    for start in range(first, first + count, TOGETHER):
        await asyncio.gather(*(add(number) for number in range(start, min(start + TOGETHER, first + count))))


async def look(known: KnownRuns, states: RunStates, expiry: Expiry) -> None:
    """What the controller's loop does in each turn."""
    states.show(await known.look(), known.ended)
    await expiry.look(time.time())


async def get(api: httpx.AsyncClient, path: str) -> None:
    """A request, which must succeed."""
    (await api.get(path)).raise_for_status()


async def cpu_ms(work: Callable[[], Awaitable[None]], times: int) -> float:
    """The median CPU time of this process for one piece of work, ms."""
    found = []
    for _ in range(WARM_UP + times):
        before = time.process_time()
        await work()
        found.append((time.process_time() - before) * 1e3)
    return statistics.median(found[WARM_UP:])


@dataclass(frozen=True)
class Cost:
    """CPU time beside some ended runs: `first_look_s` of a controller that starts, `ms` of each piece of work."""

    first_look_s: float
    ms: dict[str, float]


async def measure(folder: Path, sizes: Sequence[int], times: int) -> AsyncIterator[tuple[int, Cost]]:
    """What each piece of work costs beside each number of ended runs; `sizes` rise."""
    server = EmbeddedValkey(folder / "valkey")
    url = server.start()
    try:
        redis = await connect(url)
        access = TokenAccess({token_digest(TOKEN): local_principal()})
        transport = httpx.ASGITransport(app=create_app(redis, access))
        headers = {"authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://penstock", headers=headers) as api:
            await RunRecords(redis).create("active", RECIPE)
            present = 0
            for size in sizes:
                await add_ended(redis, present, size - present)
                present = size
                yield size, await _cost(redis, folder, api, times)
        await redis.aclose()
    finally:
        server.stop()
        server.close()


async def _cost(redis: Redis, folder: Path, api: httpx.AsyncClient, times: int) -> Cost:
    known, states, expiry = KnownRuns(redis, RunRecords(redis)), RunStates(), Expiry(redis, folder, 3600.0)
    began = time.process_time()
    await look(known, states, expiry)
    first_look_s = time.process_time() - began
    works = {
        "look of the controller": partial(look, known, states, expiry),
        "page of 50": partial(get, api, f"/v1/runs?limit={PAGE}"),
        "page of 50 active": partial(get, api, f"/v1/runs?limit={PAGE}&state=queued&state=running"),
        "page of 50 failed": partial(get, api, f"/v1/runs?limit={PAGE}&state=failed&project=default"),
        "one run": partial(get, api, "/v1/runs/active"),
    }
    return Cost(first_look_s, {name: await cpu_ms(work, times) for name, work in works.items()})


async def costs(folder: Path, sizes: Sequence[int], times: int) -> dict[int, Cost]:
    """The same by number of ended runs."""
    return {size: cost async for size, cost in measure(folder, sizes, times)}


async def show(folder: Path, sizes: Sequence[int], times: int) -> None:
    """Print each cost, and its ratio to the first."""
    first: dict[str, float] = {}
    async for size, cost in measure(folder, sizes, times):
        print(f"{size:>6} ended runs: first look {cost.first_look_s:.2f} s CPU", flush=True)
        for name, found in cost.ms.items():
            times_first = found / first.setdefault(name, found)
            print(f"{size:>6} ended runs: {name}: {found:.2f} ms CPU, {times_first:.2f} times the first", flush=True)


def main() -> None:
    """Measure on an embedded server."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1_000, 10_000], help="numbers of ended runs")
    parser.add_argument("--times", type=int, default=100, help="repetitions of each measurement")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(show(Path(folder), options.sizes, options.times))


if __name__ == "__main__":
    main()
