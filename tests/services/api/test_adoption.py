"""The route that adopts a run from its files: what it restores, and what it refuses."""

import json

import pytest

from services.contracts import Batch, GroupCounts, RunState, SamplerSnapshot, SamplerState
from services.settings import parse_recipe
from services.streams.keys import RunKeys
from services.streams.runs.adopting.adoption import IDS_SKIPPED
from services.streams.state.group_counts import group_counts
from services.streams.state.policy_history import read_policy
from services.streams.state.runs import RunRecords
from tests.harness.small_run import recipe_document
from tests.services.driven import batch_of, record_of

CREATED = 1_700_000_000.5


@pytest.fixture
def folder(tmp_path, run_id, monkeypatch):
    """The folder of a run of three steps, with a checkpoint of the second."""
    monkeypatch.setenv("PENSTOCK_RUNS", str(tmp_path))
    monkeypatch.delenv("PENSTOCK_STORE", raising=False)
    return written(tmp_path / run_id, run_id)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def written(folder, run):
    recipe = parse_recipe(recipe_document("/model")).model_dump(mode="json")
    facts = {"run": run, "recipe": recipe, "model_path": "/the/model", "ranks": 1, "device": "cpu", "versions": {}}
    write(folder / "run.json", facts | {"created_at": CREATED})
    recipe["learner"]["learning_rate"] = 5e-4
    write(folder / "run.e0002-learner-b.json", facts | {"recipe": recipe, "created_at": CREATED})
    keys = RunKeys(run)
    for step in (1, 2, 3):
        batch = batch_of(keys, step, [f"g{step}0", f"g{step}1"])
        batch = batch.model_copy(update={"sampler_state": SamplerState(cursor=step, next_group=10 * step)})
        write(folder / f"batches/step-{step:06d}.e0001-a.json", batch.model_dump_json())
        assert Batch.model_validate_json(batch.model_dump_json()) == batch
        record = record_of(batch, step).model_copy(update={"weights": f"w{step}"})
        write(folder / f"records/step-{step:06d}.e0001-a.json", record.model_dump_json())
    late = record_of(batch_of(keys, 2, ["g20", "g21"]), 7).model_copy(update={"weights": "w2"})
    write(folder / "records/step-000002.e0002-b.json", late.model_dump_json())
    checkpoint(folder, 2, "w2")
    return folder


def checkpoint(folder, step, weights):
    name = f"step-{step:06d}.e0001-a"
    counts = GroupCounts(dispatched=9, trained=2, filtered=3, stale=1, dead=1, pending=2)
    snapshot = SamplerSnapshot(step=step, state=SamplerState(cursor=step, next_group=20), counts=counts)
    manifest = {"name": name, "step": step, "version": step, "weights": weights, "files": {"sampler.json": {"size": 1}}}
    write(folder / f"checkpoints/{name}/checkpoint.json", manifest)
    write(folder / f"checkpoints/{name}/sampler.json", snapshot.model_dump_json())


async def adopt(api, run, **body):
    return await api.post("/v1/runs/adopt", json={"id": run} | body)


async def recorded(redis, run, *states):
    """A run whose files were there before; a submission would be refused."""
    await RunRecords(redis).create(run, parse_recipe(recipe_document("/model")))
    for state in states:
        await RunRecords(redis).transition(run, state, "test")


async def check(api, redis, run, rate=5e-4):
    keys, records = RunKeys(run), RunRecords(redis)
    record = await records.get(run)
    assert (record.state, record.created_at, record.model_path) == (RunState.FAILED, CREATED, "/the/model")
    assert record.recipe.learner.learning_rate == rate
    assert "adopted from" in record.reason
    assert record.reason.endswith("with 2 rollout steps; a resumption continues from step 2")
    steps = (await api.get(f"/v1/runs/{run}/metrics")).json()["steps"]
    assert [(step["step"], step["version"]) for step in steps] == [(1, 1), (2, 7)]
    policy = await read_policy(redis, keys)
    assert (policy.step, policy.version, policy.announced) == (2, 7, 7)
    counts = await group_counts(redis, keys)
    assert (counts.trained, counts.filtered, counts.dispatched, counts.reconciled) == (4, 3, 9, True)
    state = SamplerState.model_validate_json(await redis.get(keys.sampler_state))
    assert (state.cursor, state.next_group) == (3, 30 + IDS_SKIPPED)
    resumed = await api.post(f"/v1/runs/{run}/resume")
    assert resumed.status_code == 202, resumed.text
    assert (resumed.json()["reason"], resumed.json()["resume_step"]) == ("resumed from step 2", 2)
    await records.transition(run, RunState.CANCELLED, "test")
    assert (await records.resume(run)).resume_step is None, "later ones continue after the last step"


