"""A run is charged for its live processes, busy or idle, and ends when its budget is spent."""

import asyncio
import json

import pytest

from services.contracts import ProcessInfo, RunState, Wait
from services.controller.fleet import accounts as accounts_module
from services.controller.fleet.accounts import LONGEST_GAP_S, Accounts
from services.controller.retry import RunFailedError
from services.controller.run_context import RunContext
from services.settings import Prices, parse_recipe
from services.settings.operator.prices import VARIABLE
from services.streams.connection.functions import FencedError
from services.streams.keys import RunKeys
from services.streams.runs.edits import check_edit, edit_run
from services.streams.runs.ledger import BUSY, COST, CPU_MS, GPU_MS, charged_field, read_ledger
from services.streams.state.heartbeat import Heartbeat
from services.streams.state.ownership import become_owner
from services.streams.state.runs import OWNER, RunRecords
from tests.harness.small_run import recipe_document
from tests.services.controller.hand_cluster import HandCluster, controlled, events_of, replica, until_state

STARTED = 1_000_000.0
GPUS = {"rollout": {"gpus": 1, "cpus": 2.0}, "learner": {"gpus": 0.5, "cpus": 1.0}, "verifier": {"cpus": 4.0}}
PRICES = Prices(currency="USD", gpu_hour=3.6, cpu_hour=0.36)


class Clock:
    """A host's clock that the test moves."""

    def __init__(self):
        self.now = STARTED

    def time(self):
        return self.now

    monotonic = time


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(accounts_module, "time", found)
    return found


async def charged_run(redis, run, tmp_path, **limits):
    """A run's context and record, as a new controller has them."""
    records = RunRecords(redis)
    if not await records.exists(run):
        await records.create(run, parse_recipe(recipe_document("/model", **GPUS, limits=limits)))
    context = RunContext(redis, records, HandCluster(run), tmp_path / run, run, asyncio.Event(), prices=PRICES)
    context.fence = await become_owner(redis, context.keys, OWNER)
    return context, await records.get(run)


def process(service, idle_s, state="ready", started_at=STARTED, **others):
    place = {"host": "h", "pid": 1, "metrics": "h:1"}
    return ProcessInfo(
        id=f"{service}-1",
        service=service,
        run="r",
        **place,
        state=state,
        idle_s=idle_s,
        started_at=started_at,
        **others,
    )


async def charged(context, *what):
    """What was charged, by service and condition."""
    ledger = await read_ledger(context.redis, context.keys)
    kind = ".".join(what)
    return {field.removesuffix(f".{kind}"): n for field, n in ledger.charged.items() if field.endswith(kind) and n}


async def test_each_process_is_charged_while_busy_and_while_idle(redis, run_id, tmp_path, clock):
    context, record = await charged_run(redis, run_id, tmp_path)
    accounts = Accounts(context)
    for now, idle_s in ((10.0, 4.0), (11.0, 4.5), (20.0, 4.5)):
        clock.now = STARTED + now
        services = ("rollout", "learner", "verifier", "sampler")
        await accounts.look(record, [process(service, idle_s) for service in services])
    assert await charged(context, GPU_MS) == {
        "rollout.busy": 15_500,
        "rollout.idle": 4_500,
        "learner.busy": 7_750,
        "learner.idle": 2_250,
    }
    assert (await charged(context, CPU_MS))["verifier.busy"] == 62_000
    clock.now += 5.0
    await accounts.close(record, discard=True)
    gpu_ms, cpu_ms = [sum((await charged(context, what)).values()) for what in (GPU_MS, CPU_MS)]
    assert (gpu_ms, cpu_ms) == (25_000 + 12_500, 7 * 25_000)
    cost = sum((await charged(context, COST, "USD")).values())
    assert cost == gpu_ms * 1_000 + cpu_ms * 100
    await accounts.close(record, discard=True)
    assert sum((await charged(context, GPU_MS)).values()) == gpu_ms, "its processes have ended"


async def test_a_process_that_loads_is_idle(redis, run_id, tmp_path, clock):
    context, record = await charged_run(redis, run_id, tmp_path)
    accounts = Accounts(context)
    for now, state in ((10.0, "starting"), (20.0, "ready")):
        clock.now = STARTED + now
        await accounts.look(record, [process("rollout", 0.0, state)])
    assert await charged(context, GPU_MS) == {"rollout.idle": 10_000, "rollout.busy": 10_000}


