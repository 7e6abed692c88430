"""Owns the tests of the cluster's limits: which runs and requests fit, and that a changed file takes effect at once.

Must not need a cluster.
"""

import json
from dataclasses import replace

import pytest

from services.contracts import RunState
from services.controller.fleet.capacity import beside, shortage
from services.settings import (
    ClusterLimits,
    ClusterLimitsError,
    ResourceRequest,
    load_cluster_limits,
    parse_recipe,
    resource_requests,
)
from services.settings.cluster_limits import VARIABLE, RoleLimits
from services.streams.state.heartbeat import Heartbeat
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import RunRecords
from tests.harness.small_run import recipe_document
from tests.services.controller.hand_cluster import controlled, events_of, first_event, replica, until, until_state

FILE = {
    "cpu": {"pods": 1, "cpus": 2, "gpus": 0},
    "verifier": {"pods": 1, "cpus": 2, "gpus": 0},
    "rollout": {"pods": 3, "cpus": 8, "gpus": 2},
    "learner": {"pods": 1, "cpus": 16, "gpus": 8},
}
ROLLOUT = {"cpus": 4.0, "gpus": 1.0}


def limits(**roles):
    return ClusterLimits.model_validate({**FILE, **roles})


def record(name, state=RunState.QUEUED, at=1.0, replicas=1, ranks=1):
    recipe = parse_recipe(
        recipe_document("/model", rollout=ROLLOUT, learner={"cpus": 4.0, "gpus": 1.0, "ranks": ranks})
    )
    return RunRecord(name, recipe.model_dump_json().encode(), state, replicas, False, at, (), None, None, None)


def test_replicas_for_held_places_leave_other_runs_their_room():
    def most(*others, role="rollout"):
        return beside(limits(), record("r", RunState.RUNNING), others, role, 1, 9)

    assert most() == 6
    assert most(record("r", RunState.RUNNING, replicas=5)) == 6, "it is this run"
    assert most(record("o", RunState.RUNNING, replicas=4)) == 2
    assert most(record("o", RunState.PAUSED, replicas=6)) == 1, "what was requested stays"
    assert most(record("o", replicas=4), record("p", RunState.FAILED, replicas=4)) == 6, "they hold nothing"
    verifier = record("r").recipe.verifier
    assert most(role="verifier") == min(9, int(2 / verifier.cpus + 1e-6))


@pytest.mark.parametrize(
    ("role", "resources", "most"),
    [
        ((3, 8, 2), (4, 1), 6),
        ((3, 8, 2), (1, 2), 3),
        ((3, 8, 2), (9, 0), 0),
        ((2, 1, 0), (0.1, 0), 20),
        ((2, 8, 0), (1, 1), 0),
        ((2, 8, 0), (0, 0), None),
        ((0, 8, 0), (0, 0), 0),
    ],
)
def test_most_processes_of_a_role(role, resources, most):
    pods, cpus, gpus = role
    assert RoleLimits(pods=pods, cpus=cpus, gpus=gpus).most(ResourceRequest(*resources)) == most


def test_pods_are_packed_and_never_overfull():
    role = RoleLimits(pods=9, cpus=4, gpus=2)
    assert role.pods_for([]) == 0
    assert role.pods_for([ResourceRequest(0.1, 0)] * 40) == 1
    assert role.pods_for([ResourceRequest(0.1, 0)] * 41) == 2
    requests = [ResourceRequest(*request) for request in ((3, 0), (1, 2), (3, 0), (1, 0))]
    assert role.pods_for(requests) == 2
    assert role.pods_for([ResourceRequest(1, 2), ResourceRequest(1, 1), ResourceRequest(1, 1)]) == 2
    assert role.pods_for([ResourceRequest(1, 3)]) is None


