"""Edits of a run's settings in flight: what may change, the check against the whole recipe, entity tags, the record."""

import asyncio

import pytest

from services.contracts import RunState
from services.settings.cluster_limits import VARIABLE
from services.streams.keys import RunKeys
from services.streams.runs import edits
from services.streams.runs.edits import BUDGET, EDITABLE
from services.streams.state.runs import RunRecords
from tests.services.api.submitting import submitted


async def test_all_settings_are_changed_at_once(api, redis, run_id):
    route = await submitted(api, redis, run_id, RunState.RUNNING, tuning={"inflight_groups": [8, 64]})
    await redis.hset(RunKeys(run_id).policy, mapping={"version": 3, "step": 2, "weights": "w", "announced": 3})
    wanted = {
        "learner.learning_rate": 5e-4,
        "limits.max_staleness": 2,
        "limits.max_inflight_groups": 48,
        "limits.gpu_hours": 100.0,
        "evaluation.every": 7,
        "rollout.replicas": 3,
        "verifier.replicas": 2,
        "tuning.mode": "report",
        "priority": -5,
    }
    assert wanted.keys() == EDITABLE.keys() - {BUDGET}, "it needs prices: reading/test_ledger.py"
    answer = await api.patch(route, json=wanted)
    assert answer.status_code == 202, answer.text
    shown = (await api.get(route)).json()
    assert shown["recipe"]["learner"]["learning_rate"] == 5e-4
    assert shown["recipe"]["limits"]["max_staleness"] == 2
    assert shown["recipe"]["limits"]["max_inflight_groups"] == 48
    assert shown["recipe"]["evaluation"]["every"] == 7
    assert (shown["rollout_replicas"], shown["recipe"]["rollout"]["replicas"], shown["priority"]) == (3, 1, -5)
    assert shown["recipe"]["verifier"]["replicas"] == 2
    [edit] = shown["edits"]
    assert (edit["by"], edit["step"]) == ("local", 2)
    assert edit["changes"]["learner.learning_rate"] == [1e-3, 5e-4]
    assert edit["changes"]["rollout.replicas"] == [1, 3]
    assert edit["changes"]["tuning.mode"] == ["off", "report"]
    event = shown["events"][-1]
    assert (event["service"], event["phase"]) == ("api", "edited")
    assert "learner.learning_rate 0.001 -> 0.0005, limits.max_staleness" in event["text"]
    assert event["text"].endswith("by local, after rollout step 2")
    again = (await api.patch(route, json=wanted)).json()
    assert (len(again["edits"]), again["revision"]) == (1, shown["revision"]), "nothing has changed"


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (
            {"learner.ranks": 2},
            "learner.ranks: 2 is not valid: expected a setting that may change: learner.learning_rate, ",
        ),
        ({"nonsense": "x" * 5000}, "nonsense: 'xxx"),
        ({"learner.learning_rate": "fast"}, "learner.learning_rate: 'fast' is not valid: "),
        ({"learner.learning_rate": -1}, "learner.learning_rate: -1 is not valid: "),
        ({"learner.learning_rate": None}, "learner.learning_rate: null is not valid: "),
        ({"limits.max_staleness": 0}, "limits.max_staleness: 0 is not valid: expected at least 1, because"),
        ({"limits.max_inflight_groups": 1}, "max_inflight_groups"),
        ({"rollout.replicas": 0}, "rollout.replicas: 0 is not valid: "),
        ({"rollout.replicas": 1025}, "rollout.replicas: 1025 is not valid: "),
        ({"verifier.replicas": 2**40}, "verifier.replicas: "),
        ({"evaluation.every": -1}, "evaluation.every: -1 is not valid: "),
        ({"tuning.mode": "auto"}, "tuning.mode: 'auto' is not valid: expected 'off', 'report' or 'on'"),
        ({"tuning.mode": "on"}, "tuning.mode: 'on' is not valid: expected off, or [least, most] for one of replicas, "),
        ({"priority": 101}, "priority: 101 is not valid: "),
        ({"priority": 1.5}, "priority: 1.5 is not valid: "),
    ],
)
async def test_what_cannot_be_changed_so_is_named(api, redis, run_id, wanted, expected):
    route = await submitted(api, redis, run_id, RunState.RUNNING)
    before = (await api.get(route)).json()
    answer = await api.patch(route, json=wanted)
    assert answer.status_code == 422, answer.text
    assert expected in answer.json()["detail"]
    assert len(answer.json()["detail"]) < 1000
    assert (await api.get(route)).json()["revision"] == before["revision"]


