"""Owns the tests of avoided places as the controller sees them: reported once, kept, shown, and made up for.

Must not need a cluster.
"""

import json
import time
from contextlib import AsyncExitStack

import pytest
from prometheus_client import REGISTRY

from services.contracts import ProcessInfo, RunState
from services.controller.fleet.avoiding import MOVES, TRIES, Avoiding
from services.controller.health import HealthMonitor
from services.settings import parse_recipe
from services.settings.cluster_limits import VARIABLE
from services.streams.keys import RunKeys
from services.streams.runs.node_problems import report_node
from services.streams.runs.places import AVOIDED, AVOIDED_S, AvoidedPlace, avoid, avoided_places, forget_place
from services.streams.state.events import EventLog
from services.streams.state.heartbeat import Heartbeat
from services.streams.state.runs import RunRecords
from services.waits import Waits
from tests.harness.small_run import recipe_document
from tests.services.controller.hand_cluster import HandCluster, controlled, events_of, until, until_state
from tests.services.controller.test_cluster_limits import FILE, ROLLOUT


def place(service="rollout", node="n", device="GPU-a", **fields):
    known = {"count": 3, "reason": "died before they were ready", "until": time.time() + AVOIDED_S}
    return AvoidedPlace(service=service, node=node, device=device, **known | fields)


def process(run, number, state, service="rollout"):
    where = {"host": "h", "pid": number, "metrics": "h:1"}
    return ProcessInfo(id=f"{service}-{number}", service=service, run=run, **where, state=state, version=0)


def value(name, **labels):
    return REGISTRY.get_sample_value(name, labels)


@pytest.fixture
def avoiding(redis, run_id):
    cluster = HandCluster(run_id)
    return Avoiding(redis, cluster, EventLog(redis, RunKeys(run_id), "controller"), run_id), cluster


async def test_a_used_up_place_is_reported_once_with_the_last_failure(redis, run_id, tmp_path, avoiding):
    async with controlled(redis, run_id, tmp_path):
        for service, text in (("rollout", "an older one"), ("rollout", "CUDA error: uncorrectable"), ("learner", "no")):
            await EventLog(redis, RunKeys(run_id), service).write("service-failed", text)
        looks, cluster = avoiding
        cluster.bad_places = [place()]
        await looks.look()
        await looks.look()
        [event] = await events_of(redis, run_id, "node-avoided")
        assert event.startswith("rollout avoids node n, device GPU-a until ")
        assert event.endswith(" UTC (3 failed there: died before they were ready; last: CUDA error: uncorrectable)")
        assert [found.place for found in cluster.avoided] == [place().place]
        assert value("penstock_avoided_places", run=run_id, service="rollout") == 1
        await redis.delete(RunKeys(run_id).places)
        cluster.bad_places = []
        await looks.look()
        assert cluster.avoided == []
        assert value("penstock_avoided_places", run=run_id, service="rollout") == 0


async def test_a_place_that_is_left_gives_the_run_more_time(redis, run_id, avoiding):
    looks, cluster = avoiding
    cluster.bad_places = [place(node="first")]
    assert not await looks.look(), "the previous controller may have avoided it"
    for number in range(MOVES):
        cluster.bad_places.append(place(node=f"n{number}"))
        assert [await looks.look(), await looks.look()] == [True, False]
    cluster.bad_places.append(place(node="one more"))
    assert not await looks.look(), "not without an end"


async def test_a_place_avoided_again_after_its_time_counts_as_new(redis, run_id, tmp_path, avoiding):
    looks, cluster = avoiding
    over = place(until=time.time() - 1)
    async with controlled(redis, run_id, tmp_path):
        await looks.look()
        for number in range(1, 3):
            cluster.bad_places = [place()]
            assert [await looks.look(), await looks.look()] == [True, False], "the run gets more time"
            assert len(await events_of(redis, run_id, "node-avoided")) == number
            assert not await avoid(redis, RunKeys(run_id), place())
            assert not await looks.look(), "it was avoided all the time"
            cluster.bad_places = []
            await redis.hset(RunKeys(run_id).places, over.name, over.model_dump_json())
            assert not await looks.look()
            assert cluster.avoided == []


