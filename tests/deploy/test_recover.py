"""The command that finds lost runs by their files, in a folder or a store, and takes them over."""

import asyncio
import json
import shutil

import pytest

from services.contracts import RunState
from services.settings import parse_recipe
from services.streams.connection.client import connect
from services.streams.state.runs import RunRecords
from tests.deploy.command_line import penstock
from tests.harness.free_ports import free_port
from tests.harness.servers.redis_servers import embedded_server
from tests.harness.servers.s3_server import BUCKET, S3Server
from tests.harness.small_run import recipe_document
from tests.services.api.test_adoption import written


@pytest.fixture
def url():
    with embedded_server() as server:
        yield f"redis://127.0.0.1:{server.port}/0"


@pytest.fixture(params=["folder", "store"])
def storage(request, tmp_path, monkeypatch):
    """Files of two runs, of one that never trained, and of another program."""
    runs = tmp_path / "runs"
    for run in ("lost-1", "lost-2", "known"):
        written(runs / run, run)
    (runs / "queued/logs").mkdir(parents=True)
    (runs / "queued/logs/sampler.log").write_text("x")
    written(runs / "models", "models")
    written(runs / "not a run's name", "x")
    monkeypatch.delenv("PENSTOCK_STORE", raising=False)
    monkeypatch.setenv("PENSTOCK_RUNS", str(runs))
    if request.param == "folder":
        yield
        return
    with S3Server(tmp_path / "s3", free_port()) as store:
        shutil.move(runs, store.object("platform"))
        for name, value in store.variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PENSTOCK_STORE", f"s3://{BUCKET}/platform")
        yield


def in_redis(url, use):
    async def with_records():
        redis = await connect(url)
        try:
            return await use(RunRecords(redis))
        finally:
            await redis.aclose()

    return asyncio.run(with_records())


def test_lost_runs_are_listed_and_adopted(storage, url):
    in_redis(url, lambda records: records.create("known", parse_recipe(recipe_document("/model"))))
    status, shown = penstock("recover", "--redis", url, "--json")
    assert status == 0, shown
    found = json.loads(shown)
    assert found == [{"run": run, "step": 2, "project": "default"} for run in ("lost-1", "lost-2")]
    status, shown = penstock("recover", "--redis", url)
    assert (status, shown.count("can be adopted")) == (0, 2)
    status, shown = penstock("recover", "--run", "lost-2", "--redis", url, "--adopt")
    assert status == 0, shown
    assert "penstock resume lost-2" in shown
    status, shown = penstock("recover", "--redis", url, "--adopt")
    assert "lost-2" not in shown
    assert in_redis(url, lambda records: records.get("lost-1")).state is RunState.FAILED
    assert penstock("recover", "--redis", url)[1].startswith("no run is lost")
    status, shown = penstock("recover", "--run", "known", "--run", "queued", "--redis", url, "--adopt")
    assert status == 1
    assert "missing: expected the folder of a run that has started to train" in shown
    assert len([line for line in shown.splitlines() if line.startswith(("known", "queued"))]) == 2
    status, shown = penstock("recover", "--run", "known", "--redis", url)
    assert status == 1
    assert "Redis has its record" in shown
    assert "can be adopted" not in shown


def test_a_process_without_storage_says_where_to_go(url, tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_RUNS", str(tmp_path / "none"))
    monkeypatch.delenv("PENSTOCK_STORE", raising=False)
    status, shown = penstock("recover", "--run", "lost", "--redis", url)
    assert status == 1
    assert "has no storage of runs; use `penstock recover` where the files are: on a cluster, in the cpu pod" in shown
    status, shown = penstock("recover", "--redis", "")
    assert (status, "--redis: '' is not valid: expected the address of Redis" in shown) == (2, True)
