"""Runs beside each other: settings that differ, and curves by step."""

import pytest

from services.api.access.roles import Principal, Role
from services.api.routes.reading.compare import differences, thinned
from services.contracts import StepRecord
from services.settings import Recipe
from services.streams.keys import RunKeys
from services.streams.state.runs import RunRecords
from tests.harness.small_run import recipe_document

TIMES = ("generation_started_at", "generation_finished_at", "learning_started_at", "learning_finished_at")


async def write_run(redis, run, steps, project="default", **sections):
    await RunRecords(redis).create(run, Recipe.model_validate(recipe_document("/none", **sections)), project=project)
    for step, metrics in steps.items():
        record = StepRecord(
            step=step, version=step, optimizer_steps=1, groups=("g",), metrics=metrics, **dict.fromkeys(TIMES, 1.0)
        )
        await redis.xadd(RunKeys(run).steps, {"m": record.model_dump_json()})


async def test_settings_and_curves_are_compared(api, redis, run_id):
    first, second = f"{run_id}-a", f"{run_id}-b"
    await write_run(redis, first, {1: {"accuracy": 0.1}, 2: {"accuracy": 0.2, "only": 1.0}})
    await write_run(redis, second, {2: {"accuracy": 0.3}, 4: {"other": 2.0}}, learner={"learning_rate": 1e-5})
    answer = await api.get("/v1/compare", params={"runs": f"{first},{second}"})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["settings"] == [{"path": "learner.learning_rate", "values": {first: 1e-3, second: 1e-5}}]
    assert found["steps"] == [1, 2, 4]
    assert found["curves"] == {
        "accuracy": {first: [0.1, 0.2, None], second: [None, 0.3, None]},
        "only": {first: [None, 1.0, None], second: [None, None, None]},
        "other": {first: [None, None, None], second: [None, None, 2.0]},
    }
    assert not found["thinned"]


async def test_named_metrics_and_few_points(api, redis, run_id):
    first, second = f"{run_id}-a", f"{run_id}-b"
    await write_run(redis, first, {step: {"accuracy": step / 100, "other": 1.0} for step in range(1, 60)})
    await write_run(redis, second, {})
    params = {"runs": f"{first},{second}", "metrics": "accuracy,none", "points": 5}
    found = (await api.get("/v1/compare", params=params)).json()
    assert (found["steps"][0], found["steps"][-1], len(found["steps"]), found["thinned"]) == (1, 59, 5, True)
    assert found["curves"].keys() == {"accuracy", "none"}
    assert found["curves"]["none"][first] == [None] * 5


@pytest.mark.parametrize("runs", ["one", "a,a", "a,b,c,d,e,f,g,h,i", "a,B", "a,\u00b2", "", ","])
async def test_bad_names_are_422(api, runs):
    assert (await api.get("/v1/compare", params={"runs": runs})).status_code == 422


async def test_an_unknown_run_is_404(api, redis, run_id):
    await write_run(redis, run_id, {})
    answer = await api.get("/v1/compare", params={"runs": f"{run_id},none"})
    assert (answer.status_code, answer.json()["detail"]) == (404, "run 'none' does not exist")


async def test_a_run_of_another_project_is_unknown(api, redis, run_id, monkeypatch):
    await write_run(redis, f"{run_id}-a", {})
    await write_run(redis, f"{run_id}-b", {}, project="hidden")

    async def viewer(*_):
        return Principal("viewer", {"default": Role.VIEWER})

    monkeypatch.setattr("services.api.access.tokens.TokenAccess.identify", viewer)
    answer = await api.get("/v1/compare", params={"runs": f"{run_id}-a,{run_id}-b"})
    assert answer.status_code == 404


def test_differences_of_missing_settings():
    found = differences({"a": {"x": 1, "y": 2}, "b": {"x": 1}})
    assert [(each.path, each.values) for each in found] == [("y", {"a": 2})]


def test_thinning_keeps_both_ends():
    assert thinned([1, 2, 3], 5) == [1, 2, 3]
    assert thinned(list(range(100)), 3) == [0, 50, 99]
