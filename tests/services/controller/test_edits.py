"""Edits in flight and priorities, as the controller and the services see them."""

import asyncio

from services.contracts import RunState
from services.process.hosting import Context
from services.settings import parse_recipe
from services.streams.keys import RunKeys
from services.streams.runs.edits import check_edit, edit_run
from services.streams.runs.queue import read_queue
from services.streams.state.heartbeat import Heartbeat
from services.streams.state.runs import RunRecords
from tests.harness.small_run import recipe_document, service_context
from tests.services.controller.hand_cluster import controlled, controlling, replica, until, until_state

RECIPE = parse_recipe(recipe_document("/model"))


async def edit(redis, run, **wanted):
    record = await RunRecords(redis).get(run)
    wanted = {name.replace("__", "."): value for name, value in wanted.items()}
    return await edit_run(redis, record, check_edit(record, wanted), "test")


async def test_fleets_follow_an_edit(redis, run_id, tmp_path):
    async with (
        controlled(redis, run_id, tmp_path) as (records, cluster),
        Heartbeat(redis, replica(run_id)),
    ):
        await until_state(records, run_id, RunState.RUNNING)
        await edit(redis, run_id, rollout__replicas=3, verifier__replicas=2)
        await until(lambda: {"scale 3", "scale verifier 2"} <= {*cluster.requests})
        cluster.failing["scale verifier"] = [TimeoutError("no answer")]
        await edit(redis, run_id, verifier__replicas=4)
        await until(lambda: cluster.requests.count("scale verifier 4") == 2)


async def test_a_service_takes_over_edits_but_no_resumption(redis, run_id):
    records = RunRecords(redis)
    async with service_context(redis, run_id, recipe_document("/model"), "sampler") as context:
        assert isinstance(context, Context)
        before = context.record
        await context.refresh()
        assert context.record is before
        await edit(redis, run_id, limits__max_staleness=3)
        await records.request_cancel(run_id)
        await context.refresh()
        assert context.record.recipe.limits.max_staleness == 3
        assert not context.record.cancel_requested, "all else stays as it was at the start"
        await records.transition(run_id, RunState.FAILED, "test")
        await edit(redis, run_id, limits__max_staleness=5)
        await records.resume(run_id)
        await context.refresh()
        assert context.record.recipe.limits.max_staleness == 3, "the resumed run has a sampler of its own"
        for field, value in (("recipe", "{"), ("revision", "x")):
            await redis.hset(RunKeys(run_id).record, field, value)
            await context.refresh()
        await redis.unlink(RunKeys(run_id).record)
        await context.refresh()
        assert context.record.recipe.limits.max_staleness == 3


async def test_the_run_with_the_highest_priority_is_placed_first(own_server, tmp_path):
    _, redis = own_server
    records = RunRecords(redis)
    async with controlling(redis, tmp_path) as cluster:
        cluster.short = "needs 8 GPUs; the cluster has 8, and 0 are free"
        cluster.too_large = {"giant"}
        for run, priority in (("giant", 100), ("old", 0), ("young", 0), ("urgent", 5)):
            await records.create(run, RECIPE, priority=priority)
        await seen(redis, dict.fromkeys(("giant", "urgent", "old", "young"), cluster.short))
        # "urgent" alone still lacks room: the others wait for it, also if they would fit.
        cluster.room = {"old", "young"}
        behind = dict.fromkeys(("old", "young"), "run 'urgent' is placed first (priority 5)")
        await seen(redis, {"urgent": cluster.short, **behind})
        await edit(redis, "young", priority=9)
        await until_state(records, "young", RunState.STARTING)
        assert (await records.get("old")).state is RunState.QUEUED
        cluster.room = {"old", "urgent"}
        await until_state(records, "old", RunState.STARTING)
        changes = [(await records.get(run)).history[1].at for run in ("young", "urgent", "old")]
        assert changes == sorted(changes)
        assert (await records.get("giant")).state is RunState.QUEUED


async def seen(redis, expected):
    """Wait until the queue shows why these runs wait."""
    async with asyncio.timeout(30):
        while True:
            waits = {queued.record.id: queued.waits_for for queued in await read_queue(redis)}
            if expected.items() <= waits.items():
                return
            await asyncio.sleep(0.1)
