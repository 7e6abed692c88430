"""What every request passes: hosts, origins, forms of other pages, rates, response headers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from services.api.access.settings import AccessSettings
from services.api.app import LOOPBACK_ONLY, create_app
from services.api.guard.hosts import HostNames, HostNamesError, load_host_names
from services.api.guard.rates import FAILURES, network_of
from services.streams.state.runs import RunRecords
from tests.harness.api_access import ACCESS, HEADERS
from tests.harness.small_run import recipe_document
from tests.services.api.access.platforms import TOKENS, access_of, bearer, client_of

FORM = "text/plain"
CLUSTER = HostNames(frozenset({"penstock.example.org", "penstock-api"}))


async def status_for(redis: Any, host: str, path: str = "/v1/runs", hosts: HostNames = LOOPBACK_ONLY) -> int:
    """The status of a request with a Host; the server's own address is 10.1.2.3."""
    app = create_app(redis, ACCESS, hosts)

    async def from_elsewhere(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "server": ("10.1.2.3", 8470)}, receive, send)

    transport = httpx.ASGITransport(app=from_elsewhere)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=HEADERS) as client:
        return (await client.get(path, headers={"host": host.encode()})).status_code


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8470", "127.0.0.1:1", "[::1]:8470", "localhost.", "10.1.2.3"])
async def test_own_hosts_are_served(redis: Any, host: str) -> None:
    assert await status_for(redis, host) == 200


@pytest.mark.parametrize(
    "host",
    ["attacker.example", "127.0.0.1.nip.io", "localhost.attacker.example:8470", "10.1.2.4", "penstock.example.org"],
)
async def test_a_rebound_name_reaches_no_route(redis: Any, host: str) -> None:
    """A page of a name that was let to point here sends that name as Host, and no foreign Origin."""
    for path in ("/v1/runs", "/healthz", "/", "/v1/nothing"):
        assert await status_for(redis, host, path) == 421


@pytest.mark.parametrize("host", ["", "a b", "localhost:port", "localhost@evil", "évil", "[::1", "x" * 300])
async def test_what_is_no_host_is_refused(redis: Any, host: str) -> None:
    assert await status_for(redis, host) in (400, 421)


async def test_a_cluster_is_reached_by_its_names(redis: Any) -> None:
    assert await status_for(redis, "penstock.example.org", hosts=CLUSTER) == 200
    assert await status_for(redis, "penstock-api:8470", hosts=CLUSTER) == 200
    # A kubelet and Prometheus address a pod by its own address, and need no token.
    assert await status_for(redis, "10.1.2.3:8470", "/healthz", CLUSTER) == 200
    assert await status_for(redis, "10.1.2.3:8470", "/v1/runs", CLUSTER) == 421


