"""Requests made from the OpenAPI document, good and bad, over a real socket: no 5xx, and every answer as documented."""

import asyncio
import json
import random
import threading
import time
from collections import Counter
from functools import cache
from http.client import HTTPConnection
from urllib.parse import quote

import httpx
import hypothesis
import pytest
import schemathesis
from limits import RateLimitItemPerMinute
from schemathesis import checks

from services.api.app import create_app
from services.api.guard import sign_in
from services.api.server import serve_api
from services.contracts import RunState
from services.settings import Recipe
from services.streams.connection.client import connect
from services.streams.state.runs import RunRecords
from tests.harness.api_access import ACCESS, HEADERS
from tests.harness.each import each
from tests.harness.free_ports import free_port
from tests.harness.servers.redis_servers import embedded_server
from tests.harness.small_run import recipe_document

RUN = "schemathesis"
DEADLINE_S = 20.0
SCHEMA, PLAIN = (schemathesis.pytest.from_fixture(name) for name in ("documented", "without_coverage"))
"""Their requests are made when a test runs: it takes seconds, and every test process would make them."""
checks.load_all_checks()
EXCLUDED = [
    checks.CHECKS.get_one("positive_data_acceptance"),  # a recipe has rules that no JSON schema can express
    checks.CHECKS.get_one("ensure_resource_availability"),  # a run that was asked to be deleted is still there
    checks.CHECKS.get_one("allow_header_conformance"),  # /v1/runs/archive is the path of a run too, with its methods
    checks.CHECKS.get_one("ignored_auth"),  # the token is sent here too; tests/services/api/access asks without
]
NEGATIVE = checks.CHECKS.get_one("negative_data_rejection")
UNSUPPORTED = checks.CHECKS.get_one("unsupported_method")
FEW = {"max_examples": 3}
MANY = {"max_examples": 150}
STEADY = {"deadline": None, "derandomize": True, "suppress_health_check": list(hypothesis.HealthCheck)}
HOSTILE = (
    "²",
    "\uff11",
    "\u0661",
    "\0",
    "\ud800",
    "9" * 400,
    "-1",
    "NaN",
    "1e999",
    "../../etc/passwd",
    "%",
    "' OR 1=1",
    "",
)
"""Digits that are none of ours, NUL, a lone surrogate, numbers without bound, paths."""


@cache
def _app():
    return create_app(None, ACCESS)


def _schema(coverage=True):
    made = schemathesis.openapi.from_dict(_app().openapi())
    made.config.checks.negative_data_rejection.expected_statuses += ["408", "412", "413"]
    made.config.phases.coverage.enabled = coverage
    return made


@pytest.fixture(scope="module")
def documented():
    return _schema()


@pytest.fixture(scope="module")
def without_coverage():
    """Of a recipe's schema the coverage makes thousands of requests."""
    return _schema(coverage=False)


async def _serve(redis_url, port, started):
    redis = await connect(redis_url)
    try:
        records, stopping = RunRecords(redis), asyncio.Event()
        if not await records.exists(RUN):
            await records.create(RUN, Recipe.model_validate(recipe_document("/none")))
            await records.transition(RUN, RunState.CANCELLED, "by the test")
        started.extend((asyncio.get_running_loop(), stopping))
        await serve_api(redis, ACCESS, "127.0.0.1", port, stopping)
    finally:
        await redis.aclose()


@pytest.fixture(scope="module")
def redis_url():
    """A server of its own: some of the requests close or delete all runs."""
    with embedded_server() as server:
        yield f"redis://127.0.0.1:{server.port}/0"


