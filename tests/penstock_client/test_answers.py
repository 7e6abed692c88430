"""Owns the tests of what the client makes of answers, above all of those that are not Penstock's.

Must not start a gateway.
"""

from __future__ import annotations

import json
import logging
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from penstock_client.access import TOKEN_VARIABLE
from penstock_client.client import Client
from penstock_client.errors import (
    AccessError,
    ApiError,
    ApiUnreachableError,
    NotThePlatformError,
    PlatformUnavailableError,
    RoleMissingError,
    TokenRefusedError,
)
from tests.deploy.command_line import penstock
from tests.harness.free_ports import free_port
from tests.harness.programs import needed
from tests.penstock_client.other_servers import Respond, answer, other_server, silent_server
from tests.system.certificates import make_certificates

TOKEN = "a-very-secret-token"
PROBLEM = "application/problem+json"
LOGIN = "<html><form action=/login>sign in</form></html>"


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def error_of(respond: Respond, route: str = "show") -> ApiError:
    """The error of a call to a server that answers like this."""
    with other_server(respond) as server, Client(server.url, token=TOKEN) as client:
        with pytest.raises(ApiError) as caught:
            getattr(client, route)("r")
        assert TOKEN not in str(caught.value) + repr(caught.value) + repr(client)
        assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("respond", "said"),
    [
        (answer(200, "text/html", LOGIN), "answers 200 with a web page, not JSON: expected Penstock's API"),
        (answer(403, "text/html", LOGIN), "refuses access (403), but not as Penstock's API does"),
        (answer(401, "application/json", "{}"), "refuses access (401), but not as Penstock's API does"),
        (answer(502, "text/html", LOGIN), "answers 502 with a web page"),
        (answer(200, "application/json", "{not json"), "answers 200 with application/json, not JSON"),
        (answer(200, "application/json", "[" * 100_000), "not JSON"),
        (answer(200, "application/json", '{"hello": 1}'), "answers JSON that is not Penstock's"),
        (answer(200, "application/json", '{"id": 1, "state": []}'), "answers JSON that is not Penstock's"),
        (answer(404, "application/json", '{"detail": "Not Found"}'), "has no route /v1/runs/r: it may be of an older"),
    ],
)
def test_what_is_not_penstocks_is_one_clear_line(respond: Respond, said: str) -> None:
    error = error_of(respond)
    assert isinstance(error, NotThePlatformError)
    assert said in str(error)


def test_a_redirect_is_named_and_never_followed() -> None:
    with other_server(answer(200, "application/json", "{}")) as elsewhere:
        place = f"{elsewhere.url}/login?state=secret-of-the-login"
        for status in (301, 302, 303, 307, 308):
            error = error_of(answer(status, "text/html", "", location=place))
            assert f"answers with a redirect to {elsewhere.url}, which is not followed" in str(error)
            assert "secret-of-the-login" not in str(error)
        assert elsewhere.requests == []


PROBLEM_TEXT = json.dumps({"title": "Unprocessable", "detail": "from_step: 3 is not valid", "status": 422})


@pytest.mark.parametrize(
    ("status", "kind", "body", "expected", "said"),
    [
        (409, "application/json", '{"detail": "run is queued"}', ApiError, "run is queued"),
        (422, PROBLEM, PROBLEM_TEXT, ApiError, "from_step: 3 is not valid"),
        (422, PROBLEM, '{"title": "Bad", "errors": [{"field": "a", "detail": "b"}]}', ApiError, "a: b"),
        (
            401,
            PROBLEM,
            '{"detail": "authorization: missing"}',
            TokenRefusedError,
            "--token-file, --token or PENS",
        ),
        (403, PROBLEM, '{"detail": "x lacks the role: expected operator"}', RoleMissingError, "expected operator"),
        (503, PROBLEM, '{"detail": "Redis at r does not respond"}', PlatformUnavailableError, "Redis at r does not"),
        (500, PROBLEM, '{"detail": "unexpected", "request_id": "ab12"}', ApiError, "unexpected (request_id ab12)"),
    ],
)
def test_problems_keep_their_text(status: int, kind: str, body: str, expected: type[ApiError], said: str) -> None:
    with (
        other_server(answer(status, kind, body)) as server,
        Client(server.url, token=TOKEN) as client,
        pytest.raises(expected) as caught,
    ):
        client.pause("r")
    assert (type(caught.value), caught.value.status) == (expected, status)
    assert said in str(caught.value)


def test_errors_of_fields_are_data() -> None:
    fault = {"field": "id", "value": "'X'", "expected": "lower-case letters"}
    body = json.dumps(
        {"title": "Invalid", "detail": "id: 'X' is not valid: expected lower-case letters", "errors": [fault]}
    )
    error = error_of(answer(422, PROBLEM, body), "pause")
    assert (error.errors, error.title, str(error).count("'X'")) == ((fault,), "Invalid", 1)


