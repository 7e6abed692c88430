"""Tests install, upgrade, `helm test` and uninstall: order of objects, hooks, what an upgrade keeps.

Must not check what pods do when they end; tests/cluster does.
"""

from __future__ import annotations

import hashlib
import json
from copy import deepcopy
from operator import itemgetter
from pathlib import Path
from typing import Any

from typer.main import get_command

from deploy.cli.main import app
from tests.harness.each import each
from tests.helm.cases import (
    CASES,
    CPU,
    DEFAULTS,
    EVERYTHING,
    EXISTING_SECRETS,
    EXTERNAL_REDIS,
    EXTERNAL_REDIS_TLS,
    GROUPS,
    NEW_SHARED_CLAIM,
    OBJECT_STORE_BY_ROLE,
    OWN_TLS,
    PINNED,
    ROLES,
)
from tests.helm.kube_api import ROOT_CA, against, kube_api, of_cluster
from tests.helm.rendering import (
    CHART,
    FULLNAME,
    NAMESPACE,
    RELEASE,
    Case,
    Document,
    default_values,
    helm,
    parse,
    render,
    template,
    template_as,
)


@each("case", CASES)
def test_an_upgrade_renders_the_same_as_an_install(case: Case) -> None:
    rendering = parse(template(case, "--is-upgrade"))
    assert [str(manifest) for manifest in rendering.manifests] == [str(manifest) for manifest in render(case).manifests]


def live_cluster(**counts: int) -> Document:
    """The running cluster, with the counts that the controller and the autoscaler set."""
    document = deepcopy(render(DEFAULTS).cluster.document)
    for group in document["spec"]["workerGroupSpecs"]:
        if group["groupName"] in counts:
            group["replicas"] = counts[group["groupName"]]
            group["scaleStrategy"] = {"workersToDelete": [f"{group['groupName']}-pod-1"]}
    return document


def test_an_upgrade_keeps_the_counts_that_the_controller_wrote(tmp_path: Path) -> None:
    live = live_cluster(**{"rollout-gpu": 3, "learner-gpu": 1, "verifier": 2})
    rendering = against(tmp_path, DEFAULTS, live)
    assert {role: rendering.group(role)["replicas"] for role in ROLES} == {
        "cpu": 1,
        "verifier": 2,
        "verifier-code": 0,
        "rollout": 3,
        "learner": 1,
    }
    assert rendering.group("rollout")["scaleStrategy"]["workersToDelete"] == ["rollout-gpu-pod-1"], (
        "a pod that was scaled down would stay"
    )


def test_a_lower_limit_ends_no_running_replica(tmp_path: Path) -> None:
    lowered = DEFAULTS.but({"rollout": {"maxReplicas": 1}})
    group = against(tmp_path, lowered, live_cluster(**{"rollout-gpu": 3})).group("rollout")
    assert group["replicas"] == 3
    assert group["maxReplicas"] >= 3


def test_a_higher_minimum_adds_replicas_only_if_needed(tmp_path: Path) -> None:
    raised = DEFAULTS.but({"rollout": {"minReplicas": 2}})
    assert against(tmp_path, raised, live_cluster(**{"rollout-gpu": 0})).group("rollout")["replicas"] == 2
    assert against(tmp_path, raised, live_cluster(**{"rollout-gpu": 3})).group("rollout")["replicas"] == 3


def test_an_idle_group_stays_at_zero(tmp_path: Path) -> None:
    """0 is a count, not a missing count."""
    assert against(tmp_path, DEFAULTS, live_cluster(**{"rollout-gpu": 0})).group("rollout")["replicas"] == 0


def test_an_upgrade_keeps_the_generated_passwords(tmp_path: Path) -> None:
    first = render(DEFAULTS)
    secrets = first.all("Secret")
    again = against(tmp_path, DEFAULTS, *(secret.document for secret in secrets), live_cluster())
    assert {secret.name: secret.at("data") for secret in again.all("Secret")} == {
        secret.name: secret.at("data") for secret in secrets
    }
    assert len(secrets) == 2, "of Redis and of access"
    for pod in first.lasting_pods:
        later = next(other_pod for other_pod in again.lasting_pods if other_pod.component == pod.component)
        assert later.document == pod.document, f"{pod} would be replaced by an upgrade that changes nothing"