@pytest.mark.parametrize(("share", "in_two"), [(1, 2), (0.6, 2), (0.5, 4), (0.4, 4), (0.3, 6), (0.25, 8), (0.1, 20)])
def test_a_share_of_a_gpu_is_on_one_gpu(share, in_two):
    role, request = RoleLimits(pods=1, cpus=99, gpus=2), ResourceRequest(1, share)
    assert role.most(request) == in_two
    assert role.pods_for([request] * in_two) == 1
    assert role.pods_for([request] * (in_two + 1)) == 2


SPOT = {"pods": 4, "cpus": 8, "gpus": 4, "gpu_memory_gib": 40}


def test_the_groups_of_a_role_add_up():
    role = RoleLimits.model_validate({"pods": 2, "cpus": 8, "gpus": 1, "gpu_memory_gib": 80, "groups": [SPOT]})
    assert (role.all_pods, role.least_gpu_memory_gib) == (6, 40)
    assert role.most(ResourceRequest(1, 1)) == 2 + 16
    assert role.most(ResourceRequest(1, 4)) == 4, "only the larger pods hold one"
    assert role.most(ResourceRequest(1, 5)) == 0
    assert role.most(ResourceRequest(0, 0)) is None
    assert role.pods_for([ResourceRequest(1, 1)] * 18) == 6
    assert role.pods_for([ResourceRequest(1, 1)] * 19) > 6
    assert role.pods_for([ResourceRequest(1, 4)] * 4) == 4
    assert role.pods_for([ResourceRequest(1, 4)] * 5) > 6, "two small pods do not replace a large one"
    assert role.pods_for([ResourceRequest(1, 5)]) is None
    assert str(role) == "at most 2 pods of 8 CPUs and 1 GPUs and 4 pods of 8 CPUs and 4 GPUs"


def test_a_run_may_use_every_group_of_a_role():
    three = record("a", replicas=3)
    one = {**FILE["rollout"], "pods": 1, "gpus": 1}
    assert "need 3 pods; the chart allows at most 1 pods" in shortage(limits(rollout=one), three, [])
    assert shortage(limits(rollout={**one, "groups": [SPOT]}), three, []) is None


def test_samplers_wait_for_room_in_the_cpu_pods():
    large = {"pods": 100, "cpus": 100, "gpus": 100}
    many = limits(cpu={"pods": 1, "cpus": 1, "gpus": 0}, rollout=large, learner=large, verifier=large)
    others = [record(f"r{number}", RunState.RUNNING) for number in range(4)]
    assert shortage(many, record("b"), others[:3]) is None
    assert shortage(many, record("b"), others).startswith("cpu: 1 x 0.25 CPUs, 0 GPUs have no room beside")


def test_room_is_what_other_runs_leave():
    running = record("a", RunState.RUNNING, replicas=5)
    assert shortage(limits(), record("b"), [running]) is None
    assert shortage(limits(), record("b", replicas=2), [running]).startswith("rollout: 2 x 4 CPUs, 1 GPUs have no room")
    assert shortage(limits(), record("b", replicas=2), [replace(running, state=RunState.SUCCEEDED)]) is None
    assert shortage(limits(), running, [running]) is None, "a run does not block itself"


def test_a_run_that_never_fits_does_not_block_later_runs():
    first, second = record("a", at=1.0, replicas=6), record("b", at=2.0, replicas=6)
    assert shortage(limits(), first, [first, second]) is None
    assert "no room beside" in shortage(limits(), second, [first, second])
    giant = record("g", at=0.5, replicas=7)
    assert shortage(limits(), giant, [giant]) == (
        "rollout: 7 x 4 CPUs, 1 GPUs need 4 pods; the chart allows at most 3 pods of 8 CPUs and 2 GPUs "
        "(rollout.maxReplicas)"
    )
    assert shortage(limits(), first, [giant, first]) is None