async def test_a_resumed_run_forgets_places_without_a_proven_fault(redis, run_id, tmp_path):
    """Those of a recipe that failed everywhere: after it was mended, good devices must not be held."""
    keys, lost = RunKeys(run_id), place(node="b", kind="xid")
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        await until_state(records, run_id, RunState.STARTING)
        for each in (place(), place("learner", "c", ""), lost):
            await avoid(redis, keys, each)
        await redis.hset(keys.places, "rollout d ", "no JSON")
        cluster.fault = ["rollout fleet: 6 replicas in a row died before they were ready"]
        await until_state(records, run_id, RunState.FAILED)
        assert len(await redis.hkeys(keys.places)) == 4
        cluster.fault = []
        await records.resume(run_id)
        await until(lambda: cluster.requests.count("start /prepared") == 2)
    assert await redis.hkeys(keys.places) == [lost.name.encode()]
    assert cluster.avoided_at_start == [lost]


async def test_a_place_has_one_name_and_can_be_forgotten_by_it(redis, run_id):
    keys = RunKeys(run_id)
    node, device = place("learner", "a", ""), place()
    assert [node.name, device.name] == ["learner a", "rollout n GPU-a"]
    assert [await avoid(redis, keys, each) for each in (node, device, node)] == [True, True, False]
    assert {found.name for found in await avoided_places(redis, keys)} == {node.name, device.name}
    assert [await forget_place(redis, keys, name) for name in (node.name, node.name, "rollout n")] == [
        True,
        False,
        False,
    ]
    assert await avoided_places(redis, keys) == [device]


async def test_a_check_reports_that_a_place_is_left(redis, run_id, avoiding):
    _, cluster = avoiding
    record = await RunRecords(redis).create(run_id, parse_recipe(recipe_document("/model")))
    health = HealthMonitor(redis, cluster, EventLog(redis, RunKeys(run_id), "controller"), Waits(), record)
    assert not await health.check(record, [])
    cluster.bad_places = [place()]
    assert await health.check(record, []), "deadlines move"
    assert not await health.check(record, [])
    health.close()


async def test_a_start_that_fails_names_the_places_and_the_failure(redis, run_id, tmp_path):
    cluster = HandCluster(run_id)
    cluster.bad_places = [place()]
    async with controlled(redis, run_id, tmp_path, cluster, limits={"startup_timeout_s": 2.0}) as (records, _):
        await until(lambda: cluster.looks)
        await EventLog(redis, RunKeys(run_id), "rollout").write("service-failed", "rollout-1 failed: no such attention")
        reason = (await until_state(records, run_id, RunState.FAILED)).reason
    assert reason.startswith("not ready within 2 s")
    assert "; rollout avoids node n, device GPU-a until" in reason
    assert reason.endswith("; the last failure: rollout-1 failed: no such attention")


async def test_a_run_that_is_placed_again_keeps_avoiding(redis, run_id, tmp_path):
    cluster = HandCluster(run_id)
    await avoid(redis, RunKeys(run_id), place("learner", "a", ""))
    async with controlled(redis, run_id, tmp_path, cluster):
        await until(lambda: "start /prepared" in cluster.requests)
    assert [found.node for found in cluster.avoided_at_start] == ["a"]


async def test_nodes_that_cannot_be_found_do_not_fail_the_run(redis, run_id, tmp_path):
    cluster = HandCluster(run_id)
    cluster.failing["blamed"] = [RuntimeError("the control store does not answer")]
    async with controlled(redis, run_id, tmp_path, cluster) as (records, _), AsyncExitStack() as living:
        await living.enter_async_context(Heartbeat(redis, process(run_id, 1, "ready")))
        await until_state(records, run_id, RunState.RUNNING)
        cluster.broken_learner = "learner rank 0: its process died"
        await until(lambda: "restart learner" in cluster.requests)
        assert cluster.failing["blamed"] == []
        assert (await records.get(run_id)).state is RunState.RUNNING


async def test_verifiers_that_hold_are_made_up_for_too(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path) as (records, cluster), AsyncExitStack() as living:
        await living.enter_async_context(Heartbeat(redis, process(run_id, 1, "ready")))
        await until_state(records, run_id, RunState.RUNNING)
        wanted = (await records.get(run_id)).recipe.verifier.replicas
        for number in range(wanted + 1):
            await living.enter_async_context(Heartbeat(redis, process(run_id, 2 + number, AVOIDED, "verifier")))
        await until(lambda: f"scale verifier {2 * wanted}" in cluster.requests)
        looks = cluster.looks
        await until(lambda: cluster.looks > looks + 1)
        assert not any(request.startswith("scale ") and "verifier" not in request for request in cluster.requests)
        assert [request for request in cluster.requests if "scale verifier" in request][-1] == (
            f"scale verifier {2 * wanted}"
        ), "a node has room for many replicas that only hold"


