"""Tests that secrets are passed by reference: never in a variable's value, an argument, a ConfigMap or a label.

Must not check that the Secrets exist; test_references.py does.
"""

from __future__ import annotations

import base64
import re

from tests.harness.each import each
from tests.helm.cases import (
    CASES,
    DEFAULTS,
    EXISTING_SECRETS,
    GROUPS,
    HUB,
    OBJECT_STORE_BY_ROLE,
    OWN_TLS,
    SENTINELS,
    TRACKED,
)
from tests.helm.rendering import CHART, FULLNAME, ROOT, Case, Rendering, render

TELLING = re.compile(r"PASSWORD|SECRET|TOKEN|CREDENTIAL|PRIVATE|ACCESS_KEY", re.IGNORECASE)
HARMLESS = re.compile(r"_FILE$|^RAY_AUTH_MODE$|_PATH$")
WITH_CREDENTIALS = re.compile(r"\w+://[^/\s\"']*:[^/\s\"'@]+@")


@each("case", CASES)
def test_a_secret_variable_has_no_literal_value(case: Case) -> None:
    for pod in render(case).pods:
        for container in pod.containers:
            for name, entry in container.env.items():
                if TELLING.search(name) and not HARMLESS.search(name):
                    assert "value" not in entry, f"{pod} {container.name} {name}"
                    assert "secretKeyRef" in entry["valueFrom"], f"{pod} {container.name} {name}"
            twice = [variable["name"] for variable in container.document.get("env", [])]
            assert len(twice) == len(set(twice)), f"{pod} {container.name}: a variable occurs twice: {twice}"


@each("case", CASES)
def test_no_address_carries_credentials(case: Case) -> None:
    for manifest in render(case).manifests:
        if manifest.kind != "Secret":
            assert not WITH_CREDENTIALS.search(str(manifest.document)), manifest


def generated(rendering: Rendering) -> set[str]:
    """The values inside the rendered Secrets that are confidential."""
    found = set()
    for secret in rendering.all("Secret"):
        found |= set((secret.at("stringData", default=None) or {}).values())
        found |= {base64.b64decode(value).decode() for value in (secret.at("data", default=None) or {}).values()}
    return {value for value in found if len(value) >= 8}


def test_generated_passwords_are_long_and_only_in_secrets() -> None:
    rendering = render(DEFAULTS)
    passwords = generated(rendering)
    # Two passwords of Redis, three tokens of the API, and the access file, which has the tokens' digests only.
    assert len(passwords) == 6
    assert all(len(password) >= 24 for password in passwords)
    for manifest in rendering.manifests:
        if manifest.kind != "Secret":
            text = str(manifest.document)
            assert not [
                True
                for password in passwords
                if password in text or base64.b64encode(password.encode()).decode() in text
            ], manifest


@each("case", CASES)
def test_password_files_are_keys_of_mounted_secrets(case: Case) -> None:
    for pod in render(case).pods:
        for container in pod.containers:
            for name, entry in container.env.items():
                if not re.fullmatch(r"PENSTOCK_\w+_FILE", name):
                    continue
                folder, _, key = entry["value"].rpartition("/")
                mount = next((mount for path, mount in container.mounts.items() if path == folder), None)
                assert mount, f"{pod} {container.name}: nothing is mounted at {folder} for {name}"
                assert mount.get("readOnly") is True, f"{pod} {container.name} {folder}"
                assert key in keys_at(pod.volumes[mount["name"]]), f"{pod} {name}: no {key} in {mount['name']}"


def keys_at(volume: dict[str, object]) -> set[str]:
    """The file names in a Secret volume (or a projection of Secrets)."""
    sources = (
        [volume.get("secret")]
        if "secret" in volume
        else [
            source.get("secret")
            for source in volume["projected"]["sources"]  # type: ignore[index]
        ]
    )
    return {item["path"] for source in sources if source for item in source.get("items", [])}  # type: ignore[union-attr, attr-defined]


@each("case", CASES)
def test_penstock_pods_see_only_their_own_users_password(case: Case) -> None:
    for pod in render(case).pods:
        if pod.component == "redis":
            continue
        for volume in pod.volumes.values():
            if "secret" in volume and "redis" in volume["secret"]["secretName"]:
                keys = {item["key"] for item in volume["secret"].get("items", [])}
                assert keys, f"{pod} mounts every key of {volume['secret']['secretName']}"
                assert "ray-password" not in keys, f"{pod} would see Ray's password"


def test_the_sentinels_password_is_mounted_if_they_have_one() -> None:
    for component in ("api", *GROUPS):
        env = render(SENTINELS).pod(component).main.env
        assert env["PENSTOCK_REDIS_SENTINEL_PASSWORD_FILE"]["value"]
        assert "PENSTOCK_REDIS_SENTINEL_PASSWORD_FILE" not in render(DEFAULTS).pod(component).main.env