@each("case", [EXTERNAL_REDIS, EXTERNAL_REDIS_TLS, OWN_TLS, EXISTING_SECRETS])
def test_a_new_password_or_certificate_replaces_no_pod(tmp_path: Path, case: Case) -> None:
    """They are read at each use, and by the server when they change. A new pod template would end every run's work."""

    def secrets(value: str) -> list[Document]:
        return [{**found, "data": dict.fromkeys(found["data"], value)} for found in of_cluster(case)]

    before, after = (against(tmp_path, case, *secrets(value)) for value in ("b25l", "dHdv"))
    for pod in before.lasting_pods:
        assert after.pod(pod.component).document == pod.document, pod


def test_tls_of_the_charts_redis_reaches_every_client() -> None:
    rendering = render(OWN_TLS)
    for component in ("api", *GROUPS):
        main = rendering.pod(component).main
        assert main.env["PENSTOCK_REDIS"]["value"] == f"rediss://{FULLNAME}-redis:6379/0"
        assert main.env["PENSTOCK_REDIS_CA_FILE"]["value"] == "/etc/penstock/redis-ca/ca.crt"
        if component == "head":
            assert main.env["RAY_REDIS_CA_CERT"]["value"] == "/etc/penstock/redis-ca/ca.crt"
    options = rendering.one("RayCluster").at("spec", "gcsFaultToleranceOptions")
    assert options["redisAddress"] == f"rediss://{FULLNAME}-redis:6379"
    (server,) = (pod for pod in rendering.pods if pod.component == "redis")
    assert server.main.mounts["/etc/penstock/redis-tls"]["readOnly"]
    assert {item["key"] for item in server.volumes["tls"]["secret"]["items"]} == {"tls.crt", "tls.key"}
    plain = render(DEFAULTS)
    assert "rediss" not in str([manifest.document for manifest in plain.manifests if manifest.kind != "ConfigMap"])
    older = DEFAULTS.but({"redis": {"tls": None}})  # values that an older release's upgrade reuses
    assert render(older).pod("api").main.env == plain.pod("api").main.env


def checksums(annotations: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in annotations.items() if name.startswith("checksum/")}


REWARDS_OPENED = {"rewardFunctions": {"egress": [{"to": [{"podSelector": {}}], "ports": [{"port": 1}]}]}}
CONFIGURATION: list[tuple[str, dict[str, Any], set[str]]] = [
    ("image", PINNED.values["image"] and {"image": PINNED.values["image"]}, {"api", "head", *ROLES}),
    ("log level", {"logLevel": "DEBUG"}, {"api", "head", *ROLES}),
    ("prices", {"prices": {"currency": "USD", "gpuHour": 2}}, {"api", "head"}),
    ("expiry of runs", {"head": {"expireEndedSeconds": 0}}, {"head"}),
    ("maximum of Redis", {"redis": {"maxMemoryMiB": 4096}}, {"redis"}),
    ("variable of all Ray pods", {"ray": {"env": [{"name": "A", "value": "b"}]}}, {"head", *ROLES}),
    ("variable of one group", {"learner": {"env": [{"name": "A", "value": "b"}]}}, {"learner"}),
    ("hosts of rewards", {"verifier": {"rewardHosts": ["a"]}}, {"verifier"}),
    ("egress of rewards", REWARDS_OPENED, set()),
    ("bound of programs", {"verifierCode": {"maxReplicas": 2}}, set()),
    ("isolation of programs", {"verifierCode": {"runtimeClassName": "gvisor"}}, {"verifier-code"}),
    ("replicas of the API", {"api": {"replicas": 3}}, set()),
    ("monitoring", {"metrics": {"dashboards": {"enabled": True}}}, set()),
    ("a network peer", {"networkPolicy": {"clients": [{"podSelector": {}}]}}, set()),
    ("timeout of the test", {"test": {"timeoutSeconds": 100}}, set()),
    ("idle time", {"ray": {"autoscaler": {"idleTimeoutSeconds": 100}}}, set()),
]


@each("change, values, replaced", CONFIGURATION, called=itemgetter(0))
def test_a_change_replaces_exactly_the_pods_it_affects(change: str, values: dict[str, Any], replaced: set[str]) -> None:
    before, after = render(EXISTING_SECRETS), render(EXISTING_SECRETS.but(values))
    changed = {pod.component for pod in before.lasting_pods if after.pod(pod.component).document != pod.document}
    assert changed == replaced, change


