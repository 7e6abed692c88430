"""Every route without a token, with a wrong one, with the token of each role; new routes are covered as well."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from services.api.access.roles import Role
from services.api.app import create_app
from services.api.dependencies import run_with, somewhere
from services.api.routes.projects import show_principal
from services.settings import parse_recipe
from services.streams.state.runs import RunRecords
from tests.harness.small_run import recipe_document
from tests.services.api.access.platforms import TOKENS, access_of, bearer, client_of

OPEN = {"/healthz", "/readyz", "/metrics", "/", "/docs", "/favicon.ico"}
"""Probes, and files that everybody has: the page, which shows nothing without a token."""
WITHOUT_ROLE = {show_principal}
JSON = {"content-type": "application/json"}


APP: FastAPI = create_app(None, access_of())
ROUTES = {
    f"{method} {route.path}": route
    for route in APP.routes
    if isinstance(route, APIRoute)
    for method in sorted(route.methods)
}
CLOSED = {name: route for name, route in ROUTES.items() if route.path not in OPEN}


def role_of(route: APIRoute) -> Role | None:
    """The role that a route demands, as its dependencies' closures say."""
    demanded = []
    waiting = list(route.dependant.dependencies)
    while waiting:
        dependency = waiting.pop()
        waiting += dependency.dependencies
        code = getattr(dependency.call, "__code__", None)
        if code in (somewhere(Role.VIEWER).__code__, run_with(Role.VIEWER).__code__):
            cells = dict(zip(code.co_freevars, dependency.call.__closure__ or (), strict=True))
            demanded.append(cells["role"].cell_contents)
    assert len({*demanded}) <= 1, f"{route.path}: {demanded}"
    return demanded[0] if demanded else None


def address_of(route: APIRoute, run: str) -> str:
    return re.sub(r"\{[^}]*\}", lambda found: run if found[0] == "{run}" else "x", route.path)


def test_the_table_has_routes_of_all_kinds() -> None:
    assert len(CLOSED) >= 14
    assert {role_of(route) for route in CLOSED.values()} >= set(Role)


@pytest.mark.parametrize("name", CLOSED)
def test_every_route_of_v1_demands_a_role(name: str) -> None:
    route = CLOSED[name]
    assert route.path.startswith("/v1/"), "a route beside /v1 needs no token: list it in OPEN if that is wanted"
    assert route.endpoint in WITHOUT_ROLE or role_of(route) is not None


@pytest.mark.parametrize("name", CLOSED)
async def test_without_and_with_a_wrong_token(redis: Any, name: str) -> None:
    method, path = name.split(" ")[0], address_of(CLOSED[name], "no-such-run")
    wrong = [{}, bearer("wrong"), bearer(""), {"authorization": "Basic dTpw"}, {"authorization": "Bearer"}]
    async with client_of(redis, access_of()) as client:
        for headers in wrong:
            answer = await client.request(method, path, headers=headers)
            assert answer.status_code == 401, (headers, answer.text)
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert answer.headers["cache-control"] == "no-store"
        shown = await client.request(method, path, headers=bearer(TOKENS["stranger"]))
        expected = 200 if CLOSED[name].endpoint in WITHOUT_ROLE else 404 if "{run}" in CLOSED[name].path else 403
        assert shown.status_code in (expected, 422), shown.text


@pytest.mark.parametrize("name", [name for name, route in CLOSED.items() if role_of(route) and "{run}" in route.path])
async def test_routes_of_a_run_by_role(redis: Any, run_id: str, name: str) -> None:
    """A lower role than a route's is refused, and a run of another project is not visible."""
    route, method = CLOSED[name], name.split(" ")[0]
    await RunRecords(redis).create(run_id, parse_recipe(recipe_document("/none")))
    demanded = role_of(route)
    async with client_of(redis, access_of()) as client:
        for role in Role:
            headers = bearer(TOKENS[role.name.lower()]) | JSON
            if role < demanded:
                answer = await client.request(method, address_of(route, run_id), headers=headers, content=b"{}")
                assert answer.status_code == 403, (role, answer.text)
                assert demanded.name.lower() in answer.json()["detail"]
        hidden = await client.request(method, address_of(route, run_id), headers=bearer(TOKENS["team"]))
        assert hidden.status_code in (404, 422), hidden.text
        assert run_id not in hidden.text or "does not exist" in hidden.text


@pytest.mark.parametrize("path", sorted(OPEN - {"/readyz"}))
async def test_open_paths_need_no_token(redis: Any, path: str) -> None:
    async with client_of(redis, access_of()) as client:
        answer = await client.get(path)
    assert answer.status_code in (200, 307), answer.text
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/nothing", "/v1/runs/", "/v1/runs/x%2F..%2F.."])
async def test_unknown_paths_below_v1_are_closed(redis: Any, path: str) -> None:
    async with client_of(redis, access_of()) as client:
        assert (await client.get(path)).status_code == 401
        assert (await client.get(path, headers=bearer(TOKENS["admin"]))).status_code in (404, 405)


async def test_a_viewer_and_an_operator_of_another_project(redis: Any, run_id: str) -> None:
    document = {"id": run_id, "recipe": recipe_document("/none"), "project": "team-a"}
    async with client_of(redis, access_of()) as client:
        refused = await client.post("/v1/runs", json=document | {"project": "default"}, headers=bearer(TOKENS["team"]))
        viewer = await client.post("/v1/runs", json=document, headers=bearer(TOKENS["viewer"]))
        allowed = await client.post("/v1/runs", json=document, headers=bearer(TOKENS["team"]))
        listed = [
            (await client.get("/v1/runs", headers=bearer(TOKENS[name]))).json()["runs"] for name in ("team", "viewer")
        ]
    assert (refused.status_code, viewer.status_code, allowed.status_code) == (403, 403, 201), refused.text
    assert all(run_id in [run["id"] for run in runs] for runs in listed)
    assert {run["project"] for run in listed[0]} == {"team-a"}


async def test_who_asks(redis: Any) -> None:
    async with client_of(redis, access_of()) as client:
        found = (await client.get("/v1/whoami", headers=bearer(TOKENS["team"]))).json()
    assert found == {"name": "team", "roles": {"team-a": "admin"}, "expires_at": None}


async def test_no_token_is_logged_or_echoed(redis: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = "wrong-but-secret-token"
    async with client_of(redis, access_of()) as client:
        answers = [
            await client.get("/v1/runs", headers=bearer(TOKENS["admin"])),
            await client.get("/v1/runs", headers=bearer(wrong)),
            await client.post("/v1/runs", headers=bearer(TOKENS["admin"]), json={"token": wrong}),
            await client.post("/v1/runs/x/cancel?token=" + wrong, headers=bearer(TOKENS["admin"])),
        ]
        audit = await client.get("/v1/audit", headers=bearer(TOKENS["admin"]))
    assert [answer.status_code for answer in answers] == [200, 401, 422, 422]
    assert wrong not in answers[3].text
    assert TOKENS["admin"] not in caplog.text
    shown = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert not any(wrong in line for line in shown)
    assert wrong not in audit.text
