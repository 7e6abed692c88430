"""Owns what the controller's tests share: a cluster that the test controls, a submitted run, processes with heartbeats.

Must not be used outside tests.
"""

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager

from services.contracts import EvaluationRecord, ProcessInfo, RunState
from services.controller.service import Controller
from services.settings import parse_recipe
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog, append_message
from services.streams.state.heartbeat import Heartbeat
from services.streams.state.runs import RunRecords
from tests.harness.small_run import recipe_document


class HandCluster:
    """Records its requests, and fails as the test chooses. `failing`: the errors of the next requests by name."""

    def __init__(self, only):
        self.only = only
        self.requests = []
        self.fault = []
        self.broken_learner = None
        self.ready = set()
        self.short = None
        self.too_large, self.room = set(), set()
        self.failing = {}
        self.looks = 0
        self.avoided, self.bad_places, self.behind = [], [], []

    def request(self, name, detail=""):
        self.requests.append(f"{name} {detail}".strip())
        if self.failing.get(name):
            raise self.failing[name].pop(0)

    async def prepare_model(self, record):
        self.request("prepare")
        return "/prepared"

    async def check_memory(self, record):
        if self.failing.get("memory"):
            raise self.failing["memory"].pop(0)

    async def start(self, record):
        self.avoided_at_start = list(self.avoided)
        self.request("start", record.model_path)

    async def scale_rollout(self, run, replicas):
        self.request("scale", replicas)

    async def scale_verifier(self, run, replicas):
        self.request("scale verifier", replicas)

    async def faults(self, run, ready, joining):
        self.looks += 1
        if self.failing.get("faults"):
            raise self.failing["faults"].pop(0)
        self.ready = set(ready)
        return self.fault

    async def avoid(self, run, places):
        self.avoided = list(places)

    async def used_up(self, run):
        names = [place.place for place in self.avoided]
        return [place for place in self.bad_places if place.place not in names]

    async def blamed(self, record):
        if self.failing.get("blamed"):
            raise self.failing["blamed"].pop(0)
        return self.behind

    async def learner_fault(self, run):
        return self.broken_learner

    async def restart_learner(self, record):
        self.broken_learner = None  # half of a restart may hide the fault
        self.request("restart learner")

    async def restart_sampler(self, run):
        self.request("restart sampler")

    async def shortage(self, record):
        if self.failing.get("shortage"):
            raise self.failing["shortage"].pop(0)
        return None if record.id in self.room else self.short

    async def fits_alone(self, record):
        return record.id not in self.too_large

    async def stop(self, run, deadline_s):
        self.request("stop")


@asynccontextmanager
async def controlled(redis, run, tmp_path, cluster=None, files=None, **sections):
    """A submitted run under a controller that sees no other run."""
    records = RunRecords(redis)
    for record in await records.active():
        if not record.state.ended:
            await records.transition(record.id, RunState.CANCELLED, "left by another test")
    await records.create(run, parse_recipe(recipe_document("/model", **sections)), files)
    cluster = cluster or HandCluster(run)
    stopping = asyncio.Event()
    loop = asyncio.create_task(Controller(redis, cluster, tmp_path).run(stopping))
    try:
        yield records, cluster
    finally:
        stopping.set()
        await loop


@asynccontextmanager
async def controlling(redis, folder):
    """A controller of all runs, and its cluster."""
    cluster, stopping = HandCluster(""), asyncio.Event()
    loop = asyncio.create_task(Controller(redis, cluster, folder).run(stopping))
    try:
        yield cluster
    finally:
        stopping.set()
        await loop


async def until_gone(records, run):
    ends = time.monotonic() + 60
    while await records.exists(run):
        assert time.monotonic() < ends, f"{run} is not deleted"
        await asyncio.sleep(0.05)


async def until_state(records, run, *states):
    ends = time.monotonic() + 90
    record = None
    while record is None or record.state not in states:
        assert time.monotonic() < ends, f"{run} is not {states}: {record}"
        await asyncio.sleep(0.05)
        record = await records.get(run) if await records.exists(run) else None
    return record


def replica(run, state="ready", version=0):
    place = {"host": "h", "pid": 1, "metrics": "h:1"}
    return ProcessInfo(id="rollout-1", service="rollout", run=run, **place, state=state, version=version)


async def commit(redis, run, step):
    """Write the part of a committed step that the controller reads."""
    await redis.hset(RunKeys(run).policy, mapping={"version": step + 2, "step": step})


async def evaluate(redis, run, name, accuracy, kind="held-out"):
    record = EvaluationRecord(
        name=name,
        set=kind,
        version=0,
        prompts=8,
        samples_per_prompt=2,
        accuracy=accuracy,
        standard_error=0.1,
        unknown=0,
    )
    await append_message(redis, RunKeys(run), RunKeys(run).evaluations, record, 0)


async def until(condition, deadline_s=90.0):
    """Wait for a condition; fails at the deadline."""
    ends = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < ends
        await asyncio.sleep(0.05)


async def events_of(redis, run, phase):
    return [event.text for _, event in await EventLog(redis, RunKeys(run), "test").events() if event.phase == phase]


async def first_event(redis, run, phase):
    """The text of the first event of a phase, once there is one."""
    ends = time.monotonic() + 90
    while not (texts := await events_of(redis, run, phase)):
        assert time.monotonic() < ends, f"no event {phase!r}"
        await asyncio.sleep(0.05)
    return texts[0]


@asynccontextmanager
async def present(redis, run, **processes):
    """Heartbeats of services that are ready, by id."""
    async with AsyncExitStack() as stack:
        heartbeats = {}
        for pid, (name, service) in enumerate(processes.items(), 100):
            place = {"host": "h", "pid": pid, "metrics": "h:1"}
            info = ProcessInfo(id=name, service=service, run=run, **place, state="ready")
            heartbeats[name] = await stack.enter_async_context(Heartbeat(redis, info))
        yield heartbeats


async def silence(heartbeat):
    """Stop a heartbeat, as if its process had stopped."""
    await heartbeat.__aexit__()
