"""The audit log: who did what, when, from where, with which result; denied requests; no secrets; nothing is lost."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from services.api.access.settings import AccessSettings, AuditSettings
from services.api.guard.auditing import stated_values
from services.api.guard.rates import DENIALS
from services.streams.access.audit import LOG, PENDING, PENDING_S, AuditEntry, AuditLog, ChangeOutcome
from services.streams.connection.client import RedisUnavailableError
from services.streams.state.runs import RunRecords
from tests.harness.small_run import recipe_document
from tests.services.api.access.platforms import TOKENS, access_of, bearer, client_of

ADMIN = bearer(TOKENS["admin"])


@pytest.fixture
def address() -> str:
    """An address of this test's client alone."""
    return f"test-{uuid.uuid4().hex[:8]}"


@pytest.fixture
async def client(redis: Any, address: str) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(redis, access_of(), ADMIN, (address, 1)) as found:
        yield found


async def entries(client: httpx.AsyncClient, address: str, **wanted: str) -> list[dict[str, Any]]:
    """This client's entries, oldest first."""
    found = (await client.get("/v1/audit", params={"limit": "500"} | wanted)).json()["entries"]
    return [entry for entry in reversed(found) if entry["address"] == address]


async def test_each_change_is_an_entry(client: httpx.AsyncClient, address: str, run_id: str) -> None:
    began = time.time()
    await client.post("/v1/runs", json={"id": run_id, "recipe": recipe_document("/none")})
    scaled = await client.patch(f"/v1/runs/{run_id}/scale", json={"rollout": 3})
    await client.patch(f"/v1/runs/{run_id}/scale", json={"rollout": 0})
    await client.post(f"/v1/runs/{run_id}/cancel", headers=bearer(TOKENS["operator"]))
    await client.delete(f"/v1/runs/{run_id}?files=true", headers=bearer(TOKENS["operator"]))
    await client.post("/v1/runs/no-such-run/pause")
    await client.get("/v1/runs")  # reads are no changes
    found = await entries(client, address)
    shown = [(entry["principal"], entry["method"], entry["route"], entry["run"], entry["status"]) for entry in found]
    assert shown == [
        ("admin", "POST", "/v1/runs", run_id, 201),
        ("admin", "PATCH", "/v1/runs/{run}/scale", run_id, 202),
        ("admin", "PATCH", "/v1/runs/{run}/scale", run_id, 422),
        ("operator", "POST", "/v1/runs/{run}/cancel", run_id, 202),
        ("operator", "DELETE", "/v1/runs/{run}", run_id, 403),
        ("admin", "POST", "/v1/runs/{run}/pause", "no-such-run", 404),
    ]
    assert [entry["outcome"] for entry in found] == ["done", "done", "refused", "done", "refused", "refused"]
    assert [entry["project"] for entry in found[:5]] == ["default"] * 5
    assert found[0]["changes"]["recipe.name"] == "tiny"
    assert found[1]["changes"] == {"rollout": 3}
    assert found[4]["changes"] == {"files": "true"}
    assert found[1]["request"] == scaled.headers["x-request-id"]
    assert all(began <= entry["at"] <= time.time() for entry in found)


async def test_an_entry_is_there_when_the_answer_is(redis: Any, client: httpx.AsyncClient, run_id: str) -> None:
    answer = await client.post("/v1/runs", json={"id": run_id, "recipe": recipe_document("/none")})
    [(_, fields)] = await redis.xrevrange(LOG, count=1)
    assert AuditEntry.model_validate_json(fields[b"m"]).request == answer.headers["x-request-id"]
    assert not await redis.hexists(PENDING, answer.headers["x-request-id"])


async def test_denied_requests_are_entries_too(client: httpx.AsyncClient, address: str) -> None:
    await client.post("/v1/runs", headers=bearer("wrong"))
    await client.get("/v1/runs", headers={"host": "attacker.example"})
    await client.post("/v1/runs", headers={"origin": "https://attacker.example"})
    found = await entries(client, address)
    assert [(entry["status"], entry["outcome"], entry["principal"]) for entry in found] == [
        (401, "refused", ""),
        (421, "refused", ""),
        (403, "refused", ""),
    ]


async def test_denied_requests_do_not_flood_the_log(client: httpx.AsyncClient, address: str) -> None:
    for _ in range(DENIALS.amount + 20):
        await client.get("/v1/runs", headers={"origin": "https://attacker.example"})
    # A new minute may start meanwhile.
    assert len(await entries(client, address)) <= 2 * DENIALS.amount < 2 * (DENIALS.amount + 20)


async def test_the_log_is_paged_and_filtered(client: httpx.AsyncClient, address: str, run_id: str) -> None:
    for number in range(5):
        await client.post(f"/v1/runs/{run_id}/pause", headers=bearer(TOKENS["operator" if number % 2 else "admin"]))
    read, before = [], "+"
    while before:
        page = (await client.get("/v1/audit", params={"run": run_id, "limit": "2", "before": before})).json()
        assert len(page["entries"]) <= 2
        read += page["entries"]
        before = page["next"]
    assert [entry["principal"] for entry in read] == ["admin", "operator", "admin", "operator", "admin"]
    assert len(await entries(client, address, run=run_id, by="operator")) == 2
    assert await entries(client, address, run=run_id, project="other") == []
    for wrong in ({"before": "x"}, {"before": "１-1"}, {"limit": "0"}, {"limit": "501"}):  # noqa: RUF001
        assert (await client.get("/v1/audit", params=wrong)).status_code == 422