@pytest.fixture(scope="module")
def address(redis_url):
    """A gateway in a thread of its own."""
    port, started = free_port(), []
    patch = pytest.MonkeyPatch()
    patch.setattr(sign_in, "FAILURES", RateLimitItemPerMinute(10**6))  # else most requests without a token are 429
    thread = threading.Thread(target=lambda: asyncio.run(_serve(redis_url, port, started)))
    thread.start()
    ends = time.monotonic() + DEADLINE_S
    while True:
        try:
            httpx.get(f"http://127.0.0.1:{port}/healthz")
            break
        except httpx.ConnectError:
            assert time.monotonic() < ends, "the gateway did not start"
            time.sleep(0.02)
    yield f"http://127.0.0.1:{port}"
    loop, stopping = started
    loop.call_soon_threadsafe(stopping.set)
    thread.join(DEADLINE_S)
    patch.undo()
    assert not thread.is_alive()


def _conforms(case, address):
    # Of an empty list or mapping nothing is sent, and of another one a text, so what was made to be wrong may be right.
    unlike = any(value is None or isinstance(value, list | dict) for value in (case.query or {}).values())
    excluded = [*EXCLUDED, *([NEGATIVE] if unlike else [])]
    case.call_and_validate(base_url=address, headers=HEADERS, excluded_checks=excluded, timeout=DEADLINE_S)


@SCHEMA.exclude(operation_id="submit_run").parametrize()
@hypothesis.settings(**FEW, **STEADY)
def test_answers_are_as_documented(case, address):
    _conforms(case, address)


@PLAIN.include(operation_id="submit_run").parametrize()
@hypothesis.settings(**FEW, **STEADY)
def test_answers_to_recipes_are_as_documented(case, address):
    _conforms(case, address)


@SCHEMA.include(path_regex=r"\{run\}").parametrize()
@hypothesis.settings(**FEW, **STEADY)
def test_answers_of_a_run_are_as_documented(case, address):
    case.path_parameters["run"] = RUN
    _conforms(case, address)


@pytest.mark.slow
@SCHEMA.parametrize()
@hypothesis.settings(**MANY, **STEADY)
def test_many_answers_are_as_documented(case, address):
    if "run" in case.path_parameters and len(str(case.path_parameters["run"])) % 2:
        case.path_parameters["run"] = RUN
    _conforms(case, address)


LIFE = (
    ("POST", "/v1/runs/{run}/clone", {"overrides": {"learner.learning_rate": 1e-5}}),
    ("POST", "/v1/runs/{run}/cancel", None),
    ("POST", "/v1/runs/{run}/pause", None),
    ("POST", "/v1/runs/{run}/resume", {}),
    ("POST", "/v1/runs/{run}/resume", {"from_step": 3}),
    ("PATCH", "/v1/runs/{run}/scale", {"rollout": 2}),
    ("PATCH", "/v1/runs/{run}", {"learner.learning_rate": 2e-5}),
    ("PATCH", "/v1/runs/{run}", {"priority": 7}),
    ("POST", "/v1/runs/{run}/archive", None),
    ("DELETE", "/v1/runs/{run}", None),
)
ENDS = {"POST /v1/runs/{run}/cancel": RunState.CANCELLED}
"""What a controller, which is not there, would make of a request that was accepted."""


def _walk(documented, redis_url, address, seed, steps):
    """Requests one after the other about runs that earlier ones made, changed, ended or deleted; by call and status."""
    chosen, answered, runs = random.Random(seed), Counter(), []
    paths = documented.raw_schema["paths"].items()
    life = [*LIFE, *(("GET", path, None) for path, known in paths if "{run}" in path and "get" in known)]

    def ask(method, path, body, **parts):
        operation = documented[path][method]
        case = operation.Case(path_parameters=parts or {}, **({} if body is None else {"body": body}))
        case.media_type = None if body is None else "application/json"
        answer = case.call(base_url=address, headers=HEADERS, timeout=DEADLINE_S)
        case.validate_response(answer, excluded_checks=[*EXCLUDED, UNSUPPORTED])
        answered[f"{method} {path}", answer.status_code] += 1
        return answer

    for _ in range(steps):
        if not runs or chosen.random() < 0.04:
            runs.append(ask("POST", "/v1/runs", {"recipe": recipe_document("/none")}).json()["id"])
            continue
        method, path, body = chosen.choice(life)
        run, others = chosen.choice(runs), {"group": "g0", "name": "step-000001", "file": "a.json", "process": "p"}
        parts = {name: value for name, value in others.items() if f"{{{name}}}" in path}
        status = ask(method, path, body, run=run, **parts).status_code
        if status == 202 and (state := ENDS.get(f"{method} {path}")):
            asyncio.run(_end(redis_url, run, state))
    return answered


