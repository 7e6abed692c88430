"""A copy of a run: its recipe with other values, its files, and the checks of a submission."""

import pytest

from services.contracts import Closing, RunState
from services.storage.kept_files import keep_files
from services.storage.mirror import NO_MIRROR
from services.streams.keys import RunKeys
from services.streams.state.ended.closing import close_run
from services.streams.state.rewards.reward_files import read_reward_files
from services.streams.state.runs import RunRecords
from tests.harness.small_run import recipe_document
from tests.services.api.submitting import submitted

REWARDS = "./rewards.py"
SCORE = "def score(prompt, response, reference, metadata):\n    return 1.0\n"
DATA = {"source": "jsonl", "path": "/rows.jsonl", "layout": "fields", "verifier": f"python:{REWARDS}:score"}
WITH_FILES = recipe_document("/model", data=DATA | {"options": {}})


async def test_a_copy_has_other_values_where_they_are_named(api, redis, run_id):
    route = await submitted(api, redis, run_id, RunState.FAILED)
    await api.patch(route, json={"limits.max_inflight_groups": 48, "rollout.replicas": 3})
    overrides = {"learner.learning_rate": 1e-5, "algorithm.clip_high": 0.3, "name": "other"}
    body = {"id": f"{run_id}-copy", "overrides": overrides, "priority": 4}
    answer = await api.post(f"{route}/clone", json=body)
    assert answer.status_code == 201, answer.text
    copy, source = answer.json(), (await api.get(route)).json()
    assert copy["recipe"]["learner"]["learning_rate"] == 1e-5
    assert copy["recipe"]["name"] == "other"
    assert copy["recipe"]["limits"]["max_inflight_groups"] == 48
    assert (copy["rollout_replicas"], copy["priority"], copy["state"]) == (3, 4, "queued")
    assert source["recipe"]["learner"]["learning_rate"] == 1e-3
    same = {**copy["recipe"], **{name: source["recipe"][name] for name in ("learner", "algorithm", "name", "rollout")}}
    assert same == source["recipe"]
    again = await api.post(f"{route}/clone", json=body)
    assert (again.status_code, "not in use" in again.json()["detail"]) == (409, True)
    assert (await api.post(f"{route}/clone")).status_code == 201


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"learner.speed": 3}, "learner.speed: 3 is not valid: expected a known field"),
        ({"no.such.thing": 1}, "overrides.no.such.thing: 1 is not valid: expected the dotted name of a setting"),
        ({"name.x": 1}, "overrides.name.x: 1 is not valid: expected the dotted name of a setting of the recipe"),
        ({"": 1}, "overrides.: 1 is not valid: expected the dotted name"),
        ({"learner.learning_rate": "x" * 5000}, "learner.learning_rate: 'xxx"),
        ({"learner": 5}, "learner: 5 is not valid: expected a mapping"),
        ({"." * 1000: 1}, "expected the dotted name of a setting"),
        ({"learner.ranks": 2, "learner.gpus": 0.5}, "learner.gpus: 0.5 is not valid"),
    ],
)
async def test_a_value_that_is_not_valid_is_named(api, redis, run_id, overrides, expected):
    route = await submitted(api, redis, run_id)
    answer = await api.post(f"{route}/clone", json={"id": f"{run_id}-copy", "overrides": overrides})
    assert answer.status_code == 422, answer.text
    assert expected in answer.json()["detail"]
    assert len(answer.json()["detail"]) < 2500
    assert not await RunRecords(redis).exists(f"{run_id}-copy"), "nothing is half created"


async def test_an_expired_run_can_be_copied(api, redis, run_id):
    route = await submitted(api, redis, run_id, RunState.FAILED)
    await close_run(redis, run_id, Closing.EXPIRING)
    assert (await api.post(f"{route}/clone")).status_code == 201


async def test_files_are_copied_unless_the_copy_names_none(api, redis, run_id):
    body = {"id": run_id, "recipe": WITH_FILES, "files": {REWARDS: SCORE}}
    assert (await api.post("/v1/runs", json=body)).status_code == 201
    route, records = f"/v1/runs/{run_id}", RunRecords(redis)
    copy = await api.post(f"{route}/clone", json={"id": f"{run_id}-b"})
    assert copy.status_code == 201, copy.text
    assert await read_reward_files(redis, await records.get(f"{run_id}-b")) == {REWARDS: SCORE}
    body = {"id": f"{run_id}-c", "overrides": {"data.verifier": "math"}}
    other = await api.post(f"{route}/clone", json=body)
    assert (other.status_code, other.json()["files"]) == (201, {})


async def test_files_that_redis_has_no_more_are_read_from_the_folder(api, redis, run_id, tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_RUNS", str(tmp_path))
    body = {"id": run_id, "recipe": WITH_FILES, "files": {REWARDS: SCORE}}
    assert (await api.post("/v1/runs", json=body)).status_code == 201
    await redis.unlink(RunKeys(run_id).reward_files)
    route = f"/v1/runs/{run_id}/clone"
    refused = await api.post(route)
    assert (refused.status_code, "no longer in Redis" in refused.json()["detail"]) == (409, True)
    keep_files(tmp_path / run_id, NO_MIRROR, {REWARDS: SCORE})
    copy = await api.post(route, json={"id": f"{run_id}-b"})
    assert copy.status_code == 201, copy.text
    assert await read_reward_files(redis, await RunRecords(redis).get(f"{run_id}-b")) == {REWARDS: SCORE}