async def test_a_run_without_a_record_is_adopted(api, redis, run_id, folder):
    answer = await adopt(api, run_id, project="mine")
    assert answer.status_code == 201, answer.text
    shown = answer.json()
    assert (shown["state"], shown["project"], shown["policy_version"], shown["rollout_steps"]) == (
        "failed",
        "mine",
        7,
        2,
    )
    again = await adopt(api, run_id)
    assert (again.status_code, "not in use" in again.json()["detail"]) == (409, True)
    await check(api, redis, run_id)


async def test_a_run_that_redis_lost_under_its_controller_is_adopted(api, redis, run_id, folder, monkeypatch):
    with monkeypatch.context() as then:
        then.setattr("time.time", lambda: CREATED)
        await recorded(redis, run_id)
    await RunRecords(redis).transition(run_id, RunState.FAILED, "Redis lost the state of this run")
    assert (await adopt(api, run_id)).status_code == 201
    await check(api, redis, run_id, 1e-3)  # its record has the recipe


async def test_an_adoption_that_was_cut_off_is_repeated(api, redis, run_id, folder, monkeypatch):
    with monkeypatch.context() as cut:
        cut.setattr("services.streams.runs.adopting.adoption.call", None)
        assert (await adopt(api, run_id)).status_code == 500
    assert (await RunRecords(redis).get(run_id)).reason.startswith("being adopted from ")
    assert (await adopt(api, run_id)).status_code == 201
    await check(api, redis, run_id)


@pytest.mark.parametrize("state", [RunState.RUNNING, RunState.SUCCEEDED, RunState.FAILED])
async def test_another_run_with_the_id_stays(api, redis, run_id, folder, state):
    await recorded(redis, run_id, state)
    before = await RunRecords(redis).get(run_id)
    assert (await adopt(api, run_id)).status_code == 409
    assert await RunRecords(redis).get(run_id) == before


async def test_without_a_checkpoint_it_starts_from_the_model(api, redis, run_id, folder):
    (folder / "checkpoints/step-000002.e0001-a/sampler.json").unlink()
    assert (await adopt(api, run_id)).json()["rollout_steps"] == 0
    assert (await api.post(f"/v1/runs/{run_id}/resume")).json()["resume_step"] == 0


async def test_a_checkpoint_of_an_abandoned_history_does_not_count(api, run_id, folder):
    checkpoint(folder, 3, "other")
    assert (await adopt(api, run_id)).json()["rollout_steps"] == 2


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("run.e0003-c.json", "{", "run.e0003-c.json: this release cannot read it: "),
        ("run.e0003-c.json", '{"run": "other", "model_path": "/m", "recipe": {}}', "recipe.name: Field required"),
        ("records/step-000003.e0009-z.json", '{"kind": "step", "schema_version": 2}', "schema_version: "),
        ("batches/step-000003.e0009-z.json", "[]", "batches/step-000003.e0009-z.json: this release cannot read it"),
        (
            "checkpoints/step-000003.e0009-z/checkpoint.json",
            "[" * 10_000,
            "checkpoint.json: this release cannot read it",
        ),
    ],
)
async def test_files_that_cannot_be_read_are_named(api, redis, run_id, folder, name, content, expected):
    write(folder / name, content)
    answer = await adopt(api, run_id)
    assert answer.status_code == 422, answer.text
    assert expected in answer.json()["detail"]
    assert not await RunRecords(redis).exists(run_id), "nothing is half created"


async def test_a_folder_that_is_no_run_s_is_refused(api, redis, run_id, folder, tmp_path):
    empty = await adopt(api, f"{run_id}-b")
    assert (empty.status_code, "run.json: missing: expected the folder of a run" in empty.json()["detail"]) == (
        422,
        True,
    )
    written(tmp_path / f"{run_id}-c", run_id)
    other = await adopt(api, f"{run_id}-c")
    assert (other.status_code, f"is of run {run_id!r}" in other.json()["detail"]) == (422, True)
    for run in ("../etc", "models", "", "²", "x" * 97, "A"):
        answer = await adopt(api, run)
        assert (answer.status_code, answer.json()["detail"].startswith("id: ")) == (422, True), (run, answer.text)
