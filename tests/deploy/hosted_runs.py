"""Owns what tests of hosting read about a run: its record, its processes and its faults.

Must not start Ray.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from services.settings import parse_recipe
from services.streams.state.heartbeat import live_processes
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import RunRecords
from tests.harness.small_run import recipe_document


async def submitted(redis: Any, run: str, **learner: Any) -> RunRecord:
    """A run record; every process requests few CPUs, so that several fit."""
    booked = {"cpus": 0.1}
    document = recipe_document("/nowhere", rollout=booked, verifier=booked, learner=booked | learner)
    return await RunRecords(redis).create(run, parse_recipe(document))


async def eventually(
    redis: Any, run: str, service: str, holds: Callable[[list[int]], bool], deadline_s: float = 60.0
) -> list[int]:
    """The pids of a service's processes, oldest first, once `holds` accepts them."""
    ends = time.monotonic() + deadline_s
    while True:
        processes = [info for info in await live_processes(redis, run) if info.service == service]
        pids = [info.pid for info in processes if info.state == "ready"]
        if holds(pids):
            return pids
        assert time.monotonic() < ends, f"{service} of {run}: {pids}"
        await asyncio.sleep(0.1)


async def faults(cluster: Any, redis: Any, run: str) -> list[str]:
    """The faults that the controller would get."""
    ready = {info.host_pid for info in await live_processes(redis, run) if info.state == "ready"}
    found: list[str] = await cluster.faults(run, ready)
    return found


async def learner_fault(cluster: Any, run: str) -> str:
    """The reason to restart the learner, as soon as the cluster has detected it."""
    ends = time.monotonic() + 30
    while not (fault := await cluster.learner_fault(run)):
        assert time.monotonic() < ends
        await asyncio.sleep(0.2)
    return str(fault)


async def until_one_rank(run: str) -> None:
    """Wait until Ray has detected that all learner ranks but one have died."""
    from deploy.hosting.actors import named_actors
    from deploy.hosting.roles import rank_name

    ends = time.monotonic() + 30
    while len(named_actors(rank_name(run))) > 1:
        assert time.monotonic() < ends, "Ray has not detected the deaths"
        await asyncio.sleep(0.1)


def failing_at(call: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose call number `call` fails with Ray's error for an unavailable control store."""
    from ray.exceptions import GetTimeoutError

    calls = iter(range(1, 100))

    def failing(*arguments: Any) -> Any:
        if next(calls) == call:
            raise GetTimeoutError("Ray does not answer")
        return function(*arguments)

    return failing


def with_large_learner(record: RunRecord) -> RunRecord:
    """The run with learner ranks too large for any machine, and 2 s to place them."""
    recipe = record.recipe
    changes = {
        "learner": recipe.learner.model_copy(update={"cpus": 64.0}),
        "limits": recipe.limits.model_copy(update={"startup_timeout_s": 2.0}),
    }
    return replace(record, stored_recipe=recipe.model_copy(update=changes).model_dump_json().encode())