async def test_a_lost_device_is_shown_while_it_is_avoided(redis, run_id):
    """By each run that avoids it: the end of one run does not hide it from another."""
    labels = {"service": "rollout", "node": f"node-of-{run_id}", "device": "GPU-a", "kind": "xid"}
    lost = place(node=labels["node"], kind="xid", until=time.time() + 0.5)
    runs = [run_id, f"{run_id}-b"]
    looks = [Avoiding(redis, HandCluster(run), EventLog(redis, RunKeys(run), "controller"), run) for run in runs]
    for run, looking in zip(runs, looks, strict=True):
        await avoid(redis, RunKeys(run), lost)
        await looking.look()
        await looking.look()
    assert [value("penstock_lost_gpus", run=run, **labels) for run in runs] == [1, 1]
    looks[1].close()
    assert [value("penstock_lost_gpus", run=run, **labels) for run in runs] == [1, None]
    await until(lambda: time.time() > lost.until)
    await looks[0].look()
    assert value("penstock_lost_gpus", run=run_id, **labels) is None
    assert await avoided_places(redis, RunKeys(run_id)) == []
    await redis.delete(RunKeys(runs[1]).places)


async def test_ranks_leave_a_node_after_failures_in_a_row(redis, run_id, tmp_path, avoiding):
    looks, cluster = avoiding
    here, there = place("learner", "a", "", count=1), place("learner", "b", "", count=1)
    async with controlled(redis, run_id, tmp_path):
        for _ in range(TRIES - 1):
            await looks.blame([here], forgiven=False)
        await looks.blame([here], forgiven=True)  # it had worked since
        await looks.blame([there], forgiven=False)
        for _ in range(TRIES - 1):
            await looks.blame([here], forgiven=False)
            assert cluster.avoided == []
        await looks.blame([here], forgiven=False)
        assert [(found.node, found.count) for found in cluster.avoided] == [("a", TRIES)]
        assert len(await events_of(redis, run_id, "node-avoided")) == 1


async def test_the_fleet_makes_up_for_held_places_within_the_limits(api, redis, run_id, tmp_path, monkeypatch):
    path = tmp_path / "bounds.json"
    path.write_text(json.dumps({**FILE, "rollout": {"pods": 3, "cpus": 4, "gpus": 1}}))
    monkeypatch.setenv(VARIABLE, str(path))
    sections = {"rollout": {**ROLLOUT, "replicas": 2}, "learner": {"gpus": 1.0, "cpus": 4.0}}
    async with controlled(redis, run_id, tmp_path, **sections) as (records, cluster), AsyncExitStack() as living:
        await living.enter_async_context(Heartbeat(redis, process(run_id, 1, "ready")))
        await until_state(records, run_id, RunState.RUNNING)
        await living.enter_async_context(Heartbeat(redis, process(run_id, 2, AVOIDED)))
        await until(lambda: "scale 3" in cluster.requests)
        await living.enter_async_context(Heartbeat(redis, process(run_id, 3, AVOIDED)))
        await avoid(redis, RunKeys(run_id), place())
        await until(lambda: cluster.avoided)
        looks = cluster.looks
        await until(lambda: cluster.looks > looks + 1)
        assert cluster.requests[-1] == "scale 3", "the chart allows three pods"
        assert (await records.get(run_id)).rollout_replicas == 2
        await report_node(str(redis_url_of(redis)), "rollout", "m", "this node cannot run GPU processes: no driver")
        alerts = (await api.get(f"/v1/runs/{run_id}")).json()["alerts"]
        assert any(text.endswith("before they were ready); 1 of 2 replicas are ready") for text in alerts), alerts
        assert "rollout: node m: this node cannot run GPU processes: no driver" in alerts
    assert value("penstock_processes", run=run_id, service="rollout", state=AVOIDED) is None, "the run is released"


def redis_url_of(redis):
    pool = redis.connection_pool.connection_kwargs
    return f"redis://{pool['host']}:{pool['port']}/0"