async def test_a_body_that_is_no_mapping_is_refused(api, redis, run_id):
    route = await submitted(api, redis, run_id)
    for body in ("[]", "5", "null", '"x"', "{", '{"priority": NaN}'):
        answer = await api.patch(route, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 422, (body, answer.text)


async def test_an_edit_of_what_was_changed_since_is_refused(api, redis, run_id):
    route = await submitted(api, redis, run_id)
    tag = (await api.get(route)).headers["etag"]
    first = await api.patch(route, json={"priority": 1}, headers={"if-match": tag})
    assert first.status_code == 202
    stale = await api.patch(route, json={"priority": 2}, headers={"if-match": tag})
    assert (stale.status_code, "was changed since it was read" in stale.json()["detail"]) == (412, True)
    assert (
        await api.patch(route, json={"priority": 2}, headers={"if-match": first.headers["etag"]})
    ).status_code == 202
    assert (await api.patch(route, json={"priority": 3}, headers={"if-match": "*"})).status_code == 202
    assert (await api.get(route)).json()["priority"] == 3


async def test_concurrent_edits_are_all_kept(api, redis, run_id):
    route = await submitted(api, redis, run_id)
    wanted = ({"priority": 9}, {"evaluation.every": 9}, {"verifier.replicas": 3})
    answers = await asyncio.gather(*(api.patch(route, json=each) for each in wanted))
    assert [answer.status_code for answer in answers] == [202] * 3
    record = await RunRecords(redis).get(run_id)
    assert (record.priority, record.recipe.evaluation.every, record.recipe.verifier.replicas) == (9, 9, 3)
    assert len(record.edits) == 3


async def test_the_first_learning_rate_outlives_many_edits(api, redis, run_id, monkeypatch):
    monkeypatch.setattr(edits, "EDITS_KEPT", kept := 12)
    route = await submitted(api, redis, run_id)
    for number in range(1, kept + 10):
        assert (await api.patch(route, json={"learner.learning_rate": number * 1e-5})).status_code == 202
    record = await RunRecords(redis).get(run_id)
    assert len(record.edits) == kept
    assert record.first_learning_rate == 1e-3
    assert record.recipe.learner.learning_rate == pytest.approx((kept + 9) * 1e-5)


@pytest.mark.parametrize(("state", "status"), [(RunState.FAILED, 202), (RunState.SUCCEEDED, 409)])
async def test_an_ended_run_is_edited_only_if_it_can_be_resumed(api, redis, run_id, state, status):
    route = await submitted(api, redis, run_id, state)
    assert (await api.patch(route, json={"learner.learning_rate": 1e-5})).status_code == status
    assert (await api.patch(f"{route}/scale", json={"rollout": 2})).status_code == 409


async def test_scaling_is_an_edit(api, redis, run_id):
    route = await submitted(api, redis, run_id, RunState.RUNNING)
    shown = (await api.patch(f"{route}/scale", json={"rollout": 2})).json()
    assert (shown["rollout_replicas"], shown["edits"][-1]["changes"]) == (2, {"rollout.replicas": [1, 2]})
    shown = (await api.patch(f"{route}/scale", json={"verifier": 3})).json()
    assert (shown["rollout_replicas"], shown["recipe"]["verifier"]["replicas"]) == (2, 3)
    shown = (await api.patch(f"{route}/scale", json={"rollout": 1, "verifier": 1})).json()
    assert shown["edits"][-1]["changes"] == {"rollout.replicas": [2, 1], "verifier.replicas": [3, 1]}
    for body, detail in (
        ({}, "rollout: missing: expected a number of replicas for rollout, verifier or both"),
        ({"verifier": None}, "verifier: null is not valid: expected a valid integer"),
        ({"verifier": 0}, "verifier: 0 is not valid: expected a number greater than or equal to 1"),
    ):
        refused = await api.patch(f"{route}/scale", json=body)
        assert (refused.status_code, refused.json()["detail"]) == (422, detail)


async def test_the_cluster_limits_verifiers_too(api, redis, run_id, monkeypatch, tmp_path):
    route = await submitted(api, redis, run_id, RunState.RUNNING)
    pods = '{"pods": 2, "cpus": 1, "gpus": 0}'
    limits = tmp_path / "limits.json"
    limits.write_text(f'{{"cpu": {pods}, "verifier": {pods}, "rollout": {pods}, "learner": {pods}}}')
    monkeypatch.setenv(VARIABLE, str(limits))
    answer = await api.patch(route, json={"verifier.replicas": 500})
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("verifier.replicas: 500 is not valid: expected 1 to ")


async def test_a_plan_above_maxmemory_is_refused(own_api, own_server, run_id):
    _, redis = own_server
    route = await submitted(own_api, redis, run_id, RunState.RUNNING)
    await redis.config_set("maxmemory", 2**27)
    answer = await own_api.patch(route, json={"limits.max_inflight_groups": 2**20})
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("limits.max_inflight_groups: 1048576 is not valid: expected at most ")
