"""Every field of a run document with hostile values: a 4xx that names the field, never a 5xx or a half-created run."""

import json
import random
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.settings import RecipeError, parse_recipe
from services.streams.keys import RUNS, RunKeys
from tests.harness.small_run import recipe_document

NESTED = json.loads("[" * 200 + "]" * 200)
HOSTILE = [
    None,
    True,
    -1,
    0,
    2**63,
    10**400,
    -(10**30),
    0.1,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    " ",
    "x" * 100_000,
    "\x00",
    "\ud800",
    "²",
    "\uff11",
    "../../etc/passwd",
    "/etc/shadow",
    "s3://",
    "hf://",
    "\u202e\u0007\r\nx: y",
    "%s%n{0}${x}",
    [],
    {},
    [None],
    {"": ""},
    {"__proto__": 1},
    {"x" * 10_000: "y" * 10_000},
    NESTED,
    [0] * 10_000,
]
LONGEST_DETAIL = 20_000


def leaves(value, path=()):
    """The paths of all values of a document, sections included."""
    if path:
        yield path
    if isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, (*path, name))


FULL = parse_recipe(recipe_document("/model")).model_dump(mode="json")
PATHS = list(leaves(FULL))
TOP = ("id", "recipe", "files", "project", "priority", "no_such_field")


def replaced(path, value):
    """The document with a value at a path."""
    document = json.loads(json.dumps(FULL))
    place = document
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return document


def encoded(body):
    """JSON as a hostile client writes it: with NaN, and with lone surrogates as escapes."""
    return json.dumps(body).encode()


async def submit(api, redis, body):
    """The status; every answer must be clear, and a refused run must have left nothing."""
    before = await redis.zcard(RUNS)
    answer = await api.post("/v1/runs", content=encoded(body), headers={"content-type": "application/json"})
    assert answer.status_code in (201, 400, 403, 409, 413, 422), (answer.status_code, answer.text[:2000])
    if answer.status_code == 201:
        run = answer.json()["id"]
        await redis.unlink(RunKeys(run).record, RunKeys(run).reward_files)
        await redis.zrem(RUNS, run)
        return answer
    detail = answer.json()["detail"]
    assert detail
    assert len(detail) <= LONGEST_DETAIL
    assert "x" * 300 not in detail, "values are cut"
    assert await redis.zcard(RUNS) == before, ("a refused run has a place in the list", answer.text)
    leftovers = {key async for key in redis.scan_iter(match="penstock:{*}:*", count=1000)}
    assert not leftovers - {b"penstock:{-}:heartbeats"}, leftovers
    return answer


@pytest.fixture
async def redis(own_server):
    return own_server[1]


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12))])
async def test_each_setting_with_a_hostile_value(own_api, redis, seed):
    """Each value of the recipe is replaced, in the fast lane with two of the hostile ones."""
    chosen = random.Random(seed)
    for path in PATHS:
        for value in chosen.sample(HOSTILE, 2):
            answer = await submit(own_api, redis, {"recipe": replaced(path, value)})
            if answer.status_code == 422:
                # A rule about several settings may name another one of the section, or what it leads to.
                assert answer.json()["detail"].split(":")[0], (path, value)


@pytest.mark.parametrize("field", TOP)
async def test_each_field_with_every_hostile_value(own_api, redis, field):
    for value in HOSTILE:
        answer = await submit(own_api, redis, {"id": "hostile", "recipe": FULL} | {field: value})
        if answer.status_code == 422 and field not in ("recipe", "files"):
            assert field in answer.json()["detail"], (value, answer.text[:500])


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_each_edit_and_override_with_hostile_values(own_api, redis, seed):
    chosen = random.Random(seed)
    made = await own_api.post("/v1/runs", json={"id": "source", "recipe": FULL})
    assert made.status_code == 201
    names = [".".join(path) for path in chosen.sample(PATHS, 25)]
    for name in [*names, "", ".", "a" * 5000, "learner.", "\x00", "learner.learning_rate.x"]:
        for value in chosen.sample(HOSTILE, 2):
            for method, path, body in (
                ("PATCH", "", {name: value}),
                ("POST", "/clone", {"id": "copy", "overrides": {name: value}}),
            ):
                answer = await own_api.request(
                    method,
                    f"/v1/runs/source{path}",
                    content=encoded(body),
                    headers={"content-type": "application/json"},
                )
                assert answer.status_code in (201, 202, 400, 409, 413, 422), (name, value, answer.text[:2000])
                if answer.status_code == 201:
                    await redis.unlink(RunKeys("copy").record, RunKeys("copy").reward_files)
                elif answer.status_code != 202:
                    assert not await redis.exists(RunKeys("copy").record)
                    assert "x" * 300 not in answer.json()["detail"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=10), parts, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(changes=st.lists(st.tuples(st.sampled_from(PATHS), JSON), min_size=1, max_size=4))
def test_parsing_a_changed_document_only_raises_its_own_error(changes):
    document = json.loads(json.dumps(FULL))
    for path, value in changes:
        place = document
        for name in path[:-1]:
            place = place.get(name) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place[path[-1]] = value
    with suppress(RecipeError):
        parse_recipe(document)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(json.loads('{"a":' * 300 + "1" + "}" * 300), id="depth"),
        pytest.param([[[{"x": float("nan")}]]], id="nan"),
        pytest.param("\ud800", id="half"),
        pytest.param({"\udfff": 1}, id="half-name"),
        pytest.param({"x" * 100_000: {str(number): 1 for number in range(10_000)}}, id="long-name"),
    ],
)
async def test_what_no_record_can_hold_is_refused(own_api, redis, value):
    """In a section without fields of its own, too: it would fail when the record is written, or read."""
    document = replaced(("data", "options", "free"), value)
    answer = await submit(own_api, redis, {"recipe": document})
    assert (answer.status_code, answer.json()["detail"].startswith("data.options.free")) == (422, True)
    made = await own_api.post("/v1/runs", json={"id": "source", "recipe": FULL})
    assert made.status_code == 201
    body = encoded({"id": "copy", "overrides": {"data.options": {"free": value}}})
    headers = {"content-type": "application/json"}
    assert (await own_api.post("/v1/runs/source/clone", content=body, headers=headers)).status_code == 422
    checked = await own_api.post("/v1/recipes/check", content=encoded({"recipe": document}), headers=headers)
    assert checked.json()["faults"]


@pytest.mark.parametrize("value", [True, "1e-3", "5", 5.0])
async def test_an_edit_takes_no_value_of_another_type(own_api, value):
    name = "priority" if value == 5.0 else "learner.learning_rate"
    assert (await own_api.post("/v1/runs", json={"id": "source", "recipe": FULL})).status_code == 201
    answer = await own_api.patch("/v1/runs/source", json={name: value})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, name)