def test_a_process_that_no_pod_can_hold_is_named():
    reason = shortage(limits(rollout={"pods": 3, "cpus": 2, "gpus": 2}), record("a"), [])
    assert reason.startswith(
        "rollout: 1 x 4 CPUs, 1 GPUs: one of them is larger than a pod; the chart allows at most 3 pods"
    )


def test_an_evaluation_run_requests_no_learner():
    document = recipe_document("/model", limits={"rollout_steps": 0})
    evaluation = replace(record("a"), stored_recipe=parse_recipe(document).model_dump_json().encode())
    assert resource_requests(evaluation.recipe, 1)["learner"] == []


def test_a_file_without_the_memory_of_gpus_is_readable():
    assert limits().learner.gpu_memory_gib is None
    assert limits(learner={**FILE["learner"], "gpu_memory_gib": 79.6}).learner.gpu_memory_gib == 79.6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "readable file (No such file or directory)"),
        ("{", "Invalid JSON"),
        (json.dumps({**FILE, "rollout": {"pods": -1, "cpus": 1, "gpus": 0}}), "rollout.pods"),
        (json.dumps({**FILE, "learners": {}}), "learners"),
    ],
)
def test_an_unusable_file_is_named(tmp_path, monkeypatch, text, message):
    path = tmp_path / "bounds.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv(VARIABLE, str(path))
    with pytest.raises(
        ClusterLimitsError, match=r"PENSTOCK_BOUNDS: .* is not valid: expected the chart's bounds.json"
    ) as error:
        load_cluster_limits()
    assert message in str(error.value)


async def test_api_rejects_more_replicas_than_the_limits_allow(api, redis, run_id, tmp_path, monkeypatch):
    path = tmp_path / "bounds.json"
    path.write_text(json.dumps(FILE))
    monkeypatch.setenv(VARIABLE, str(path))
    await api.post("/v1/runs", json={"id": run_id, "recipe": recipe_document("/model", rollout=ROLLOUT)})
    assert (await api.patch(f"/v1/runs/{run_id}/scale", json={"rollout": 6})).status_code == 202
    rejected = await api.patch(f"/v1/runs/{run_id}/scale", json={"rollout": 7})
    assert (rejected.status_code, rejected.json()["detail"]) == (
        422,
        "rollout: 7 is not valid: expected 1 to 6; the chart allows rollout at most 3 pods of 8 CPUs and 2 GPUs, "
        "and a replica requests 4 CPUs, 1 GPUs (rollout.maxReplicas)",
    )
    assert (await RunRecords(redis).get(run_id)).rollout_replicas == 6
    path.write_text("no JSON")
    assert (await api.patch(f"/v1/runs/{run_id}/scale", json={"rollout": 2})).status_code == 503


def test_the_largest_pod_of_a_role_decides_what_is_too_large() -> None:
    spot = {"pods": 2, "cpus": 4, "gpus": 8}
    limits = ClusterLimits.model_validate({**FILE, "rollout": {**FILE["rollout"], "groups": [spot]}})

    def faults(**rollout: float) -> list[str]:
        return limits.size_faults(parse_recipe(recipe_document("/model", rollout=rollout)))

    assert faults(cpus=4.0, gpus=4.0, tensor_parallel=4) == []
    assert faults(cpus=8.0, gpus=1.0) == []
    (joint,) = faults(cpus=8.0, gpus=4.0, tensor_parallel=4)
    assert joint.startswith("rollout.replicas: 1 is not valid: expected none; the chart allows rollout at most 3 pods")
    (one,) = faults(cpus=4.0, gpus=16.0, tensor_parallel=16)
    assert one.startswith("rollout.gpus: 16.0 is not valid: expected at most 8, as a rollout pod of this cluster has")


