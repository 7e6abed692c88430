"""Tests what rewards get on a cluster: hosts and keys for verifiers, pods for functions with needs and for programs.

Must not check connections; test_network.py does.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from services.settings import ClusterLimits
from tests.harness.each import each
from tests.helm.cases import CASES, DEFAULTS, GROUPS, REWARDED, ROLES
from tests.helm.kube_api import against
from tests.helm.rendering import FULLNAME, RELEASE, Case, Document, Rendering, render
from tests.helm.schemas import custom_errors, needs_crds

HOSTS = "PENSTOCK_REWARD_HOSTS"
OF_FUNCTIONS = {"PENSTOCK_FUNCTIONS_URL", "PENSTOCK_FUNCTIONS_SECRET_FILE"}
LOCALHOST = {"type": "Localhost", "localhostProfile": "profiles/penstock-verifier-code.json"}
BUBBLEWRAP = REWARDED.but(
    {
        "verifierCode": {
            "isolation": "bubblewrap",
            "runtimeClassName": "",
            "seccompProfile": LOCALHOST,
            "appArmorProfile": {"type": "Unconfined"},
        }
    },
    name="programs by bubblewrap",
)


def limits(rendering: Rendering) -> ClusterLimits:
    bounds = rendering.one("ConfigMap", name=f"{FULLNAME}-bounds").at("data", "bounds.json")
    return ClusterLimits.model_validate_json(bounds)


@each("case", CASES)
def test_every_verifier_knows_the_only_hosts_of_rewards(case: Case) -> None:
    hosts = {pod.component: pod.main.env.get(HOSTS, {}).get("value") for pod in render(case).lasting_pods}
    assert hosts.pop("verifier") == ("rewards.internal,judge.example.org" if case is REWARDED else "")
    assert hosts.pop("verifier-code") == ""
    assert set(hosts.values()) == {None}


def test_keys_of_rewards_reach_verifiers_alone() -> None:
    holding = {
        pod.component: container.document["envFrom"]
        for pod in render(REWARDED).pods
        for container in pod.containers
        if "envFrom" in container.document
    }
    assert holding.pop("functions") == [{"prefix": "USER_REWARD_", "secretRef": {"name": "own-database"}}]
    assert holding == {"verifier": [{"secretRef": {"name": "own-rewards"}}]}


def test_the_api_learns_what_rewards_may_use() -> None:
    found, nothing = limits(render(REWARDED)), limits(render(DEFAULTS))
    assert found.rewards.hosts == ("rewards.internal", "judge.example.org")
    assert (found.rewards.functions, found.verifier_code.pods) == (True, 3)
    assert (nothing.rewards.hosts, nothing.rewards.functions, nothing.verifier_code.pods) == ((), False, 0)
    text = render(DEFAULTS).one("ConfigMap", name=f"{FULLNAME}-bounds").at("data", "bounds.json")
    assert set(json.loads(text)) == {"cpu", "verifier", "rollout", "learner"}, "an earlier release knows no others"


def test_verifiers_find_the_functions_only_if_enabled() -> None:
    for case, given in ((REWARDED, OF_FUNCTIONS), (DEFAULTS, set())):
        for component in ("api", *GROUPS):
            names = {name for name in render(case).pod(component).main.env if name.startswith("PENSTOCK_FUNCTIONS")}
            assert names == (given if component == "verifier" else set()), (case, component)
    rendering = render(REWARDED)
    env = rendering.pod("verifier").main.env
    assert env["PENSTOCK_FUNCTIONS_URL"]["value"] == f"http://{rendering.one('Service', 'functions').name}:8480"
    mounted = {pod.component for pod in rendering.pods if "functions-auth" in pod.volumes}
    assert mounted == {"verifier"}


def test_pods_of_functions_have_nothing_of_penstocks() -> None:
    pod = render(REWARDED).pod("functions")
    assert set(pod.main.env) == {"PENSTOCK_FUNCTIONS_SECRET", "HOME", "USER_REWARD_DATABASE"}
    assert set(pod.volumes) == {"tmp", "tables"}
    assert set(pod.main.mounts) == {"/tmp", "/tables"}
    account = pod.spec["serviceAccountName"]
    assert {other.component for other in render(REWARDED).pods if other.spec["serviceAccountName"] == account} == {
        "functions"
    }
    bound = [subject["name"] for role in render(REWARDED).all("RoleBinding") for subject in role.at("subjects")]
    assert account not in bound
    assert not render(DEFAULTS).has("Deployment", "functions")
    assert not [manifest for manifest in render(DEFAULTS).manifests if manifest.component == "functions"]


def test_functions_may_have_an_account_and_image_of_the_user() -> None:
    given = {"serviceAccountName": "rewards", "image": "registry.example.org/rewards:1"}
    rendering = render(REWARDED.but({"rewardFunctions": given}))
    pod = rendering.pod("functions")
    assert pod.spec["serviceAccountName"] == "rewards"
    assert "automountServiceAccountToken" not in pod.spec, "the account decides"
    assert not rendering.has("ServiceAccount", "functions")
    assert pod.main.document["image"] == "registry.example.org/rewards:1"
    assert {other.component for other in rendering.pods if other.main.document["image"] == given["image"]} == {
        "functions"
    }


def test_a_generated_secret_signs_and_survives_upgrades(tmp_path: Path) -> None:
    case = REWARDED.but({"verifier": {"rewardSecret": ""}})
    first = render(case)
    secret = first.one("Secret", "functions")
    assert len(base64.b64decode(secret.at("data", "secret"))) >= 32
    redis = first.one("Secret", "redis")
    again = against(tmp_path, case, secret.document, redis.document)
    assert again.one("Secret", "functions").at("data") == secret.at("data")
    for component in ("functions", "verifier"):
        assert again.pod(component).document == first.pod(component).document


def test_an_existing_secret_of_functions_is_used(tmp_path: Path) -> None:
    case = DEFAULTS.but({"rewardFunctions": {"enabled": True, "existingSecret": "own-functions"}})
    annotations = []
    for value in ("b25l", "dHdv"):
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "own-functions"},
            "data": {"secret": value},
        }
        rendering = against(tmp_path, case, secret)
        assert not rendering.has("Secret", "functions")
        pods = [rendering.pod(component) for component in ("functions", "verifier")]
        reference = pods[0].main.env["PENSTOCK_FUNCTIONS_SECRET"]["valueFrom"]["secretKeyRef"]
        assert reference == {"name": "own-functions", "key": "secret"}
        assert pods[1].volumes["functions-auth"]["secret"]["secretName"] == "own-functions"
        annotations.append([pod.annotations["checksum/functions-auth"] for pod in pods])
    assert not set(annotations[0]) & set(annotations[1]), "another secret replaces the pods that read it"


def test_programs_get_namespaces_only_by_bubblewrap() -> None:
    for pod in render(BUBBLEWRAP).pods:
        for container in pod.containers:
            context, alone = container.document["securityContext"], pod.component == "verifier-code"
            assert context.get("procMount") == ("Unmasked" if alone else None), pod
            assert context["seccompProfile"] == (LOCALHOST if alone else {"type": "RuntimeDefault"}), pod
            assert context.get("appArmorProfile") == ({"type": "Unconfined"} if alone else None), pod
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
        assert pod.spec.get("hostUsers") == (False if pod.component == "verifier-code" else None), pod


@each("isolation", ["auto", "gvisor"])
def test_other_isolations_leave_the_pod_as_confined_as_all(isolation: str) -> None:
    case = DEFAULTS.but({"verifierCode": {"isolation": isolation, "runtimeClassName": "gvisor"}})
    code, verifier = render(case).pod("verifier-code"), render(case).pod("verifier")
    assert code.spec.pop("runtimeClassName") == "gvisor"
    assert "hostUsers" not in code.spec
    assert code.main.document["securityContext"] == verifier.main.document["securityContext"]
    assert render(case).group("verifier-code")["rayStartParams"]["num-cpus"] == "4"


@needs_crds
def test_kuberay_knows_the_fields_that_bubblewrap_needs() -> None:
    assert custom_errors(render(BUBBLEWRAP).cluster.document) == []


def test_programs_need_a_writable_tmp() -> None:
    pod = render(REWARDED).pod("verifier-code")
    volume = pod.volumes[pod.main.mounts["/tmp"]["name"]]
    assert "emptyDir" in volume
    assert "medium" not in volume["emptyDir"]
    assert not pod.main.mounts["/tmp"].get("readOnly")


OLD: dict[str, Any] = {
    "verifierCode": None,
    "rewardFunctions": None,
    "verifier": {"rewardHosts": None, "rewardEgress": None, "rewardSecret": None},
}
"""The values of a release from before these existed: `helm upgrade --reuse-values` has only these."""


def test_an_upgrade_that_reuses_old_values_changes_no_more() -> None:
    reused = DEFAULTS.but({**OLD, "redis": {"existingSecret": "own-redis"}})
    now = DEFAULTS.but({"redis": {"existingSecret": "own-redis"}})
    before, after = documents(render(reused)), documents(render(now))
    assert set(after) - set(before) == {f"NetworkPolicy/{FULLNAME}-verifier-code"}
    groups = [group["groupName"] for group in render(reused).cluster.at("spec", "workerGroupSpecs")]
    assert groups == ["cpu", "verifier", "rollout-gpu", "learner-gpu"]
    for role in ROLES:
        if role != "verifier-code":
            assert render(reused).pod(role).document == render(now).pod(role).document
    assert limits(render(reused)) == limits(render(now))


def documents(rendering: Rendering) -> dict[str, Document]:
    return {str(manifest): manifest.document for manifest in rendering.manifests}


def test_names_of_functions_are_the_releases_own() -> None:
    names = {manifest.name for manifest in render(REWARDED).manifests if manifest.component == "functions"}
    assert names == {f"{RELEASE}-penstock-functions"}
