"""Projects and quotas: what runs use, what is refused, and two submissions at the same moment."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from services.api.access.quotas import Use, faults_of, use_of
from services.api.access.settings import ProjectQuota, parse_access
from services.contracts import RunState
from services.settings import parse_recipe
from services.streams.access import project_lock as locks
from services.streams.access.project_lock import ProjectBusyError, project_lock
from services.streams.state.runs import RunRecords
from tests.harness.small_run import recipe_document
from tests.services.api.access.platforms import TOKENS, access_of, bearer, client_of

ADMIN = bearer(TOKENS["admin"])
GPUS = {"rollout": {"gpus": 1, "replicas": 2}, "learner": {"gpus": 1, "ranks": 2}}


@pytest.fixture
def project() -> str:
    return f"p{uuid.uuid4().hex[:8]}"


def limited(redis: Any, project: str, **quota: Any) -> Any:
    """A client of a platform where the project has a quota."""
    settings = parse_access({"projects": {project: quota, "other": {}}})
    return client_of(redis, access_of(settings), ADMIN)


def submission(run: str, project: str, **sections: Any) -> dict[str, Any]:
    return {"id": run, "recipe": recipe_document("/none", **sections), "project": project}


def test_faults_name_field_value_quota_and_use() -> None:
    quota = ProjectQuota(gpus=4, runs=2, redis_memory=100 * 2**20)
    assert faults_of("p", quota, Use(0, 0, 0), Use(4, 1, 100 * 2**20)) == []
    assert faults_of("p", quota, Use(3.5, 2, 60 * 2**20), Use(1, 1, 50 * 2**20)) == [
        "gpus: 1 is not valid: expected at most 0.5 GPUs; the quota of project 'p' is 4, of which 3.5 are in use",
        "runs: 1 is not valid: expected at most 0 active runs; the quota of project 'p' is 2, of which 2 are in use",
        "redis_memory: 50 is not valid: expected at most 40 MiB of Redis; the quota of project 'p' is 100, "
        "of which 60 are in use",
    ]
    # A run that needs none of something is not stopped by a quota of it that was lowered.
    assert faults_of("p", ProjectQuota(gpus=0), Use(3, 1, 0), Use(0, 1, 0)) == []


def test_use_counts_the_learner_and_all_replicas() -> None:
    recipe = parse_recipe(recipe_document("/none", **GPUS))
    assert (use_of(recipe, 2).gpus, use_of(recipe, 5).gpus) == (4, 7)
    assert use_of(recipe, 2).redis_memory > 2**20


def test_use_counts_what_tuning_may_reach() -> None:
    tuning = {"mode": "on", "replicas": [1, 5], "inflight_groups": [8, 64]}
    recipe, tuned = (parse_recipe(recipe_document("/none", **GPUS, **more)) for more in ({}, {"tuning": tuning}))
    assert use_of(tuned, 2).gpus == use_of(recipe, 5).gpus
    assert use_of(tuned, 2).redis_memory > use_of(recipe, 2).redis_memory


async def test_a_submission_above_a_quota_is_refused(redis: Any, run_id: str, project: str) -> None:
    async with limited(redis, project, runs=1) as client:
        first = await client.post("/v1/runs", json=submission(run_id, project))
        second = await client.post("/v1/runs", json=submission(f"{run_id}-b", project))
        elsewhere = await client.post("/v1/runs", json=submission(f"{run_id}-c", "other"))
        unknown = await client.post("/v1/runs", json=submission(f"{run_id}-d", "nobodys"))
    assert (first.status_code, second.status_code, elsewhere.status_code) == (201, 409, 201), second.text
    assert "runs: 1 is not valid: expected at most 0 active runs" in second.json()["detail"]
    assert not await RunRecords(redis).exists(f"{run_id}-b")
    assert unknown.status_code == 422
    assert unknown.json()["detail"].startswith("project: 'nobodys' is not valid")


async def test_replicas_and_resumptions_count(redis: Any, run_id: str, project: str) -> None:
    async with limited(redis, project, gpus=4) as client:
        accepted = await client.post("/v1/runs", json=submission(run_id, project, **GPUS))
        assert accepted.status_code == 201, accepted.text
        scaled = await client.patch(f"/v1/runs/{run_id}/scale", json={"rollout": 3})
        smaller = await client.patch(f"/v1/runs/{run_id}/scale", json={"rollout": 1})
        assert (scaled.status_code, smaller.status_code) == (409, 202), scaled.text
        await RunRecords(redis).transition(run_id, RunState.FAILED, "test")
        other = await client.post("/v1/runs", json=submission(f"{run_id}-b", project, **GPUS))
        assert other.status_code == 201
        resumed = await client.post(f"/v1/runs/{run_id}/resume", json={})
        assert resumed.status_code == 409
        assert "gpus: 3 is not valid: expected at most 0 GPUs" in resumed.json()["detail"]
        assert (await RunRecords(redis).get(run_id)).state is RunState.FAILED
        shown = {found["name"]: found for found in (await client.get("/v1/projects")).json()["projects"]}
    assert shown[project]["role"] == "admin"
    assert shown[project]["quota"] == {"gpus": 4, "runs": None, "redis_memory": None}
    assert (shown[project]["use"]["gpus"], shown[project]["use"]["runs"]) == (4, 1)
    assert "other" in shown
    assert "default" in shown


async def test_redis_memory_counts(redis: Any, run_id: str, project: str) -> None:
    async with limited(redis, project, redis_memory=1000) as client:
        answer = await client.post("/v1/runs", json=submission(run_id, project))
    assert answer.status_code == 409
    assert answer.json()["detail"].startswith("redis_memory: ")


async def test_two_submissions_at_once_take_the_last_room_once(redis: Any, run_id: str, project: str) -> None:
    async with limited(redis, project, runs=2) as client:
        runs = [f"{run_id}-{number}" for number in range(8)]
        answers = await asyncio.gather(*(client.post("/v1/runs", json=submission(run, project)) for run in runs))
    assert sorted(answer.status_code for answer in answers) == [201] * 2 + [409] * 6
    active = [record.id for record in await RunRecords(redis).active() if record.project == project]
    assert len(active) == 2


async def test_a_lock_ends_with_its_holder(redis: Any, project: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "WAIT_S", 0.2)
    async with project_lock(redis, project):
        with pytest.raises(ProjectBusyError, match=project):
            async with project_lock(redis, project):
                raise AssertionError("two hold the lock")
    async with project_lock(redis, project):
        assert 0 < await redis.pttl(f"penstock:lock:project:{project}") <= locks.HELD_S * 1000
    assert not await redis.exists(f"penstock:lock:project:{project}")


async def test_projects_are_those_that_one_sees(redis: Any) -> None:
    settings = parse_access({"projects": {"team-a": {"runs": 3}, "secret": {}}})
    async with client_of(redis, access_of(settings)) as client:
        found = (await client.get("/v1/projects", headers=bearer(TOKENS["team"]))).json()["projects"]
    assert [(project["name"], project["role"]) for project in found] == [("team-a", "admin")]