async def _end(redis_url, run, state):
    redis = await connect(redis_url)
    try:
        await RunRecords(redis).transition(run, state, "by the test")
    finally:
        await redis.aclose()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_the_lives_of_runs_are_as_documented(documented, redis_url, address, seed):
    answered = _walk(documented, redis_url, address, seed, steps=500)
    for called, status in (
        ("POST /v1/runs/{run}/clone", 201),
        ("POST /v1/runs/{run}/cancel", 202),
        ("POST /v1/runs/{run}/cancel", 409),
        ("POST /v1/runs/{run}/resume", 202),
        ("PATCH /v1/runs/{run}/scale", 202),
        ("PATCH /v1/runs/{run}", 202),
        ("DELETE /v1/runs/{run}", 202),
        ("GET /v1/runs/{run}", 200),
    ):
        assert answered[called, status], f"{called} was never answered with {status}: {sorted(answered.items())}"


def _operations():
    for path, operations in _app().openapi()["paths"].items():
        for method, operation in operations.items():
            yield method.upper(), path, operation


def _asked(address, method, path, headers=None, body=None):
    """Status and content, of a request that no library corrects."""
    connection = HTTPConnection(address.removeprefix("http://"), timeout=DEADLINE_S)
    try:
        connection.request(method, path, body=body, headers={**HEADERS, **(headers or {})})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _quoted(value):
    return quote(value.encode("utf-8", "surrogatepass"), safe="")


@each("method, path, operation", _operations, called=lambda case: case[2]["operationId"])
def test_hostile_values_are_4xx(address, method, path, operation):
    """In the path and in each parameter; a header takes only what HTTP can carry."""
    named = path.replace("{run}", RUN)
    for value in HOSTILE:
        asked = [("", path.replace("{run}", _quoted(value) or "%20"))] if "{run}" in path else []
        names = [each["name"] for each in operation.get("parameters", []) if each["in"] == "query"]
        asked += [(name, f"{named}?{name}={_quoted(value)}") for name in names]
        for name, target in asked:
            status, content = _asked(address, method, target)
            assert status < 500, (name, value, content[:300])
        for parameter in operation.get("parameters", []):
            if parameter["in"] == "header" and value.isascii() and "\0" not in value:
                status, content = _asked(address, method, named, {parameter["name"]: value})
                assert status < 500, (parameter["name"], value, content[:300])


BODIES = [
    *(json.dumps(value).encode() for value in ("\ud800", {"recipe": {"name": "\ud800"}}, {"recipe": {"\0": "\0"}})),
    *(b'{"recipe": %s, "rollout": %s, "from_step": %s}' % ((value,) * 3) for value in (b"NaN", b"1e999", b"9" * 5000)),
    json.dumps({"recipe": recipe_document("/none"), "files": {"\ud800": "\ud800", "./a.py": "\ud800\0"}}).encode(),
    json.dumps({"recipe": recipe_document("/none"), "id": "²", "project": "\uff11"}).encode(),
    b'{"a":' * 100_000,
    b"\xff\xfe\x00",
    b"",
    b"null",
]


def _with_bodies():
    taking = [each for each in _operations() if "requestBody" in each[2]]
    return [(method, path, body) for method, path, _ in taking for body in range(len(BODIES))]


@each("method, path, body", _with_bodies)
def test_hostile_bodies_are_4xx(address, method, path, body):
    json_only = {"content-type": "application/json"}
    status, content = _asked(address, method, path.replace("{run}", RUN), json_only, BODIES[body])
    assert status < 500, content[:500]