def test_pods_have_checksums_of_config_maps_they_read_once() -> None:
    """All except the limits, which are read at each use: their pods must not restart."""
    rendering, looked_at = render(DEFAULTS), set()
    for pod in rendering.lasting_pods:
        for name, volume in pod.volumes.items():
            mounted = volume.get("configMap", {}).get("name", f"{FULLNAME}-bounds")
            if mounted != f"{FULLNAME}-bounds":
                (text,) = rendering.one("ConfigMap", name=mounted).at("data").values()
                assert pod.annotations[f"checksum/{name}"] == hashlib.sha256(text.encode()).hexdigest(), (pod, name)
                looked_at.add(pod.component)
        assert not any("bounds" in name for name in pod.annotations), pod
    assert looked_at == {"redis"}


def test_helm_test_submits_a_run_and_leaves_nothing_behind() -> None:
    tests = [manifest for manifest in render(DEFAULTS).manifests if "test" in manifest.hooks]
    assert [hook.kind for hook in tests] == ["Pod"]
    assert {"before-hook-creation", "hook-succeeded"} <= policies(tests[0].annotations)
    pod = next(pod for pod in render(DEFAULTS).pods if pod.owner is tests[0])
    assert pod.spec["restartPolicy"] == "Never"
    assert "submit" in pod.main.command
    assert "--wait" in pod.main.command
    patience = default_values()["test"]["timeoutSeconds"]
    assert str(patience) in pod.main.command
    assert pod.spec["activeDeadlineSeconds"] > patience, "the command's message would be lost"


def policies(annotations: dict[str, str]) -> set[str]:
    return {policy.strip() for policy in annotations.get("helm.sh/hook-delete-policy", "").split(",")}


def test_uninstall_drains_the_cluster_before_redis_ends() -> None:
    hooks = [manifest for manifest in render(DEFAULTS).manifests if "pre-delete" in manifest.hooks]
    job = next(hook for hook in hooks if hook.kind == "Job")
    weights = {str(hook): int(hook.annotations.get("helm.sh/hook-weight", "0")) for hook in hooks}
    assert all(weight < weights[str(job)] for name, weight in weights.items() if name != str(job)), weights
    for hook in hooks:
        assert "before-hook-creation" in policies(hook.annotations), f"{hook}: a retry would fail because it exists"
        assert "hook-succeeded" in policies(hook.annotations), f"{hook} would stay forever"
    limit = job.at("spec", "activeDeadlineSeconds")
    waits = default_values()["uninstall"]["timeoutSeconds"]
    assert waits < limit < 300, "Helm's own time limit is five minutes"
    assert job.at("spec", "backoffLimit") == 0


def test_uninstall_without_draining_has_no_hook() -> None:
    rendering = render(DEFAULTS.but({"uninstall": {"drain": False}}))
    assert not [manifest for manifest in rendering.manifests if "pre-delete" in manifest.hooks]


@each("case", CASES)
def test_nothing_but_test_and_uninstall_is_a_hook(case: Case) -> None:
    """Helm does not upgrade a hook, and does not delete it with the release."""
    for manifest in render(case).manifests:
        assert manifest.hooks <= {"test", "pre-delete"}, manifest
        assert not (manifest.hooks and manifest.kept), manifest


def test_uninstall_keeps_data_only() -> None:
    assert {manifest.kind for manifest in render(EVERYTHING).manifests if manifest.kept} <= {
        "PersistentVolumeClaim",
        "Secret",
    }


def test_two_releases_in_one_namespace_share_no_name() -> None:
    mine = {str(manifest) for manifest in render(DEFAULTS).manifests}
    theirs = {str(manifest) for manifest in parse(template_as("other", DEFAULTS)).manifests}
    assert not mine & theirs


def test_a_release_called_penstock_is_not_named_twice() -> None:
    names = {manifest.name for manifest in parse(template_as("penstock", DEFAULTS)).manifests}
    assert "penstock-api" in names
    assert not [name for name in names if "penstock-penstock" in name]


def test_the_release_is_named_after_its_chart() -> None:
    assert render(DEFAULTS).cluster.name == FULLNAME == f"{RELEASE}-penstock"


