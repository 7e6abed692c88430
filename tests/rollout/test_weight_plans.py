"""Which weight plans a replica follows."""

from typing import Any

from rollout.weight_sync import WeightFollower
from services.contracts import EPOCH_SHIFT, WeightPlan
from services.streams.state.events import EventLog
from services.streams.state.policy_history import History
from tests.harness.small_run import recipe_document, service_context


async def test_a_plan_with_an_impossible_generation_is_rejected(redis: Any, run_id: str) -> None:
    async with service_context(redis, run_id, recipe_document("/none"), "rollout") as context:
        learner = await History.fenced(redis, context.keys, "learner")
        true = WeightPlan(
            generation=(learner.epoch << EPOCH_SHIFT) + 1,
            version=1,
            host="h",
            port=1,
            world=2,
            members={context.heartbeat.info.id: 1},
            timeout_s=1.0,
        )
        hostile = true.model_copy(update={"generation": (learner.epoch + 1) << EPOCH_SHIFT, "version": 9})
        await redis.xadd(context.keys.weight_plans, {"m": hostile.model_dump_json()})
        await learner.publish_plan(true)
        follower = WeightFollower(context, None)  # type: ignore[arg-type]
        await follower._read_plans(0.0)
        assert follower._next == true
        [(_, letter)] = await EventLog(redis, context.keys, "test").dead_letters()
    assert letter.reason == f"no learner formed group {hostile.generation}"
