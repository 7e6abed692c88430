"""Tokens: digests only, expiry, revocation by a change of the file; a laptop's own; no start without any."""

from __future__ import annotations

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from starlette.requests import HTTPConnection

from services.api import __main__ as gateway
from services.api.access.local_token import read_token, remove_token, token_path, write_token
from services.api.access.platform import PlatformAccess, platform_access
from services.api.access.roles import AccessUnavailableError, Principal, Role, UnauthenticatedError
from services.api.access.settings import AccessFileError, load_access, parse_access
from services.api.access.tokens import new_token, token_digest
from tests.services.api.access.platforms import bearer, client_of

TOKEN, OTHER = "first-token", "second-token"


def document(**changes: Any) -> dict[str, Any]:
    token = {"name": "ci", "sha256": token_digest(TOKEN), "roles": {"team-a": "operator"}}
    return {"tokens": [token | changes]}


def written(path: Path, content: Any) -> Path:
    """The file, replaced as an editor or a mounted Secret does it."""
    draft = path.with_suffix(".draft")
    draft.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return draft.replace(path)


def connection(token: str) -> HTTPConnection:
    return HTTPConnection({"type": "http", "headers": [(b"authorization", f"Bearer {token}".encode())]})


async def test_a_token_of_the_file_signs_in(tmp_path: Path) -> None:
    access = PlatformAccess(written(tmp_path / "access.yaml", document()))
    assert await access.identify(connection(TOKEN)) == Principal("ci", {"team-a": Role.OPERATOR})
    for wrong in (TOKEN[:-1], TOKEN + "x", token_digest(TOKEN), TOKEN.upper(), "x" * 10_000):
        with pytest.raises(UnauthenticatedError) as refused:
            await access.identify(connection(wrong))
        assert wrong not in str(refused.value)


async def test_the_file_may_be_json(tmp_path: Path) -> None:
    access = PlatformAccess(written(tmp_path / "access.json", json.dumps(document())))
    assert (await access.identify(connection(TOKEN))).name == "ci"


async def test_an_expired_token_is_refused(tmp_path: Path) -> None:
    past, future = (datetime.now(UTC) + timedelta(hours=hours) for hours in (-1, 1))
    access = PlatformAccess(written(tmp_path / "access.yaml", document(expires=past)))
    with pytest.raises(UnauthenticatedError, match="expired"):
        await access.identify(connection(TOKEN))
    written(tmp_path / "access.yaml", document(expires=future))
    assert (await access.identify(connection(TOKEN))).expires_at == pytest.approx(future.timestamp())


async def test_a_change_of_the_file_revokes_a_token(redis: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "access.yaml", document())
    async with client_of(redis, PlatformAccess(path)) as client:
        assert (await client.get("/v1/whoami", headers=bearer(TOKEN))).status_code == 200
        written(path, document(sha256=token_digest(OTHER)))
        assert (await client.get("/v1/whoami", headers=bearer(TOKEN))).status_code == 401
        assert (await client.get("/v1/whoami", headers=bearer(OTHER))).status_code == 200
        # While a file cannot be used, all are refused; it says why in the log only.
        written(path, "tokens: [{name: ci, sha256: first-token}]")
        broken = await client.get("/v1/whoami", headers=bearer(OTHER))
        assert broken.status_code == 503
        assert "first-token" not in broken.text
        path.unlink()
        assert (await client.get("/v1/whoami", headers=bearer(OTHER))).status_code == 503
        assert (await client.get("/healthz")).status_code == 200
        written(path, document())
        assert (await client.get("/v1/whoami", headers=bearer(TOKEN))).status_code == 200


async def test_a_mounted_secret_is_read_again(tmp_path: Path) -> None:
    """Kubernetes replaces a link to a folder."""
    for name, token in (("one", TOKEN), ("two", OTHER)):
        (tmp_path / name).mkdir()
        written(tmp_path / name / "access.yaml", document(sha256=token_digest(token)))
    data = tmp_path / "data"
    data.symlink_to("one")
    access = PlatformAccess(data / "access.yaml")
    await access.identify(connection(TOKEN))
    (tmp_path / "new").symlink_to("two")
    (tmp_path / "new").replace(data)
    with pytest.raises(UnauthenticatedError):
        await access.identify(connection(TOKEN))


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ([], "expected a mapping"),
        ({"tokens": [{"name": "a b", "sha256": "0" * 64, "roles": {"*": "viewer"}}]}, r"tokens.0.name: .*'a b'"),
        ({"tokens": [{"name": "a", "sha256": "my-secret", "roles": {"*": "viewer"}}]}, "tokens.0.sha256: the value is"),
        ({"tokens": [{"name": "a", "sha256": "0" * 64, "roles": {"*": "owner"}}]}, "'viewer', 'operator' or 'admin'"),
        ({"tokens": [{"name": "a", "sha256": "0" * 64, "roles": {}}]}, "tokens.0.roles"),
        ({"tokens": [{"name": "a", "sha256": "0" * 64, "roles": {"A B": "viewer"}}]}, "tokens.0.roles"),
        ({"tokens": [{"name": "a", "sha256": "0" * 64, "roles": {"*": "viewer"}, "expires": "2030-01-01"}]}, "expires"),
        ({"projects": {"a": {"gpus": -1}}}, "projects.a.gpus"),
        ({"projects": {"a": {"cpus": 1}}}, "projects.a.cpus: .* expected a known field"),
        ({"oidc": {"issuer": "http://issuer.example", "audience": "a", "groups": {"g": {"*": "admin"}}}}, "https"),
        ({"keys": []}, "keys: .* expected a known field"),
        ({"requests_per_minute": 0}, "requests_per_minute: .*expected"),
    ],
)
def test_faults_of_the_file_name_field_and_value(content: Any, fault: str) -> None:
    with pytest.raises(AccessFileError, match=fault) as refused:
        parse_access(content)
    assert "my-secret" not in str(refused.value)


