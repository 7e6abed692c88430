"""Errors are RFC 9457 problem details, whatever is wrong with a request."""

import json
import logging

import httpx
import pytest

from services.api.answers.problems import LINE_CHARACTERS, MOST_ERRORS, VALUE_CHARACTERS, problem_of
from services.api.app import create_app
from services.api.guard.body_limit import MOST_BODY
from services.settings.faults import invalid
from tests.harness.api_access import ACCESS, HEADERS
from tests.harness.small_run import recipe_document


def checked(answer, status, kind):
    """The problem of an answer, which has all members that RFC 9457 defines."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["type"] == f"urn:penstock:problem:{kind}"
    assert problem["status"] == status
    assert problem["title"]
    assert problem["request_id"] == answer.headers["x-request-id"]
    return problem


async def test_an_unknown_run_is_a_problem(api):
    problem = checked(await api.get("/v1/runs/none"), 404, "unknown-run")
    assert (problem["title"], problem["detail"]) == ("Unknown run", "run 'none' does not exist")
    assert "errors" not in problem


async def test_each_request_has_an_id_of_its_own(api):
    first, second = [(await api.get("/healthz")).headers["x-request-id"] for _ in range(2)]
    assert first != second


@pytest.mark.parametrize("path", ["/nothing", "/v1/runs/", "/v1/nothing/of/this"])
async def test_an_unknown_path_is_a_problem(api, path):
    checked(await api.get(path), 404, "not-found")


async def test_a_wrong_method_is_a_problem_that_names_the_right(api):
    answer = await api.put("/v1/runs/x/scale")
    checked(answer, 405, "method-not-allowed")
    assert answer.headers["allow"] == "PATCH"


async def test_a_missing_token_is_a_problem(redis):
    transport = httpx.ASGITransport(app=create_app(redis, ACCESS))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.get("/v1/runs")
    checked(answer, 401, "unauthorized")
    assert answer.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize("stated", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_a_body_that_is_not_json_is_refused(api, stated):
    answer = await api.post("/v1/runs", content=b'{"recipe": {}}', headers={"content-type": stated})
    problem = checked(answer, 415, "unsupported-media-type")
    assert problem["errors"] == [{"field": "content-type", "value": repr(stated), "expected": "application/json"}]


async def test_a_body_above_the_limit_is_a_problem(api):
    answer = await api.post("/v1/runs", content=b" " * (MOST_BODY + 1), headers={"content-type": "application/json"})
    checked(answer, 413, "content-too-large")


async def test_each_fault_of_a_request_is_listed(api):
    problem = checked(await api.post("/v1/runs", json={"idd": 1, "id": 2}), 422, "invalid-request")
    assert {error["field"] for error in problem["errors"]} == {"recipe", "idd", "id"}
    assert {"field": "recipe", "value": None, "expected": "this field is required"} in problem["errors"]
    assert {"field": "idd", "value": "1", "expected": "a known field"} in problem["errors"]


async def test_each_fault_of_a_recipe_is_listed(api):
    document = recipe_document("/m", learner={"ranks": 0})
    problem = checked(await api.post("/v1/runs", json={"recipe": document}), 422, "recipe")
    [error] = problem["errors"]
    assert (error["field"], error["value"]) == ("learner.ranks", "0")
    assert error["expected"].startswith("a number")


@pytest.mark.parametrize("body", [{"recipe": "x" * 10_000}, {"recipe": recipe_document("/m"), "id": "x" * 10_000}])
async def test_a_long_value_is_cut(api, body):
    problem = checked(await api.post("/v1/runs", json=body), 422, "invalid-request" if len(body) == 1 else "recipe")
    [error] = problem["errors"]
    assert len(error["value"]) == VALUE_CHARACTERS
    assert len(problem["detail"]) < 2 * VALUE_CHARACTERS


@pytest.mark.parametrize(
    "body", [b"{", b"\xff\xfe", b"[" * 100_000, b'{"recipe": NaN}', b'{"recipe": {"name": "\\ud800"}}', b'"\\ud800"']
)
async def test_no_body_is_an_error_of_ours(api, body):
    answer = await api.post("/v1/runs", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 422), answer.text
    assert answer.json()["detail"]


async def test_what_is_no_json_is_told_by_its_place(api):
    answer = await api.post("/v1/runs", content=b'{"recipe": {}} xx', headers={"content-type": "application/json"})
    problem = checked(answer, 422, "invalid-request")
    assert problem["detail"] == "body: not JSON at character 15 (extra data): expected one JSON document"


async def test_an_unexpected_exception_shows_nothing_of_itself(redis, caplog):
    app = create_app(redis, ACCESS)

    async def fail():
        raise RuntimeError("a secret of the platform")

    app.add_api_route("/fails", fail)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://localhost", headers=HEADERS
    ) as client:
        with caplog.at_level(logging.ERROR):
            answer = await client.get("/fails")
    problem = checked(answer, 500, "unexpected")
    assert "secret" not in answer.text
    assert problem["request_id"] in caplog.text
    assert "a secret of the platform" in caplog.text


def test_many_faults_and_long_lines_are_cut():
    problem = problem_of(422, "\n".join([invalid("a", "x", "y")] * (MOST_ERRORS + 7) + ["z" * 10 * LINE_CHARACTERS]))
    assert len(problem.extras["errors"]) == MOST_ERRORS
    assert problem.detail.endswith("and 8 more")
    assert len(problem_of(422, "z" * 10 * LINE_CHARACTERS).detail) == LINE_CHARACTERS


def test_a_lone_surrogate_can_be_sent():
    assert json.dumps(problem_of(422, "x: '\ud800' is not valid: expected y").detail).encode()
    assert problem_of(422, "\ud800").detail == "\\ud800"
