"""Owns a rollout step of real services around stub engines, in which each service works after the other.

Must not be used outside tests, nor judge what is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import verifier.service
from services.contracts import Lane
from services.sampler.archive import archivist
from services.sampler.service import SamplerService
from services.sampler.watches import audit
from services.streams.keys import RunKeys
from tests.harness.hand_fleet import running, until
from tests.harness.small_run import service_context
from tests.harness.stubs.engine import Answers
from tests.harness.stubs.learner import StubLearner
from tests.harness.stubs.rollout import StubRollout
from tests.harness.stubs.verifier import StubSandbox
from tests.harness.stubs.workload import recipe, write_questions
from tests.operation_counts.counted_client import CountedClient

GROUPS, SAMPLES = 16, 8
"""Of a rollout step; none is filtered."""
NEVER_S = 3600.0


@dataclass
class Step:
    """What each service sent for one trained rollout step, and the entries that it added to each stream."""

    calls: dict[str, Counter[str]]
    entries: Counter[str]


class _Pipeline:
    def __init__(self, redis: Any, keys: RunKeys, clients: dict[str, CountedClient], tasks: list[Any]) -> None:
        self._redis, self._keys = redis, keys
        self._clients, self._tasks = clients, tasks

    async def step(self, number: int) -> None:
        """Dispatch, generate, judge, train and archive the groups of one rollout step."""
        groups, samples = number * GROUPS, number * GROUPS * SAMPLES
        await self._works("sampler", partial(self._has_dispatched, groups), "the dispatch")
        await self._works("rollout", partial(self._has_entries, "samples", samples), "the responses")
        await self._works("verifier", partial(self._has_entries, "verdicts", samples), "the verdicts")
        await self._works("sampler", partial(self._has_entries, "batches", number), "the batch")
        await self._works("learner", partial(self._has_archived, groups), "the archive of the step")

    async def _works(self, service: str, fact: Callable[[], Awaitable[bool]], what: str) -> None:
        client = self._clients[service]
        client.open()
        await until(fact, self._tasks, what)
        client.close()
        await until(partial(_waits, client), self._tasks, f"the {service} to read no more")

    async def _has_dispatched(self, groups: int) -> bool:
        return int(await self._redis.hget(self._keys.lane(Lane.TRAIN).counters, "dispatched") or 0) >= groups

    async def _has_entries(self, stream: str, entries: int) -> bool:
        return (await self.entries())[stream] >= entries

    async def _has_archived(self, groups: int) -> bool:
        return int(await self._redis.llen(self._keys.lane(Lane.TRAIN).released)) >= groups

    async def entries(self) -> Counter[str]:
        """How many entries each stream of the run has ever had."""
        found = Counter[str]()
        async for key in self._redis.scan_iter(match=self._keys.key("*"), count=1000, _type="stream"):
            name = key.decode().removeprefix(self._keys.key(""))
            found[name] = int((await self._redis.xinfo_stream(key))["entries-added"])
        return found

    async def now(self) -> Step:
        """All that was sent and added so far."""
        return Step({name: Counter(each.calls) for name, each in self._clients.items()}, await self.entries())


async def _waits(client: CountedClient) -> bool:
    return client.waits


async def trained_step(redis: Any, url: str, run: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Step:
    """What the second rollout step of a run takes: the first one has what only the start of a service sends."""
    monkeypatch.setenv("PENSTOCK_RUNS", str(folder))
    monkeypatch.setattr(verifier.service, "Sandbox", StubSandbox)
    monkeypatch.setattr(archivist, "PART_S", 0.0)  # all groups of a step are released together, and archived at once
    monkeypatch.setattr(audit, "EVERY_S", NEVER_S)  # else it looks at groups when the machine is slow
    limits = {"groups_per_step": GROUPS, "max_inflight_groups": GROUPS, "max_staleness": 0, "rollout_steps": 4}
    questions = write_questions(folder / "questions.jsonl", 2 * GROUPS)
    document = recipe(questions, GROUPS, group_size=SAMPLES, checkpoint_every=100, lease_s=NEVER_S, **limits)
    keys = RunKeys(run)
    async with _services(url, keys, document) as (clients, tasks):
        pipeline = _Pipeline(redis, keys, clients, tasks)
        await pipeline.step(1)
        before = await pipeline.now()
        await pipeline.step(2)
        after = await pipeline.now()
    calls = {name: after.calls[name] - before.calls[name] for name in clients}
    return Step(calls, after.entries - before.entries)


@asynccontextmanager
async def _services(
    url: str, keys: RunKeys, document: dict[str, Any]
) -> AsyncIterator[tuple[dict[str, CountedClient], list[Any]]]:
    services = {
        "sampler": SamplerService(),
        "rollout": StubRollout(Answers()),
        "verifier": verifier.service.VerifierService(),
        "learner": StubLearner(),
    }
    async with AsyncExitStack() as stack:
        clients, work = {}, []
        for name, service in services.items():
            clients[name] = client = await CountedClient.connect(url, keys)
            stack.push_async_callback(client.redis.aclose)
            context = await stack.enter_async_context(service_context(client.redis, keys.run, document, name))
            work.append(service.run(context))
        tasks = await stack.enter_async_context(running(*work))
        yield clients, tasks