def test_the_notes_give_commands_that_exist(tmp_path: Path) -> None:
    notes = notes_of(tmp_path, DEFAULTS)
    lines = [line.split()[1:] for line in notes.splitlines() if line.strip().startswith("penstock ")]
    assert {line[0] for line in lines} == {"submit", "watch", "scale"}
    lines = [["run-1" if word == "RUN" else word for word in line] for line in lines]
    for name, *words in lines:
        get_command(app).commands[name].make_context(name, words)  # type: ignore[attr-defined]


@each("repository, warned", [("penstock", True), ("registry.example.org/penstock", False), ("team/penstock", False)])
def test_an_image_without_a_registry_gives_a_warning(tmp_path: Path, repository: str, warned: bool) -> None:
    notes = notes_of(tmp_path, DEFAULTS.but({"image": {"repository": repository}}))
    assert (f"image.repository = {repository} names no registry" in notes) is warned


@each("enabled", [True, False])
def test_the_notes_list_the_metrics_that_are_off(tmp_path: Path, enabled: bool) -> None:
    parts = [part for part in default_values()["metrics"] if "enabled" in default_values()["metrics"][part]]
    notes = notes_of(tmp_path, DEFAULTS.but({"metrics": {part: {"enabled": enabled} for part in parts}}))
    assert "podMonitor" in parts
    assert [part for part in parts if f"metrics.{part}" in notes] == ([] if enabled else parts)


@each("egress, warned", [([], True), ([{"to": [{"podSelector": {}}], "ports": [{"port": 80}]}], False)])
def test_hosts_without_egress_give_a_warning(tmp_path: Path, egress: list[Document], warned: bool) -> None:
    notes = notes_of(tmp_path, DEFAULTS.but({"verifier": {"rewardHosts": ["a"], "rewardEgress": egress}}))
    assert ("verifier.rewardEgress is empty" in notes) is warned
    assert "verifierCode: 0 to 0 pods" in notes


@each("case, held", [(DEFAULTS, True), (CPU, False), (OBJECT_STORE_BY_ROLE, False), (NEW_SHARED_CLAIM, False)])
def test_a_gpu_node_that_is_held_at_rest_is_told(tmp_path: Path, case: Case, held: bool) -> None:
    if not case.files:
        assert ("That node has GPUs and is held" in notes_of(tmp_path, case)) is held
    for component in ("head", "cpu", "verifier"):
        spec = render(case).pod(component).spec
        prefers = "nodeAffinity" in spec.get("affinity", {})
        tolerates = any(toleration["key"] == "nvidia.com/gpu" for toleration in spec.get("tolerations", []))
        assert prefers is tolerates is (held and component != "verifier"), component


FIXED: Document = {
    "ray": {"autoscaler": {"enabled": False}},
    "rollout": {"minReplicas": 1},
    "learner": {"minReplicas": 1},
}


@each(
    "values, told",
    [
        ({}, False),
        (FIXED, True),
        ({"learner": {"groups": [{"name": "spot", "minReplicas": 8, "maxReplicas": 8}]}}, True),
        ({"learner": {"minReplicas": 1, "disruptions": "allow"}}, False),
    ],
)
def test_drains_that_are_blocked_at_rest_are_told(tmp_path: Path, values: Document, told: bool) -> None:
    case = DEFAULTS.but(values)
    assert ("Learner pods stay between runs" in notes_of(tmp_path, case)) is told
    at_rest = sum(group["minReplicas"] for group in learners(case))
    assert bool(at_rest and render(case).has("PodDisruptionBudget", "learner")) is told


def learners(case: Case) -> list[Document]:
    groups: list[Document] = render(case).cluster.at("spec", "workerGroupSpecs")
    return [group for group in groups if group["groupName"].startswith("learner")]


def notes_of(folder: Path, case: Case) -> str:
    """The notes that `helm install` prints."""
    values = folder / "values.json"
    values.write_text(json.dumps(case.values), encoding="utf-8")
    with kube_api(folder, [ROOT_CA]) as config:
        printed = helm(
            "install",
            RELEASE,
            str(CHART),
            "--namespace",
            NAMESPACE,
            "--values",
            str(values),
            "--dry-run=server",
            "--disable-openapi-validation",
            "--kubeconfig",
            str(config),
        )
    return printed.partition("\nNOTES:\n")[2]