async def test_a_projects_administrator_sees_its_changes(client: httpx.AsyncClient, address: str, run_id: str) -> None:
    document = {"id": run_id, "recipe": recipe_document("/none")}
    await client.post("/v1/runs", json=document | {"project": "team-a"})
    await client.post("/v1/runs", json=document | {"id": f"{run_id}-b"})
    seen = (await client.get("/v1/audit", headers=bearer(TOKENS["team"]))).json()["entries"]
    assert run_id in {entry["run"] for entry in seen}
    assert {entry["project"] for entry in seen} == {"team-a"}
    assert (await client.get("/v1/audit", headers=bearer(TOKENS["operator"]))).status_code == 403


async def test_a_change_that_cannot_be_noted_is_not_made(
    redis: Any, client: httpx.AsyncClient, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(self: AuditLog, entry: AuditEntry) -> None:
        raise RedisUnavailableError("Redis is away")

    monkeypatch.setattr(AuditLog, "begin", fails)
    answer = await client.post("/v1/runs", json={"id": run_id, "recipe": recipe_document("/none")})
    assert answer.status_code == 503
    assert "nothing was changed: the audit log cannot note it: Redis is away" in answer.json()["detail"]
    assert not await RunRecords(redis).exists(run_id)


async def test_a_lost_outcome_becomes_unknown(
    redis: Any, client: httpx.AsyncClient, address: str, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that died after the change leaves a note, which the next reader turns into an entry."""

    async def fails(self: AuditLog, entry: AuditEntry, kept: int, days: int) -> None:
        raise RedisUnavailableError("Redis is away")

    with monkeypatch.context() as dying:
        dying.setattr(AuditLog, "end", fails)
        answer = await client.post("/v1/runs", json={"id": run_id, "recipe": recipe_document("/none")})
    assert answer.status_code == 201
    assert await entries(client, address) == []  # the request could still be in flight
    request = answer.headers["x-request-id"]
    note = AuditEntry.model_validate_json(await redis.hget(PENDING, request))
    await redis.hset(PENDING, request, note.model_copy(update={"at": time.time() - PENDING_S - 1}).model_dump_json())
    [entry] = await entries(client, address)
    assert (entry["outcome"], entry["path"], entry["principal"]) == ("unknown", "/v1/runs", "admin")
    assert not await redis.hexists(PENDING, request)


async def test_entries_are_kept_by_number_and_age(own_server: Any) -> None:
    _, redis = own_server
    audit = AuditLog(redis)
    old = int((time.time() - 10 * 24 * 3600) * 1000)
    for number in range(300):
        await redis.xadd(LOG, {"m": "{}"}, id=f"{old + number}-0")

    async def add(kept: int, days: int) -> int:
        entry = AuditEntry(
            at=time.time(), request=uuid.uuid4().hex, method="POST", path="/", outcome=ChangeOutcome.DONE
        )
        await audit.begin(entry)
        await audit.end(entry, kept, days)
        await audit.end(entry, kept, days)  # repeated: no second entry
        return int(await redis.xlen(LOG))

    assert await add(1000, 90) == 301
    assert await add(150, 90) < 300  # whole nodes of the stream are deleted
    assert await add(1000, 9) <= 100
    assert AccessSettings(audit=AuditSettings(entries=1, days=1)).audit.days == 1


def test_stated_values_hold_no_secret_and_are_short() -> None:
    body = (
        b'{"recipe": {"name": "r", "model": {"path": "/x"}}, "files": {"./a.py": "SECRET TEXT"}, "api_key": "s3cret",'
        b'"overrides": {"learner.learning_rate": 1e-5, "wandb_token": "s3cret"}, "long": "' + b"x" * 5000 + b'",'
        b'"huge": 1' + b"0" * 400 + b', "none": null, "list": [1, 2]}'
    )
    found = stated_values(b"dry_run=true&token=s3cret", body)
    assert found["recipe.name"] == "r"
    assert found["files"] == ["./a.py"]
    assert found["overrides.learner.learning_rate"] == 1e-5
    assert found["dry_run"] == "true"
    assert len(found["long"]) == 200
    assert (found["none"], found["list"]) == (None, "[1, 2]")
    assert "s3cret" not in str(found)
    assert "SECRET" not in str(found)
    assert stated_values(b"", b"[" * 60_000) == {"body": "no JSON"}
    assert stated_values(b"", b"x" * 70_000) == {"body": "more than 65536 bytes"}
    assert stated_values(b"", b'"\\ud800"') == {}


@pytest.mark.parametrize("before", ["0-0", "00-000", "0-1", "9999999999999999999-9999999999999999999"])
async def test_any_cursor_is_answered(client: httpx.AsyncClient, before: str) -> None:
    answer = await client.get("/v1/audit", params={"before": before})
    assert answer.status_code == 200, answer.text
    if before.startswith("0"):
        assert answer.json() == {"entries": [], "next": None}
