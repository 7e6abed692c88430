"""The functions' server refuses what is not signed, and files that are not what they claim."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from services.settings.rewards.kinds import PythonReward
from tests.harness.program_starts import Start, started
from verifier.remote.faults import RemoteSetupError
from verifier.remote.functions.files import FILE_BYTES, FileStore, digest_of
from verifier.remote.functions.function_judge import FunctionJudge
from verifier.remote.functions.place import FunctionsPlace, place_from
from verifier.remote.signature import SIGNATURE_HEADER, signature
from verifier.verifiers.base import Candidate

CONTENT = b"def score(*_): return True"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
async def client(place: FunctionsPlace) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.AsyncHTTPTransport(uds=place.socket)
    async with httpx.AsyncClient(transport=transport, base_url="http://functions", timeout=10) as client:
        yield client


def signed(place: FunctionsPlace, body: bytes, off_s: float = 0) -> Mapping[str, str]:
    return {SIGNATURE_HEADER: signature(place.secret, body, time.time() + off_s)}


async def test_only_health_is_open(client: httpx.AsyncClient) -> None:
    assert (await client.get("/healthz")).json() == {"status": "ok"}
    for path in ("/docs", "/openapi.json", "/files/x", "/"):
        assert (await client.get(path)).status_code in (404, 405)
    answer = await client.post("/judge", content=b"{}")
    assert (answer.status_code, answer.json()["error"][:29]) == (401, "X-Penstock-Signature: missing")


async def test_a_wrong_signature_is_refused(client: httpx.AsyncClient) -> None:
    other = FunctionsPlace(SecretStr("another secret"))
    for path, method in (("/judge", "POST"), (f"/files/{DIGEST}", "PUT")):
        answer = await client.request(method, path, content=CONTENT, headers=signed(other, CONTENT))
        assert (answer.status_code, answer.json()["error"][:29]) == (401, "X-Penstock-Signature: wrong: ")


@pytest.mark.parametrize("off_s", [-400, 400])
async def test_an_old_signature_is_refused(client: httpx.AsyncClient, place: FunctionsPlace, off_s: float) -> None:
    answer = await client.put(f"/files/{DIGEST}", content=CONTENT, headers=signed(place, CONTENT, off_s))
    assert (answer.status_code, "more than 300 s off" in answer.json()["error"]) == (401, True)


async def test_a_file_must_be_what_its_digest_names(client: httpx.AsyncClient, place: FunctionsPlace) -> None:
    answer = await client.put(f"/files/{DIGEST}", content=b"other", headers=signed(place, b"other"))
    assert (answer.status_code, answer.json()) == (422, {"error": "the file is not the one that its digest names"})
    assert (await client.put(f"/files/{DIGEST}", content=CONTENT, headers=signed(place, CONTENT))).status_code == 200


async def test_a_long_file_is_refused(client: httpx.AsyncClient, place: FunctionsPlace) -> None:
    content = b"#" * (FILE_BYTES + 1)
    answer = await client.put(f"/files/{digest_of(content)}", content=content, headers=signed(place, content))
    assert answer.status_code == 413


BAD = {
    "no JSON": ("x", "Invalid JSON"),
    "outside": ({"function": "./a.py:f", "files": {"./../a.py": DIGEST}, "requests": []}, "./FILE, a path below"),
    "absolute": ({"function": "./a.py:f", "files": {"/etc/a.py": DIGEST}, "requests": []}, "./FILE, a path below"),
    "a digest": ({"function": "./a.py:f", "files": {"./a.py": "../../x"}, "requests": []}, "files../a.py"),
    "a function": ({"function": "os.system", "requests": []}, "./FILE.py:FUNCTION"),
    "no end": ({"function": "./a.py:f", "wall_s": 1e9, "requests": []}, "wall_s"),
    "requests": ({"function": "./a.py:f", "requests": [{}]}, "requests.0.id"),
}


@pytest.mark.parametrize(("document", "expected"), BAD.values(), ids=BAD)
async def test_a_bad_request_is_refused(
    client: httpx.AsyncClient, place: FunctionsPlace, document: object, expected: str
) -> None:
    body = b"{" if document == "x" else json.dumps(document).encode()
    answer = await client.post("/judge", content=body, headers=signed(place, body))
    assert answer.status_code == 422
    assert expected in answer.json()["error"]


async def test_files_that_are_missing_are_named(client: httpx.AsyncClient, place: FunctionsPlace) -> None:
    body = json.dumps({"function": "./a.py:f", "files": {"./a.py": "0" * 64}, "requests": []}).encode()
    answer = await client.post("/judge", content=body, headers=signed(place, body))
    assert (answer.status_code, answer.json()) == (200, {"missing": ["0" * 64]})


async def test_a_client_with_another_secret_gets_no_verdict(place: FunctionsPlace) -> None:
    other = FunctionsPlace(SecretStr("another secret"), socket=place.socket)
    judge = FunctionJudge(PythonReward(function="./a.py:score", needs=("network",)), {"./a.py": CONTENT}, other)
    [decision] = await judge.judge_all([Candidate("4", {"answer": "4"})])
    await judge.aclose()
    assert str(decision).startswith("functions: status 401: ")
    assert "another secret" not in str(decision)


def test_the_least_recently_used_file_is_dropped() -> None:
    store = FileStore(size=10)
    first, second = store.put(b"12345"), store.put(b"67890")
    store.contents({"a": first})
    third = store.put(b"abc")
    assert store.missing({"a": first, "b": second, "c": third}) == [second]


def test_an_address_that_is_not_valid_is_an_error() -> None:
    given = ["unix:", "8080", "host:", "host:0", "host:99999", ":80"]
    ends = started("verifier.remote.functions", [Start(["--listen", listen]) for listen in given])
    for listen, end in zip(given, ends, strict=True):
        expected = f"--listen: {listen!r} is not valid: expected unix:PATH or HOST:PORT\n"
        assert (end.status, end.errors) == (2, expected)


def test_a_server_needs_a_secret() -> None:
    command = [sys.executable, "-m", "verifier.remote.functions", "--listen", "127.0.0.1:1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "the variable PENSTOCK_FUNCTIONS_SECRET is not set" in ended.stderr


def test_a_cluster_names_the_server(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    variables = {"PENSTOCK_FUNCTIONS_URL": "http://functions:8080", "PENSTOCK_FUNCTIONS_SECRET_FILE": str(secret)}
    place = place_from(variables)
    assert place == FunctionsPlace(SecretStr("s3cret"), "http://functions:8080")
    assert "s3cret" not in repr(place)
    assert place_from({}) is None


def test_a_place_without_a_secret_is_an_error(tmp_path: Path) -> None:
    url = {"PENSTOCK_FUNCTIONS_URL": "http://functions:8080"}
    empty = tmp_path / "empty"
    empty.touch()
    table = {
        "not set": {},
        "cannot be read": {"PENSTOCK_FUNCTIONS_SECRET_FILE": str(tmp_path / "none")},
        "is empty": {"PENSTOCK_FUNCTIONS_SECRET_FILE": str(empty)},
    }
    for expected, more in table.items():
        with pytest.raises(RemoteSetupError, match=expected):
            place_from(url | more)
    with pytest.raises(RemoteSetupError, match="PENSTOCK_FUNCTIONS_URL: url: 'ftp://x' is not valid"):
        place_from({"PENSTOCK_FUNCTIONS_URL": "ftp://x"})