SIZES = {
    "as much as fits": ({"rollout": {**ROLLOUT, "replicas": 6}, "learner": {"cpus": 2.0, "gpus": 1.0, "ranks": 8}}, []),
    "larger than a pod": (
        {"rollout": {"cpus": 9.0, "gpus": 4.0, "tensor_parallel": 4}, "verifier": {"cpus": 2.5}},
        [
            "rollout.cpus: 9.0 is not valid: expected at most 8, as a rollout pod of this cluster has (rollout.cpus)",
            "rollout.gpus: 4.0 is not valid: expected at most 2, as a rollout pod of this cluster has (rollout.gpus)",
            "verifier.cpus: 2.5 is not valid: expected at most 2, as a verifier pod of this cluster has "
            "(verifier.cpus)",
        ],
    ),
    "more than all pods hold": (
        {"rollout": {**ROLLOUT, "replicas": 7}, "learner": {"cpus": 4.0, "gpus": 1.0, "ranks": 5}},
        [
            "rollout.replicas: 7 is not valid: expected 1 to 6; the chart allows rollout at most 3 pods of 8 CPUs and "
            "2 GPUs (rollout.maxReplicas)",
            "learner.ranks: 5 is not valid: expected 1 to 4; the chart allows learner at most 1 pods of 16 CPUs and "
            "8 GPUs (learner.maxReplicas)",
        ],
    ),
}


@pytest.mark.parametrize("size", SIZES)
async def test_a_recipe_that_can_never_be_placed_is_rejected(api, run_id, tmp_path, monkeypatch, size):
    path = tmp_path / "bounds.json"
    monkeypatch.setenv(VARIABLE, str(path))
    sections, faults = SIZES[size]
    document = recipe_document("/model", **sections)
    path.write_text(json.dumps(FILE))
    checked = await api.post("/v1/recipes/check", json={"recipe": document})
    assert checked.json() == {"faults": faults}
    submitted = await api.post("/v1/runs", json={"id": run_id, "recipe": document})
    assert submitted.status_code == (422 if faults else 201)
    if faults:
        assert submitted.json()["detail"] == "\n".join(faults)


async def test_limits_that_are_unreadable_reject_no_size(api, run_id, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "bounds.json"))
    document = recipe_document("/model", rollout={"cpus": 900.0})
    assert (await api.post("/v1/runs", json={"id": run_id, "recipe": document})).status_code == 201


async def test_more_ranks_than_the_chart_allows_are_not_resumed(api, redis, run_id, tmp_path, monkeypatch):
    path = tmp_path / "bounds.json"
    path.write_text(json.dumps(FILE))
    monkeypatch.setenv(VARIABLE, str(path))
    sections = {"rollout": ROLLOUT, "learner": {"cpus": 4.0, "gpus": 1.0}}
    await api.post("/v1/runs", json={"id": run_id, "recipe": recipe_document("/model", **sections)})
    await RunRecords(redis).transition(run_id, RunState.CANCELLED, "by the test")
    rejected = await api.post(f"/v1/runs/{run_id}/resume", json={"learner_ranks": 5})
    assert rejected.status_code == 422
    assert rejected.json()["detail"].startswith("learner.ranks: 5 is not valid: expected 1 to 4; the chart allows")
    assert (await api.post(f"/v1/runs/{run_id}/resume", json={"learner_ranks": 4})).status_code == 202


async def test_the_fleet_stays_within_limits_that_change(redis, run_id, tmp_path, monkeypatch, caplog):
    path = tmp_path / "bounds.json"
    path.write_text(json.dumps(FILE))
    monkeypatch.setenv(VARIABLE, str(path))
    sections = {"rollout": {**ROLLOUT, "replicas": 2}, "learner": {"gpus": 1.0, "cpus": 4.0}}
    async with controlled(redis, run_id, tmp_path, **sections) as (records, cluster), Heartbeat(redis, replica(run_id)):
        await until_state(records, run_id, RunState.RUNNING)
        await records.scale(run_id, 6)
        await until(lambda: "scale 6" in cluster.requests)
        path.write_text(json.dumps({**FILE, "rollout": {"pods": 1, "cpus": 8, "gpus": 2}}))
        await until(lambda: "scale 2" in cluster.requests)
        requests = list(cluster.requests)
        path.write_text("half a fi")
        await until(lambda: any("keeps 2 replicas" in entry.getMessage() for entry in caplog.records))
        cluster.ready = None
        await until(lambda: cluster.ready is not None)  # the actions after that check are done
        assert cluster.requests == requests
        path.write_text(json.dumps(FILE))
        await until(lambda: cluster.requests[-1] == "scale 6")
        events = await events_of(redis, run_id, "scaling")
    assert "rollout 6 -> 2 replicas (6 are requested; the cluster's limits allow no more)" in events
    assert (await records.get(run_id)).rollout_replicas == 6, "the requested number stays"