async def test_a_late_heartbeat_moves_no_time(redis, run_id, tmp_path, clock):
    context, record = await charged_run(redis, run_id, tmp_path)
    accounts = Accounts(context)
    for now, idle_s in ((2.0, 0.0), (4.0, 4.0), (6.0, 4.0), (8.0, 4.0)):
        clock.now = STARTED + now
        await accounts.look(record, [process("rollout", idle_s)])
    assert await charged(context, GPU_MS) == {"rollout.idle": 4_000, "rollout.busy": 4_000}


async def test_an_older_release_is_idle_as_it_says_it_waits(redis, run_id, tmp_path, clock):
    context, record = await charged_run(redis, run_id, tmp_path)
    waits = tuple(
        Wait(name=name, waits_for="w", since=STARTED, deadline_s=9.0, idle=idle)
        for name, idle in (("tasks", True), ("generation", False))
    )
    accounts = Accounts(context)
    for now, shown in ((10.0, waits[:1]), (20.0, waits), (30.0, ())):
        clock.now = STARTED + now
        await accounts.look(record, [process("rollout", None, waits=shown)])
    assert await charged(context, GPU_MS) == {"rollout.idle": 10_000, "rollout.busy": 20_000}


async def test_a_gap_is_charged_to_what_lived_through_it(redis, run_id, tmp_path, clock):
    """A controller that follows a dead one charges the processes that it finds, each from its start on."""
    context, record = await charged_run(redis, run_id, tmp_path)
    clock.now = STARTED + 10.0
    await Accounts(context).look(record, [process("rollout", 10.0)])
    context, record = await charged_run(redis, run_id, tmp_path)
    clock.now = STARTED + 110.0
    late = process("learner", 0.0, started_at=STARTED + 100.0)
    await Accounts(context).look(record, [process("rollout", 110.0), late])
    assert await charged(context, GPU_MS) == {"rollout.idle": 110_000, "learner.busy": 5_000}
    context, record = await charged_run(redis, run_id, tmp_path)
    clock.now += 100 * LONGEST_GAP_S
    await Accounts(context).look(record, [process("rollout", 110.0)])
    assert sum((await charged(context, GPU_MS)).values()) == 115_000 + 1000 * LONGEST_GAP_S, "the most at once"
    clock.now -= 1000.0
    await Accounts(context).look(record, [process("rollout", 110.0)])
    assert sum((await charged(context, GPU_MS)).values()) == 115_000 + 1000 * LONGEST_GAP_S, "the clock was set back"


async def test_a_previous_controller_charges_nothing(redis, run_id, tmp_path, clock):
    context, record = await charged_run(redis, run_id, tmp_path)
    await charged_run(redis, run_id, tmp_path)
    clock.now += 10.0
    with pytest.raises(FencedError):
        await Accounts(context).look(record, [process("rollout", 0.0)])
    assert await charged(context, GPU_MS) == {}


async def test_a_spent_budget_is_told_once_and_fails_the_run(redis, run_id, tmp_path, clock):
    context, record = await charged_run(redis, run_id, tmp_path, budget=0.05)
    accounts, told = Accounts(context), "limits.budget: 0.05 USD is spent (0.054)"
    clock.now += 35.0
    await accounts.look(record, [process("rollout", 0.0)])
    clock.now += 10.0
    with pytest.raises(RunFailedError) as failed:
        await accounts.look(record, [process("rollout", 0.0)])
    assert str(failed.value) == told
    assert await events_of(redis, run_id, "budget-spent") == [told]


async def test_a_run_whose_budget_is_spent_ends_and_can_continue(redis, run_id, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, '{"currency": "USD", "cpu_hour": 1.0}')
    limits = {"budget": 0.001}
    async with controlled(redis, run_id, tmp_path, limits=limits) as (records, cluster):
        async with Heartbeat(redis, replica(run_id)):
            record = await until_state(records, run_id, RunState.FAILED)
        assert record.reason.startswith("limits.budget: 0.001 USD is spent (1.00")
        assert cluster.requests[-1] == "stop", "its processes cost nothing any more"
        await edit_run(redis, record, check_edit(record, {"limits.budget": None}), "test")
        await records.resume(run_id)
        async with Heartbeat(redis, replica(run_id)):
            await until_state(records, run_id, RunState.RUNNING)
    summary = json.loads((tmp_path / run_id / "summary.json").read_text())
    assert summary["ledger"]["currency"] == "USD"
    assert summary["ledger"]["cost"] > limits["budget"]
    assert charged_field("rollout", BUSY, CPU_MS) in (await read_ledger(redis, RunKeys(run_id))).charged