def test_reads_are_retried_and_changes_are_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    full = answer(503, PROBLEM, '{"detail": "Redis does not respond"}')
    with other_server(full) as server, Client(server.url, token=TOKEN, headers={"x-secret": TOKEN}) as client:
        with pytest.raises(PlatformUnavailableError):
            client.show("r")
        assert [method for method, _, _ in server.requests] == ["GET"] * 3
        for change in (client.cancel, client.pause, client.delete, client.resume):
            with pytest.raises(PlatformUnavailableError):
                change("r")
        assert len(server.requests) == 3 + 4
        assert all(headers["authorization"] == f"Bearer {TOKEN}" for _, _, headers in server.requests)
    assert caplog.text.count("retry in") == 2
    assert TOKEN not in caplog.text


def test_a_submission_has_a_key_of_its_own() -> None:
    run = json.dumps({"id": "r", "state": "queued", "unknown": [1]})
    with other_server(answer(201, "application/json", run)) as server, Client(server.url) as client:
        view = client.submit({"name": "x"})
        assert view.model_extra == {"unknown": [1]}, "fields of a later release are kept"
        client.submit({"name": "x"})
        client.submit({"name": "x"}, key="again")
        first, second, third = (headers["idempotency-key"] for _, _, headers in server.requests)
    assert (first != second, len(first), third) == (True, 32, "again")


def test_a_server_that_hangs_is_left_in_time() -> None:
    with silent_server() as url, Client(url) as client:
        began = time.monotonic()
        with pytest.raises(ApiUnreachableError, match=r"does not answer within 0.5 s"):
            client.cancel("r", timeout_s=0.5)
        assert time.monotonic() - began < 5


def test_an_answer_that_trickles_is_left_in_time() -> None:
    def trickle(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("content-type", "application/json")
        request.send_header("content-length", "1000")
        request.end_headers()
        for _ in range(60):
            request.wfile.write(b" ")
            request.wfile.flush()
            time.sleep(0.1)

    with other_server(trickle) as server, Client(server.url) as client:
        began = time.monotonic()
        with pytest.raises(ApiUnreachableError, match=r"does not answer within 0.5 s"):
            client.cancel("r", timeout_s=0.5)
        assert time.monotonic() - began < 5


def test_a_proxy_of_the_environment_sees_no_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    with other_server(answer(200, "application/json", "{}")) as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        with Client(f"http://127.0.0.1:{free_port()}", token=TOKEN) as client, pytest.raises(ApiUnreachableError):
            client.show("r")
        with Client("http://penstock.invalid", token=TOKEN) as client, pytest.raises(ApiError):
            client.show("r")
        assert [path for _, path, _ in proxy.requests] == ["http://penstock.invalid/v1/runs/r"]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ca.crt, and tls.crt and tls.key for 127.0.0.1."""
    needed("openssl")
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


def test_certificates_are_checked(certificates: Path, tmp_path: Path) -> None:
    with other_server(answer(200, "application/json", '{"runs": []}'), certificates) as server:
        status, output = penstock("runs", "--api", server.url)
        assert (status, output.count("\n")) == (2, 1)
        assert "has a certificate that is not trusted (" in output
        assert "--ca names its authority" in output
        assert server.requests == [], "nothing is sent before the certificate is checked"
        assert penstock("runs", "--api", server.url, "--ca", str(certificates / "ca.crt")) == (0, "no runs\n")
        status, output = penstock("runs", "--api", server.url, "--insecure")
        assert (status, "THE CERTIFICATE OF THE SERVER IS NOT CHECKED" in output) == (0, True)
        another = make_certificates(tmp_path / "another")
        status, output = penstock("runs", "--api", server.url, "--ca", str(another))
        assert (status, "is not trusted" in output) == (2, True)
        status, output = penstock(
            "runs", "--api", server.url.replace("127.0.0.1", "localhost"), "--ca", str(certificates / "ca.crt")
        )
        assert (status, "is not trusted (Hostname mismatch" in output) == (2, True), output
    with other_server(answer(200, "application/json", '{"runs": []}')) as plain_server:
        status, output = penstock("runs", "--api", plain_server.url.replace("http:", "https:"))
        assert (status, "cannot be reached over TLS" in output) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ca", "/absent"], "--ca: '/absent' is not valid: expected certificates as PEM"),
        (["--ca", "/dev/null"], "--ca: '/dev/null' is not valid: expected certificates as PEM"),
        (["--cert", "/absent"], "--cert, --key: '/absent', None are not valid"),
        (["--key", "/absent"], "--key: not valid alone: expected --cert as well"),
    ],
)
def test_files_that_cannot_be_used_are_named(arguments: list[str], said: str) -> None:
    status, output = penstock("runs", "--api", "https://127.0.0.1:1", *arguments)
    assert (status, said in output, output.count("\n")) == (2, True, 1), output


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://user:secret@127.0.0.1", "the address has a user or password"),
        ("127.0.0.1:8470", "is not valid: expected http://HOST"),
        ("ftp://127.0.0.1", "is not valid: expected http://HOST"),
        ("http://", "is not valid: expected http://HOST"),
        ("http://127.0.0.1:99999", "not a valid address"),
        ("http://[", "not a valid address"),
        ("http://h?x=1", "is not valid"),
    ],
)
def test_an_address_that_is_none_is_refused(url: str, said: str) -> None:
    with pytest.raises(AccessError) as caught:
        Client(url)
    assert (said in str(caught.value), "secret" in str(caught.value)) == (True, False)