def test_redis_certificates_are_for_the_name_clients_use() -> None:
    address = render(OWN_TLS).pod("api").main.env["PENSTOCK_REDIS"]["value"]
    host = re.fullmatch(r"rediss://([^:/]+):6379/0", address)[1]  # type: ignore[index]
    assert host.startswith(FULLNAME)
    values, guide = (CHART / "values.yaml").read_text(), (ROOT / "docs/operations/redis.md").read_text()
    told = [
        *re.findall(r"for\s+the\s+host\s+name\s+`([^`]+)`", values + guide),
        *re.findall(r"dnsNames: \[(.*)\]", guide),
    ]
    assert len(told) == 3, told
    assert {name.replace("F-", f"{FULLNAME}-", 1) for name in told} == {host}


@each("case", CASES)
def test_the_verifier_holds_no_credentials_of_the_object_store(case: Case) -> None:
    rendering = render(case)
    verifiers = [pod for pod in rendering.pods if pod.component in ("verifier", "verifier-code", "functions")]
    names = {name for pod in verifiers for container in pod.containers for name in container.env}
    assert not {name for name in names if name.startswith("AWS_")}, (
        "the verifier runs untrusted code and needs no store"
    )


def test_the_clouds_role_reaches_only_pods_that_store_files() -> None:
    """A cloud passes the token of an account's role to every pod of the account, independently of its mounts."""
    rendering = render(OBJECT_STORE_BY_ROLE)
    accounts = {
        account.name
        for account in rendering.all("ServiceAccount")
        if "eks.amazonaws.com/role-arn" in account.annotations
    }
    holding = {pod.component for pod in rendering.pods if pod.spec["serviceAccountName"] in accounts}
    assert holding == {"head", "cpu", "rollout", "learner"}


def test_only_cpu_pods_have_what_trackers_need() -> None:
    keys = {"WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"}
    known = {*keys, "MLFLOW_TRACKING_URI", "WANDB_BASE_URL"}
    for case, given in ((TRACKED, known - {"WANDB_BASE_URL"}), (DEFAULTS, set())):
        for component in ("api", *GROUPS):
            env = render(case).pod(component).main.env
            assert known & env.keys() == (given if component == "cpu" else set()), (case, component)
    env = render(TRACKED).pod("cpu").main.env
    for key in keys:
        wanted = {"name": "own-trackers", "key": key, "optional": True}
        assert env[key]["valueFrom"]["secretKeyRef"] == wanted
    assert env["MLFLOW_TRACKING_URI"]["value"] == "http://mlflow.example.org:5000"
    reused = DEFAULTS.but({"tracking": None, "networkPolicy": {"tracking": None}})
    assert render(reused).pod("cpu").main.env == render(DEFAULTS).pod("cpu").main.env


def test_only_preparation_has_the_hubs_token_and_address() -> None:
    of_hub = {"HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE"}
    for case, given in ((HUB, {"HF_TOKEN", "HF_ENDPOINT"}), (DEFAULTS, {"HF_HUB_OFFLINE"})):
        for component in ("api", *GROUPS):
            env = render(case).pod(component).main.env
            assert of_hub & env.keys() == (given if component == "cpu" else set()), (case, component)
    env = render(HUB).pod("cpu").main.env
    assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "own-hub", "key": "HF_TOKEN"}
    assert env["HF_ENDPOINT"]["value"] == "https://mirror.example.org:8444/hub"
    for reused in (
        DEFAULTS.but({"hub": None, "networkPolicy": {"hub": None}}),
        HUB.but({"networkPolicy": {"hub": None}}),
    ):
        given = DEFAULTS if "hub" in reused.values and reused.values["hub"] is None else HUB
        policies = [[policy.document for policy in render(case).all("NetworkPolicy")] for case in (reused, given)]
        assert policies[0] == policies[1], "an upgrade that reuses the values of an older release"
        assert render(reused).pod("cpu").main.env == render(given).pod("cpu").main.env
    own = [{"name": "HF_TOKEN", "value": "own"}, {"name": "HF_ENDPOINT", "value": "http://own"}]
    assert render(HUB.but({"cpu": {"env": own}})).pod("cpu").main.env["HF_TOKEN"]["value"] == "own"


@each("case", (DEFAULTS, EXISTING_SECRETS))
def test_redis_itself_finds_that_a_key_is_missing(case: Case) -> None:
    """For a key that must exist, the kubelet keeps the earlier files, and the start script cannot name it."""
    volume = render(case).pod("redis").volumes["secret"]
    [source] = volume["projected"]["sources"]
    assert source["secret"]["optional"] is True
    names = {item["key"]: item["path"] for item in source["secret"]["items"]}
    keys = [f"{user}-password{other}" for user in ("penstock", "ray") for other in ("", "-other")]
    assert names == {key: key for key in keys}