def test_names_and_digests_occur_once() -> None:
    for field in ("name", "sha256"):
        twice = document()["tokens"] * 2
        twice[1] = twice[1] | {"name": "b", "sha256": "1" * 64} | {field: twice[0][field]}
        with pytest.raises(AccessFileError, match=f"{field} of tokens"):
            parse_access({"tokens": twice})


@pytest.mark.parametrize("content", ["{", "a: [", "\x00", "!!python/object/apply:os.system [id]"])
def test_what_is_no_yaml_is_not_quoted(tmp_path: Path, content: str) -> None:
    with pytest.raises(AccessFileError, match="PENSTOCK_ACCESS: ") as refused:
        load_access(written(tmp_path / "access.yaml", content))
    assert "os.system" not in str(refused.value)


def test_a_file_must_be_there_and_small(tmp_path: Path) -> None:
    with pytest.raises(AccessFileError, match="a readable file"):
        load_access(tmp_path / "none.yaml")
    with pytest.raises(AccessFileError, match="at most 1048576 bytes"):
        load_access(written(tmp_path / "access.yaml", "#" * (2**20 + 1)))


def test_the_laptops_token_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = token_path(8470, {"XDG_STATE_HOME": str(tmp_path / "state")})
    assert path == tmp_path / "state" / "penstock" / "token-8470"
    before = os.umask(0)
    try:
        first, second = write_token(path), write_token(path)  # in place of one that a killed stack left
    finally:
        os.umask(before)
    assert first != second == read_token(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    remove_token(path)
    remove_token(path)
    assert not path.exists()


def test_a_reader_never_finds_part_of_a_token(tmp_path: Path) -> None:
    path, written_tokens = tmp_path / "token-1", [write_token(tmp_path / "token-1")]

    def write() -> None:
        written_tokens.extend(write_token(path) for _ in range(500))

    with ThreadPoolExecutor(1) as writer:
        writing = writer.submit(write)
        found = {read_token(path)}
        while not writing.done():
            found.add(read_token(path))
        writing.result()
    assert found <= set(written_tokens)
    assert list(tmp_path.iterdir()) == [path]


def test_no_link_is_written_or_read(tmp_path: Path) -> None:
    target, path = tmp_path / "target", tmp_path / "token-1"
    target.write_text("precious")
    target.chmod(0o600)
    path.symlink_to(target)
    with pytest.raises(AccessFileError):
        read_token(path)
    write_token(path)  # removes the link
    assert target.read_text() == "precious"
    assert not path.is_symlink()


def test_what_others_can_read_is_no_token(tmp_path: Path) -> None:
    path = tmp_path / "token-1"
    write_token(path)
    path.chmod(0o640)
    with pytest.raises(AccessFileError, match="mode 0600"):
        read_token(path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(AccessFileError):
        read_token(tmp_path / "pipe")
    (tmp_path / "empty").touch(0o600)
    with pytest.raises(AccessFileError, match="empty"):
        read_token(tmp_path / "empty")


async def test_laptop_and_file_together(tmp_path: Path) -> None:
    local, file = tmp_path / "token-1", written(tmp_path / "access.yaml", document())
    token = write_token(local)
    access = platform_access({"PENSTOCK_ACCESS": str(file), "PENSTOCK_TOKEN_FILE": str(local)})
    assert (await access.identify(connection(token))).highest is Role.ADMIN
    assert (await access.identify(connection(TOKEN))).name == "ci"
    file.unlink()
    with pytest.raises(AccessUnavailableError):
        await access.identify(connection(token))


def test_without_access_nothing_is_served(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AccessFileError, match="PENSTOCK_ACCESS: missing"):
        platform_access({})
    for name in ("PENSTOCK_ACCESS", "PENSTOCK_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.argv", ["api", "--redis", "redis://127.0.0.1:1/0"])
    monkeypatch.setattr(gateway, "configure_logging", lambda service: None)
    assert gateway.main() == 2
    expected = "api: PENSTOCK_ACCESS: missing: expected the path of an access file"
    assert capsys.readouterr().err.startswith(expected)


def test_tokens_are_random_and_long() -> None:
    found = {new_token() for _ in range(100)}
    assert len(found) == 100
    assert min(map(len, found)) >= 43
