"""Each status that the document gives an operation occurs: a request provokes it."""

import asyncio
import json
import tempfile
from functools import cache
from pathlib import Path

import httpx
import pytest

from services.api.access.roles import AccessUnavailableError
from services.api.access.settings import AccessSettings
from services.api.access.tokens import TokenAccess, local_principal, token_digest
from services.api.answers.openapi import PREFIX, documented
from services.api.answers.statuses import parameters_of, statuses_of
from services.api.app import create_app
from services.api.guard.body_limit import BodyLimit
from services.api.guard.sign_in import is_closed
from services.contracts import RunState
from services.settings import Recipe
from services.streams.connection.client import client as redis_client
from services.streams.state.runs import RunRecords
from tests.harness.api_access import ACCESS, HEADERS, TOKEN
from tests.harness.free_ports import free_port
from tests.harness.small_run import recipe_document

APP = create_app(None, ACCESS)
JSON = {"content-type": "application/json"}
OPERATIONS = [pytest.param(route, method, id=route.name) for route, method in documented(APP)]
NAME = "step-000001.e0001-learner.00000000"
BAD = "²"
"""No number, no flag, no cursor, and no date."""


@cache
def document():
    """Made when a test needs it: it takes a second, and every test process imports this file."""
    return APP.openapi()


def example_body(route, method):
    content = document()["paths"][route.path_format][method.lower()].get("requestBody", {}).get("content")
    if content is None:
        return None
    text = json.dumps(content)
    name = text.split(PREFIX)[1].split('"')[0]
    return json.dumps(document()["components"]["schemas"][name]["examples"][0])


class NoKeys(TokenAccess):
    """As an issuer whose keys cannot be fetched."""

    async def identify(self, connection):
        raise AccessUnavailableError("the issuer's keys cannot be fetched")


class Provoker:
    """Makes the request of one operation that is answered with a status."""

    def __init__(self, redis, run, route, method, app):
        self.redis, self.run, self.route, self.method = redis, run, route, method
        self.app = app
        self.records = RunRecords(redis)

    async def ask(self, app=None, run=None, params=None, headers=None, content=None, token=True):
        path = self.route.path.replace("{run}", run or self.run).replace("{name}", NAME).replace("{file:path}", "file")
        path = path.replace("{process}", "learner-1")
        content = example_body(self.route, self.method) if content is None else content
        sent = {**(HEADERS if token else {}), **(JSON if content is not None else {}), **(headers or {})}
        transport = httpx.ASGITransport(app=app or self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as api:
            return await api.request(self.method, path, params=params, headers=sent, content=content)

    async def create(self, state=RunState.QUEUED):
        await self.records.create(self.run, Recipe.model_validate(recipe_document("/none")))
        if state is not RunState.QUEUED:
            await self.records.transition(self.run, state, "by the test")

    async def provoke_304(self):
        await self.create(RunState.CANCELLED)
        tag = (await self.ask()).headers["etag"]
        return await self.ask(headers={"if-none-match": tag})

    async def provoke_400(self):
        return await self.ask(headers={"host": "a b"})

    async def provoke_401(self):
        return await self.ask(token=False)

    async def provoke_403(self):
        return await self.ask(headers={"origin": "http://elsewhere.example"})

    async def provoke_404(self):
        if self.route.name == "compare_runs":
            return await self.ask(params={"runs": "none-a,none-b"})
        return await self.ask(run="none")

    async def provoke_408(self):
        async def slow():
            yield b"{"
            await asyncio.Event().wait()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BodyLimit.__init__, "__defaults__", (0.05,))
            return await self.ask(create_app(self.redis, ACCESS), content=slow())

    async def provoke_409(self):
        if self.route.name == "clone_run":
            await self.create()
            return await self.ask(content=json.dumps({"id": self.run}))
        if "{run}" not in self.route.path:
            await self.create()
            body = json.dumps({"id": self.run, "recipe": recipe_document("hf://org/name@main")})
            return await self.ask(content=body)
        await self.create(RunState.SUCCEEDED)
        answer = await self.ask()
        if answer.status_code != 409:
            self.run += "-queued"
            await self.create()
            answer = await self.ask()
        return answer

    async def provoke_412(self):
        await self.create()
        return await self.ask(headers={"if-match": '"999"'})

    async def provoke_413(self):
        return await self.ask(content=b"", headers={"content-length": str(2**40)})

    async def provoke_415(self):
        return await self.ask(headers={"content-type": "text/plain"})

    async def provoke_416(self):
        with tempfile.TemporaryDirectory() as runs, pytest.MonkeyPatch.context() as patch:
            patch.setenv("PENSTOCK_RUNS", runs)
            await self.create()
            await self.records.set_paths(self.run, export_path=runs)
            for folder in ("export", f"checkpoints/{NAME}"):
                (Path(runs) / self.run / folder).mkdir(parents=True)
                (Path(runs) / self.run / folder / "file").write_bytes(b"short")
            return await self.ask(headers={"range": "bytes=99-"})

    async def provoke_421(self):
        return await self.ask(headers={"host": "elsewhere.example"})

    async def provoke_422(self):
        await self.create()
        if self.route.body_field is not None:
            return await self.ask(content="[]")
        taken = parameters_of(self.route)
        wrong = taken.queries or {"no_such_parameter"}
        return await self.ask(params=dict.fromkeys(wrong, BAD), headers=dict.fromkeys(taken.headers, "-"))

    async def provoke_429(self):
        access = TokenAccess({token_digest(TOKEN): local_principal()}, AccessSettings(requests_per_minute=1))
        app = create_app(self.redis, access)
        await self.ask(app)
        return await self.ask(app)

    async def provoke_503(self):
        silent = redis_client(f"redis://127.0.0.1:{free_port()}/0", patience_s=0.1)
        try:
            answer = await self.ask(create_app(silent, ACCESS))
            # What needs no Redis needs to know who asks.
            return answer if answer.status_code == 503 else await self.ask(create_app(silent, NoKeys({})))
        finally:
            await silent.aclose()


@pytest.mark.parametrize(("route", "method"), OPERATIONS)
async def test_each_documented_status_occurs(redis, run_id, route, method):
    app = create_app(redis, ACCESS)
    for status in statuses_of(route, method, closed=is_closed(route.path)):
        provoker = Provoker(redis, f"{run_id}-{status}", route, method, app)
        answer = await getattr(provoker, f"provoke_{status}")()
        assert answer.status_code == status, (status, answer.text[:300])
        if status >= 400:
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json().keys() >= {"type", "title", "status", "detail", "request_id"}
