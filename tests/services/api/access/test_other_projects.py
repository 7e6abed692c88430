"""What a project's principals reach of another project's runs through files, ids and keys: nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.api.access.roles import Principal, Role
from services.api.access.tokens import TokenAccess, token_digest
from services.contracts import Closing, RunState
from services.settings import parse_recipe
from services.streams.keys import RunKeys
from services.streams.state.ended.cleanup import erase
from services.streams.state.ended.closing import close_run, delete_record
from services.streams.state.runs import RunRecords
from tests.harness.small_run import recipe_document
from tests.services.api.access.platforms import bearer, client_of

NAMES = {
    "owner": {"team-a": Role.ADMIN},
    "other": {"team-b": Role.ADMIN},
    "root": {"*": Role.ADMIN},
}
ACCESS = TokenAccess({token_digest(name): Principal(name, roles) for name, roles in NAMES.items()})


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("PENSTOCK_STORE", raising=False)
    return tmp_path / "runs"


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def written(runs: Path, run: str, **facts: Any) -> None:
    """The files of a run that has trained nothing yet."""
    recipe = parse_recipe(recipe_document("/model")).model_dump(mode="json")
    write(runs / run / "run.json", {"run": run, "recipe": recipe, "model_path": "/model"} | facts)
    write(runs / run / "export/config.json", {})
    write(runs / run / "checkpoints/step-000001/secret.bin", "secret")


async def deleted(redis: Any, run: str) -> None:
    """Delete a run without its files, as the controller does."""
    await RunRecords(redis).transition(run, RunState.FAILED, "test")
    await close_run(redis, run, Closing.DELETING)
    await erase(redis, RunKeys(run), Closing.DELETING)
    assert await delete_record(redis, run, files=False)


async def post(client: httpx.AsyncClient, by: str, path: str, /, **body: Any) -> httpx.Response:
    return await client.post(path, json=body, headers=bearer(by))


async def test_files_of_a_deleted_run_are_not_taken_over(redis: Any, run_id: str, runs: Path) -> None:
    recipe = recipe_document("/model")
    async with client_of(redis, ACCESS) as client:
        mine = await post(client, "owner", "/v1/runs", id=run_id, recipe=recipe, project="team-a")
        assert mine.status_code == 201, mine.text
        written(runs, run_id)
        used = await post(client, "other", "/v1/runs", id=run_id, recipe=recipe, project="team-b")
        assert (used.status_code, "not in use" in used.json()["detail"]) == (409, True)
        await deleted(redis, run_id)
        taken = await post(client, "other", "/v1/runs", id=run_id, recipe=recipe, project="team-b")
        assert (taken.status_code, "no files of an earlier run" in taken.json()["detail"]) == (409, True)
        assert not await RunRecords(redis).exists(run_id)
        free = await post(client, "other", "/v1/runs", id=f"{run_id}-b", recipe=recipe, project="team-b")
        assert free.status_code == 201, free.text


async def test_an_export_of_another_project_is_none_to_train(redis: Any, run_id: str, runs: Path) -> None:
    written(runs, run_id)
    recipe = recipe_document(runs / run_id / "export")
    async with client_of(redis, ACCESS) as client:
        unknown = await post(client, "other", "/v1/runs", recipe=recipe, project="team-b")
        await RunRecords(redis).create(run_id, parse_recipe(recipe_document("/model")), project="team-a")
        refused = await post(client, "other", "/v1/runs", recipe=recipe, project="team-b")
        cloned = await post(
            client, "other", "/v1/runs", id=f"{run_id}-c", recipe=recipe_document("/m"), project="team-b"
        )
        overrides = {"model.path": str(runs / run_id / "export")}
        clone = await post(client, "other", f"/v1/runs/{run_id}-c/clone", overrides=overrides)
        allowed = await post(client, "owner", "/v1/runs", recipe=recipe, project="team-a")
    for answer in (unknown, refused, clone):
        assert answer.status_code == 422, answer.text
        assert answer.json()["errors"][0]["field"] == "model.path"
        assert "visible to you" in answer.json()["detail"]
    assert (cloned.status_code, allowed.status_code) == (201, 201), allowed.text


@pytest.mark.parametrize(
    ("facts", "statuses"),
    [
        ({"project": "team-a"}, {"other": 403, "owner": 403, "root": 201}),
        ({"project": "team-b"}, {"other": 201}),
        ({}, {"other": 403, "root": 201}),  # of an earlier release
    ],
)
async def test_only_admins_of_its_project_adopt_a_run(
    redis: Any, run_id: str, runs: Path, facts: dict[str, Any], statuses: dict[str, int]
) -> None:
    written(runs, run_id, **facts)
    async with client_of(redis, ACCESS) as client:
        for name, status in statuses.items():
            answer = await post(client, name, "/v1/runs/adopt", id=run_id, project="team-b")
            assert answer.status_code == status, (name, answer.text)


async def test_a_failed_run_of_another_project_is_not_adopted(redis: Any, run_id: str, runs: Path) -> None:
    records = RunRecords(redis)
    created = await records.create(run_id, parse_recipe(recipe_document("/model")), project="team-a")
    await records.transition(run_id, RunState.FAILED, "test")
    written(runs, run_id, created_at=created.created_at, project="team-a")
    before = await records.get(run_id)
    async with client_of(redis, ACCESS) as client:
        answer = await post(client, "other", "/v1/runs/adopt", id=run_id, project="team-b")
    assert (answer.status_code, "not in use" in answer.json()["detail"]) == (409, True)
    assert await records.get(run_id) == before


async def test_a_repeated_request_shows_no_run_of_another_project(redis: Any, run_id: str, runs: Path) -> None:
    body = {"id": run_id, "recipe": recipe_document("/model"), "project": "team-a"}
    key = bearer("owner") | {"idempotency-key": run_id}
    async with client_of(redis, ACCESS) as client:
        assert (await client.post("/v1/runs", json=body, headers=key)).status_code == 201
        assert (await client.post("/v1/runs", json=body, headers=key)).status_code == 200
        await deleted(redis, run_id)
        await RunRecords(redis).create(run_id, parse_recipe(recipe_document("/model")), project="team-b")
        again = await client.post("/v1/runs", json=body, headers=key)
    assert (again.status_code, "was deleted" in again.json()["detail"]) == (409, True)