def test_host_names_from_the_environment() -> None:
    assert load_host_names({}).names == frozenset()
    assert load_host_names({"PENSTOCK_HOSTS": "A.example, b.example. ,"}).names == {"a.example", "b.example"}
    for wrong in ("http://a.example", "a:8470", "*", "a b"):
        with pytest.raises(HostNamesError, match=r"PENSTOCK_HOSTS: .* is not valid: expected host names"):
            load_host_names({"PENSTOCK_HOSTS": wrong})


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://localhost"}, 202),
        ({"origin": "http://localhost:80"}, 202),
        ({"sec-fetch-site": "same-origin"}, 202),
        ({"sec-fetch-site": "none"}, 202),
        ({"origin": "https://attacker.example"}, 403),
        ({"origin": "http://localhost:3000"}, 403),
        ({"origin": "http://localhost.attacker.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
        ({"origin": "file://"}, 403),
        ({"origin": "http://localhost:99999"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 403),
    ],
)
async def test_pages_elsewhere_change_nothing(redis: Any, run_id: str, headers: dict[str, str], status: int) -> None:
    async with client_of(redis, ACCESS, HEADERS) as client:
        await client.post("/v1/runs", json={"id": run_id, "recipe": recipe_document("/model")})
        answer = await client.post(f"/v1/runs/{run_id}/cancel", headers=headers)
        read = await client.get("/v1/runs", headers=headers)
    assert answer.status_code == status, answer.text
    assert read.status_code == (200 if status == 202 else 403)
    assert (await RunRecords(redis).get(run_id)).cancel_requested is (status == 202)
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_a_link_may_open_the_page_but_reads_no_data(redis: Any) -> None:
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    async with client_of(redis, ACCESS, HEADERS) as client:
        assert (await client.get("/", headers=link)).status_code == 200
        assert (await client.get("/v1/runs", headers=link)).status_code == 403
        preflight = {"origin": "https://attacker.example", "access-control-request-method": "POST"}
        assert (await client.options("/v1/runs", headers=preflight)).status_code == 403


@pytest.mark.parametrize("kind", [FORM, "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""])
async def test_a_form_of_another_page_submits_nothing(redis: Any, run_id: str, kind: str) -> None:
    """Even with a token: what a form can send without asking the server is no JSON."""
    content = f'{{"id": "{run_id}", "recipe": {{"name": "="}}}}'
    async with client_of(redis, ACCESS, HEADERS) as client:
        answer = await client.post("/v1/runs", content=content, headers={"content-type": kind})
        foreign = await client.post("/v1/runs", content=content, headers={"content-type": kind, "origin": "null"})
    assert answer.status_code == 415, answer.text
    assert foreign.status_code == 403
    assert not await RunRecords(redis).exists(run_id)


async def test_responses_say_what_browsers_may_do(redis: Any) -> None:
    async with client_of(redis, ACCESS) as client:
        for path, status in (("/v1/runs", 401), ("/healthz", 200), ("/nothing", 404)):
            answer = await client.get(path)
            assert answer.status_code == status
            policy = answer.headers["content-security-policy"]
            for part in ("default-src 'self'", "frame-ancestors 'none'", "object-src 'none'", "base-uri 'none'"):
                assert part in policy
            assert answer.headers["cross-origin-opener-policy"] == "same-origin"
            assert answer.headers["cross-origin-resource-policy"] == "same-origin"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert "set-cookie" not in answer.headers


async def test_failed_sign_ins_of_one_address_are_limited(redis: Any) -> None:
    access = access_of()
    async with client_of(redis, access, address=("192.0.2.7", 1)) as client:
        found = [(await client.get("/v1/runs", headers=bearer(f"guess-{n}"))) for n in range(FAILURES.amount + 5)]
        valid = await client.get("/v1/runs", headers=bearer(TOKENS["viewer"]))
    statuses = [answer.status_code for answer in found]
    # A new minute may start meanwhile.
    assert {*statuses} == {401, 429}
    assert 1 <= int(found[-1].headers["retry-after"]) <= 60
    assert valid.status_code == 200


async def test_a_principal_may_ask_so_often(redis: Any) -> None:
    access = access_of(AccessSettings(requests_per_minute=5))
    async with client_of(redis, access) as client:
        found = [await client.get("/v1/whoami", headers=bearer(TOKENS["viewer"])) for _ in range(11)]
        other = await client.get("/v1/whoami", headers=bearer(TOKENS["admin"]))
    assert [answer.status_code for answer in found].count(429) >= 1
    limited = next(answer for answer in found if answer.status_code == 429)
    assert 1 <= int(limited.headers["retry-after"]) <= 60
    assert other.status_code == 200


def test_clients_are_counted_by_network() -> None:
    assert network_of("192.0.2.7") == "192.0.2.7"
    assert network_of("::ffff:192.0.2.7") == "192.0.2.7"
    assert network_of("2001:db8:1:2:3::1") == network_of("2001:db8:1:2:ffff::") == "2001:db8:1:2::"
    assert network_of("unknown") == "unknown"
