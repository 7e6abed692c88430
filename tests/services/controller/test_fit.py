"""A run whose model cannot fit fails before a service of it starts, also when it is resumed."""

from services.contracts import RunState
from tests.services.controller.hand_cluster import HandCluster, controlled, until_state

REFUSAL = "learner.zero_stage: 1 is not valid: expected a stage that fits"


async def test_a_model_that_does_not_fit_starts_nothing(redis, run_id, tmp_path):
    cluster = HandCluster(run_id)
    cluster.failing["memory"] = [RuntimeError(REFUSAL), RuntimeError(REFUSAL)]
    async with controlled(redis, run_id, tmp_path, cluster) as (records, _):
        record = await until_state(records, run_id, RunState.FAILED)
        assert record.reason.startswith(REFUSAL)
        await records.resume(run_id)
        while cluster.failing["memory"]:
            await until_state(records, run_id, RunState.FAILED)
        record = await until_state(records, run_id, RunState.FAILED)
        assert record.reason.startswith(REFUSAL)
    assert cluster.requests.count("prepare") == 1, "the resumed run has its model already"
    assert not [request for request in cluster.requests if request.startswith("start")]
