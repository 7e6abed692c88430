"""Tests that the rendered access file is one that the API accepts, and holds digests only.

Must not start the API; test_api_starts.py does.
"""

from __future__ import annotations

import base64

import yaml

from services.api.access.settings import parse_access
from services.api.access.tokens import token_digest
from tests.helm.cases import DEFAULTS
from tests.helm.rendering import FULLNAME, render

GIVEN = {
    "tokens": [{"name": "ci", "sha256": "ab" * 32, "roles": {"team-a": "operator"}, "expires": "2027-01-01T00:00:00Z"}],
    "projects": {"team-a": {"gpus": 8, "runs": 4, "redis_memory": 2**31}},
    "oidc": {"issuer": "https://sign-in.example.org", "audience": "penstock", "groups": {"ml": {"*": "viewer"}}},
}
MADE = {"admin-token": "admin", "test-token": "operator", "prometheus-token": "viewer"}


def test_the_access_file_has_what_the_values_say() -> None:
    case = DEFAULTS.but({"api": {"access": GIVEN, "hosts": ["more.example"], "proxies": ["10.0.0.0/8"]}})
    rendering = render(case)
    secret = rendering.one("Secret", name=f"{FULLNAME}-access").at("data")
    text = base64.b64decode(secret["access.yaml"]).decode()
    found = parse_access(yaml.safe_load(text))
    tokens = {key: base64.b64decode(secret[key]).decode() for key in MADE}
    digests = {entry.name: (entry.sha256, dict(entry.roles)) for entry in found.tokens}
    assert {name: digests[name] for name in MADE} == {
        name: (token_digest(tokens[name]), {"*": role}) for name, role in MADE.items()
    }
    assert digests["ci"] == ("ab" * 32, {"team-a": "operator"})
    assert found.quota("team-a").redis_memory == 2**31
    assert found.oidc is not None
    assert found.oidc.groups == {"ml": {"*": "viewer"}}
    assert not any(token in text for token in tokens.values())
    env = rendering.pod("api").main.env
    assert env["PENSTOCK_HOSTS"]["value"].split(",")[0::4] == [f"{FULLNAME}-api", "more.example"]
    assert env["PENSTOCK_PROXIES"]["value"] == "10.0.0.0/8"


def test_the_pods_of_the_api_get_no_token() -> None:
    volume = render(DEFAULTS).pod("api").volumes["access"]["secret"]
    assert [item["key"] for item in volume["items"]] == ["access.yaml"]