async def test_a_run_waits_until_the_limits_are_raised(redis, run_id, tmp_path, monkeypatch):
    path = tmp_path / "bounds.json"
    path.write_text(json.dumps({**FILE, "learner": {"pods": 0, "cpus": 16, "gpus": 8}}))
    monkeypatch.setenv(VARIABLE, str(path))
    async with controlled(redis, run_id, tmp_path, learner={"gpus": 1.0}) as (records, cluster):
        assert "at most 0 pods" in await first_event(redis, run_id, "queued")
        assert cluster.requests == []
        path.write_text(json.dumps(FILE))
        await until_state(records, run_id, RunState.STARTING)


async def test_a_running_run_is_resumed_after_limits_were_lowered(redis, run_id, tmp_path, monkeypatch):
    path = tmp_path / "bounds.json"
    path.write_text(json.dumps({**FILE, "rollout": {"pods": 1, "cpus": 8, "gpus": 2}}))
    monkeypatch.setenv(VARIABLE, str(path))
    sections = {"rollout": {**ROLLOUT, "replicas": 6}, "learner": {"gpus": 1.0, "cpus": 4.0}}
    records = RunRecords(redis)
    async with controlled(redis, run_id, tmp_path, **sections) as (_, cluster), Heartbeat(redis, replica(run_id)):
        assert "at most 1 pods" in await first_event(redis, run_id, "queued")
        assert cluster.requests == [], "a new run has no room"
        await records.transition(run_id, RunState.RUNNING, "as the previous controller left it")
        await until(lambda: any(request.startswith("start ") for request in cluster.requests))


def judged_by(record, reward):
    data = {"source": "jsonl", "path": "/data.jsonl", "layout": "fields", "verifier": reward}
    document = record.recipe.model_dump(mode="json")
    document["data"] |= data
    return replace(record, stored_recipe=parse_recipe(document).model_dump_json().encode())


def test_a_run_waits_for_what_its_rewards_need():
    programs = judged_by(record("a"), "code")
    assert shortage(limits(), programs, [programs]) == (
        "data.verifier: 'code' is not valid: expected another reward, because the chart's verifierCode.maxReplicas is 0"
    )
    enabled = limits(verifier_code={"pods": 1, "cpus": 2, "gpus": 0})
    assert shortage(enabled, programs, [programs]) is None
    service = judged_by(record("a"), "https://rewards.internal/score")
    assert "verifier.rewardHosts" in shortage(limits(), service, [service])
    later = record("b", at=2.0, replicas=6)
    assert shortage(limits(), later, [service, later]) is None, "what is not allowed does not block later runs"


def test_runs_with_programs_share_only_their_own_pods():
    enabled = limits(verifier_code={"pods": 1, "cpus": 0.1, "gpus": 0})
    running = judged_by(record("a", RunState.RUNNING), "code")
    assert shortage(enabled, record("b"), [running]) is None
    second = judged_by(record("b"), "code")
    assert shortage(enabled, second, [running]).startswith("verifier-code: 1 x 0.1 CPUs, 0 GPUs have no room")
    assert shortage(enabled, second, [running]).endswith("(verifierCode.maxReplicas)")
