"""The files beside a recipe travel with its run: checked at submission, stored with the record, and shown."""

import hashlib
import json

import pytest

from services.contracts import RunState
from services.settings import parse_recipe
from services.settings.rewards.files import MOST_BYTES
from services.streams.keys import RunKeys
from services.streams.memory_bound import footprint
from services.streams.state.rewards.reward_files import read_reward_files
from services.streams.state.runs import RunRecords
from tests.harness.small_run import recipe_document

REWARDS = "./rewards.py"
SCORE = "def score(prompt, response, reference, metadata):\n    return 1.0\n"
DATA = {"source": "jsonl", "path": "/rows.jsonl", "layout": "fields", "verifier": f"python:{REWARDS}:score"}
RECIPE = recipe_document("/model", data=DATA | {"options": {}})


async def submit(api, run, files=None, recipe=RECIPE):
    body = {"id": run, "recipe": recipe} | ({} if files is None else {"files": files})
    return await api.post("/v1/runs", json=body)


async def test_a_run_is_accepted_with_its_files_and_shows_them(api, redis, run_id):
    answer = await submit(api, run_id, {REWARDS: SCORE})
    assert answer.status_code == 201, answer.text
    digests = {REWARDS: hashlib.sha256(SCORE.encode()).hexdigest()}
    assert answer.json()["files"] == digests
    assert (await api.get(f"/v1/runs/{run_id}")).json()["files"] == digests
    record = await RunRecords(redis).get(run_id)
    assert await read_reward_files(redis, record) == {REWARDS: SCORE}


@pytest.mark.parametrize("state", [RunState.QUEUED, RunState.FAILED, RunState.SUCCEEDED])
async def test_a_second_submission_leaves_the_files_of_the_first(api, redis, run_id, state):
    await submit(api, run_id, {REWARDS: SCORE})
    records = RunRecords(redis)
    if state.ended:
        await records.transition(run_id, state, "test")
    refused = await submit(api, run_id, {REWARDS: SCORE + "# edited\n"})
    assert (refused.status_code, "an id that is not in use" in refused.text) == (409, True)
    assert await read_reward_files(redis, await records.get(run_id)) == {REWARDS: SCORE}


async def test_a_resumed_run_has_the_files_that_it_was_submitted_with(api, redis, run_id):
    await submit(api, run_id, {REWARDS: SCORE})
    await RunRecords(redis).transition(run_id, RunState.CANCELLED, "test")
    view = (await api.post(f"/v1/runs/{run_id}/resume")).json()
    assert (view["state"], [*view["files"]]) == ("queued", [REWARDS])
    assert await read_reward_files(redis, await RunRecords(redis).get(run_id)) == {REWARDS: SCORE}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (None, "files: none is not valid: expected './rewards.py', which data.verifier names"),
        ({}, "files: none is not valid: expected './rewards.py', which data.verifier names"),
        (
            {REWARDS: SCORE, "./b.py": ""},
            "files: './b.py' is not valid: expected one that the recipe names: './rewards.py'",
        ),
        (
            {REWARDS: "def grade(): ..."},
            "data.verifier: './rewards.py:score' is not valid: expected a function that './rewards.py' defines at top "
            "level: it has 'grade'",
        ),
        ({REWARDS: "score ="}, "files './rewards.py': 'score =' is not valid: expected Python (line 1: invalid syntax"),
        ({REWARDS: SCORE + "\0"}, r"files './rewards.py': '\x00' is not valid: expected a text without NUL"),
        ({REWARDS: "#" * 262145}, "files './rewards.py': 262145 is not valid: expected at most 262144 bytes of UTF-8"),
        ({REWARDS: "score = " + "-" * 200_000 + "1"}, "files './rewards.py': 'score = ------"),
        ({REWARDS: "score" + "()" * 120_000}, "files './rewards.py': 'score()()"),
        ({REWARDS: None}, "files../rewards.py: null is not valid: expected a valid string"),
        ([REWARDS], "files: ['./rewards.py'] is not valid: expected a mapping"),
    ],
    ids=range(11),
)
async def test_bad_files_are_refused_and_no_run_is_added(api, redis, run_id, files, expected):
    answer = await submit(api, run_id, files)
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith(expected), answer.text
    keys = RunKeys(run_id)
    assert not await redis.exists(keys.record, keys.reward_files)


async def test_a_text_that_is_no_unicode_is_refused(api, run_id):
    body = json.dumps({"id": run_id, "recipe": RECIPE, "files": {REWARDS: "# \ud800"}})
    answer = await api.post("/v1/runs", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["detail"].startswith("files")) == (422, True)


async def test_files_without_a_reward_that_names_them_are_refused(api, run_id):
    answer = await submit(api, run_id, {REWARDS: SCORE}, recipe_document("/model"))
    assert answer.json()["detail"] == (
        "files: './rewards.py' is not valid: expected none, because the recipe names no file"
    )


async def test_the_plan_of_redis_has_room_for_the_files(api, redis, run_id):
    """For the largest ones that are accepted, as they are stored."""
    names = [f"./{number}.txt" for number in range(4)]
    recipe = recipe_document("/model", verifier={"files": names})
    answer = await submit(api, run_id, dict.fromkeys(names, "a" * MOST_BYTES), recipe)
    assert answer.status_code == 201, answer.text
    plans = [footprint(parse_recipe(document)).total for document in (recipe, recipe_document("/model"))]
    assert await redis.memory_usage(RunKeys(run_id).reward_files, samples=0) <= plans[0] - plans[1]
