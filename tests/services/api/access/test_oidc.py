"""Sign-in with tokens of an OpenID Connect issuer, against a real server of its keys."""

from __future__ import annotations

import base64
import hmac
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from joserfc import jwt
from joserfc.jwk import ECKey, KeySet, OKPKey, RSAKey

from services.api.access import oidc
from services.api.access.oidc import Issuer
from services.api.access.platform import PlatformAccess
from services.api.access.roles import AccessUnavailableError, Role, UnauthenticatedError
from services.api.access.settings import OidcSettings
from tests.services.api.access.platforms import bearer, client_of

KEYS = {
    "RS256": RSAKey.generate_key(2048, {"kid": "rsa", "use": "sig"}),
    "ES256": ECKey.generate_key("P-256", {"kid": "ec", "use": "sig"}),
    "Ed25519": OKPKey.generate_key("Ed25519", {"kid": "ed", "use": "sig"}),
}


def encoded(part: bytes) -> str:
    """A part of a token."""
    return base64.urlsafe_b64encode(part).decode().rstrip("=")


class IssuerServer:
    """An issuer: its two documents, which tests may change."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.documents: dict[str, Any] = {}
        self.padding = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                found = outer.documents.get(self.path)
                body = json.dumps(found).encode() + b" " * outer.padding
                self.send_response(200 if found is not None else 404)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self.documents[oidc.DISCOVERY] = {"issuer": self.address, "jwks_uri": f"{self.address}/keys"}
        self.publish(*KEYS.values())
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def publish(self, *keys: Any) -> None:
        self.documents["/keys"] = KeySet(list(keys)).as_dict(private=False)

    def token(self, algorithm: str = "RS256", key: Any = None, **claims: Any) -> str:
        key = key or KEYS[algorithm]
        now = int(time.time())
        stated = {"iss": self.address, "aud": "penstock", "sub": "u1", "exp": now + 300, "groups": ["ml"]} | claims
        stated = {name: value for name, value in stated.items() if value is not None}
        return jwt.encode({"alg": algorithm, "kid": key.kid}, stated, key, algorithms=[algorithm])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[IssuerServer]:
    found = IssuerServer()
    yield found
    found.close()


def settings_of(server: IssuerServer, **changes: Any) -> OidcSettings:
    groups = {"ml": {"team-a": "operator"}, "all": {"*": "viewer", "team-a": "admin"}}
    return OidcSettings.model_validate({"issuer": server.address, "audience": "penstock", "groups": groups} | changes)


@pytest.mark.parametrize("algorithm", KEYS)
async def test_tokens_of_the_issuer_sign_in(server: IssuerServer, algorithm: str) -> None:
    issuer = Issuer(settings_of(server))
    found = await issuer.identify(server.token(algorithm))
    assert (found.name, found.roles) == ("oidc:u1", {"team-a": Role.OPERATOR})
    assert found.expires_at > time.time()
    both = await issuer.identify(server.token(algorithm, groups=["ml", "all", "unknown", 7]))
    assert both.roles == {"team-a": Role.ADMIN, "*": Role.VIEWER}
    assert (await issuer.identify(server.token(algorithm, groups=None))).roles == {}
    assert server.asked == [oidc.DISCOVERY, "/keys"]


async def test_the_older_name_of_ed25519_is_accepted(server: IssuerServer) -> None:
    token = server.token("Ed25519")
    head, body, _ = token.split(".")
    header = json.loads(base64.urlsafe_b64decode(head + "==")) | {"alg": "EdDSA"}
    head = encoded(json.dumps(header).encode())
    signature = KEYS["Ed25519"].raw_value.sign(f"{head}.{body}".encode())
    signed = f"{head}.{body}.{encoded(signature)}"
    assert (await Issuer(settings_of(server)).identify(signed)).name == "oidc:u1"


@pytest.mark.parametrize(
    "claims",
    [
        {"exp": 1},
        {"exp": None},
        {"exp": "tomorrow"},
        {"nbf": int(time.time()) + 3600},
        {"iss": "https://other.example"},
        {"iss": None},
        {"aud": "other"},
        {"aud": ["other"]},
        {"aud": None},
        {"sub": None},
        {"sub": "line\nbreak"},
        {"sub": 7},
    ],
)
async def test_claims_that_are_not_accepted(server: IssuerServer, claims: dict[str, Any]) -> None:
    token = server.token(**claims)
    with pytest.raises(UnauthenticatedError, match="authorization: the token is not valid") as refused:
        await Issuer(settings_of(server)).identify(token)
    assert token not in str(refused.value)


async def test_signatures_that_are_not_accepted(server: IssuerServer) -> None:
    issuer = Issuer(settings_of(server))
    good = server.token()
    head, body, signature = good.split(".")
    none = encoded(b'{"alg":"none","kid":"rsa"}')
    shared = encoded(b'{"alg":"HS256","kid":"rsa"}')
    mac = hmac.digest(KEYS["RS256"].as_pem(private=False), f"{shared}.{body}".encode(), "sha256")
    deep = encoded(b"[" * 5000)
    stranger = RSAKey.generate_key(2048, {"kid": "rsa"})
    wrong = [
        f"{none}.{body}.",
        f"{head}.{body}.{signature[:-8]}AAAAAAAA",
        f"{head}.{encoded(b'{}')}.{signature}",
        f"{shared}.{body}.{encoded(mac)}",  # a public key as a shared secret
        server.token("RS512", key=KEYS["RS256"]),
        server.token(key=stranger),
        f"{deep}.{body}.{signature}",
        "eyJ..",
        f"eyJhbGciOiJSUzI1NiJ9.{body}.{signature}",
    ]
    for token in wrong:
        with pytest.raises(UnauthenticatedError):
            await issuer.identify(token)
    assert (await issuer.identify(good)).name == "oidc:u1"


async def test_replaced_keys_are_fetched_but_not_too_often(
    server: IssuerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer = Issuer(settings_of(server))
    await issuer.identify(server.token())
    new = RSAKey.generate_key(2048, {"kid": "new", "use": "sig"})
    server.publish(new)
    for _ in range(5):
        with pytest.raises(UnauthenticatedError):
            await issuer.identify(server.token(key=new))
    assert len(server.asked) == 2
    monkeypatch.setattr(oidc, "FETCH_S", 0.0)
    assert (await issuer.identify(server.token(key=new))).name == "oidc:u1"
    with pytest.raises(UnauthenticatedError):
        await issuer.identify(server.token())  # revoked with its key


async def test_without_keys_no_token_is_accepted(server: IssuerServer) -> None:
    token = server.token()
    server.documents[oidc.DISCOVERY]["issuer"] = "https://other.example"
    with pytest.raises(AccessUnavailableError):
        await Issuer(settings_of(server)).identify(token)
    server.documents[oidc.DISCOVERY] = {"issuer": server.address, "jwks_uri": "http://10.0.0.1/keys"}
    with pytest.raises(AccessUnavailableError):
        await Issuer(settings_of(server)).identify(token)
    server.documents[oidc.DISCOVERY]["jwks_uri"] = f"{server.address}/keys"
    server.padding = oidc.MOST_BYTES
    with pytest.raises(AccessUnavailableError):
        await Issuer(settings_of(server)).identify(token)


async def test_known_keys_are_used_while_the_issuer_is_away(
    server: IssuerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc, "FETCH_S", 0.0)
    monkeypatch.setattr(oidc, "FRESH_S", 0.0)
    issuer = Issuer(settings_of(server))
    await issuer.identify(server.token())
    server.documents.clear()
    assert (await issuer.identify(server.token())).name == "oidc:u1"
    monkeypatch.setattr(oidc, "STALE_S", 0.0)
    with pytest.raises(AccessUnavailableError):
        await issuer.identify(server.token())


async def test_an_issuer_of_the_access_file(redis: Any, server: IssuerServer, tmp_path: Any) -> None:
    path = tmp_path / "access.json"
    path.write_text(json.dumps({"oidc": json.loads(settings_of(server, name_claim="email").model_dump_json())}))
    async with client_of(redis, PlatformAccess(path)) as client:
        found = await client.get("/v1/whoami", headers=bearer(server.token(email="a@example.org")))
        refused = await client.get("/v1/runs", headers=bearer(server.token(email="a@example.org", groups=[])))
        expired = await client.get("/v1/whoami", headers=bearer(server.token(email="a@example.org", exp=1)))
    assert found.json()["name"] == "oidc:a@example.org"
    assert found.json()["roles"] == {"team-a": "operator"}
    assert (refused.status_code, expired.status_code) == (403, 401)
    assert "expired" in expired.json()["detail"]
