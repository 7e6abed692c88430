"""Which weight plans a replica follows, and how it learns that one is received."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
import uvloop

from rollout.staging import Staging, StagingOptions
from rollout.weight_sync import EndedStagings, WeightFollower
from services.contracts import EPOCH_SHIFT, WeightManifest, WeightPlan
from services.streams.state.events import EventLog
from services.streams.state.policy_history import History
from tests.harness.free_ports import free_port
from tests.harness.small_run import recipe_document, service_context

HOST = "127.0.0.1"


def plan_of(learner: History, number: int, member: str) -> WeightPlan:
    """The plan of a learner's broadcast group, counted from 1."""
    generation = (learner.fence.epoch << EPOCH_SHIFT) + number
    members = {member: 1}
    return WeightPlan(generation=generation, version=1, host="h", port=1, world=2, members=members, timeout_s=1.0)


async def test_a_learner_that_gets_a_lost_epoch_is_followed(redis: Any, run_id: str) -> None:
    async with service_context(redis, run_id, recipe_document("/none"), "rollout") as context:
        member, follower = context.heartbeat.info.id, WeightFollower(context, None)  # type: ignore[arg-type]
        first = await History.fenced(redis, context.keys, "learner")
        await first.publish_plan(plan_of(first, 3, member))
        await follower._read_plans(0.0)
        await redis.delete(context.keys.epoch("learner"))
        second = await History.fenced(redis, context.keys, "learner")
        await second.publish_plan(plan_of(second, 1, member))
        await follower._read_plans(0.0)
        assert follower._next == plan_of(second, 1, member)
        await redis.xadd(context.keys.weight_plans, {"m": plan_of(second, 0, member).model_dump_json()})
        await follower._read_plans(0.0)
        assert follower._next == plan_of(second, 1, member)


async def test_a_plan_with_an_impossible_generation_is_rejected(redis: Any, run_id: str) -> None:
    async with service_context(redis, run_id, recipe_document("/none"), "rollout") as context:
        learner = await History.fenced(redis, context.keys, "learner")
        true = plan_of(learner, 1, context.heartbeat.info.id)
        hostile = true.model_copy(update={"generation": (learner.fence.epoch + 1) << EPOCH_SHIFT, "version": 9})
        await redis.xadd(context.keys.weight_plans, {"m": hostile.model_dump_json()})
        await learner.publish_plan(true)
        follower = WeightFollower(context, None)  # type: ignore[arg-type]
        await follower._read_plans(0.0)
        assert follower._next == true
        [(_, letter)] = await EventLog(redis, context.keys, "test").dead_letters()
    assert letter.reason == f"no learner formed group {hostile.generation}"


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_worker_reports_the_end_of_its_staging(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """So that a replica need not ask its engine. Ray Serve runs replicas on uvloop."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_report_an_end())


async def _report_an_end() -> None:
    """Of stagings that fail, to a replica that listens; one that does not listen any more is no failure."""
    plan = WeightPlan(generation=1, version=1, host=HOST, port=free_port(), world=2, members={"r": 1}, timeout_s=0.5)
    with EndedStagings.listening() as stagings:
        for listener in (stagings.address, "\0nobody", ""):
            options = StagingOptions(1, "gloo", torch.device("cpu"), listener=listener)
            staging = Staging(options, plan, WeightManifest(buckets=()), None)
            await asyncio.to_thread(staging._thread.join, 60)
            assert staging.progress.phase == "failed", "no learner serves the plan"
            async with asyncio.timeout(10):
                await stagings.ended.wait()
