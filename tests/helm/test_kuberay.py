"""Tests that the operator and Ray's autoscaler accept the cluster, beyond what a CRD can state.

Must not repeat the CRD; test_schemas.py validates against it.
"""

from __future__ import annotations

import re
from typing import Any

from services.settings.cluster_limits import SHARE_OF_CPU_POD
from tests.harness.each import each
from tests.helm.cases import CASES, DEFAULTS, EXISTING_SECRETS, EXTERNAL_REDIS_TLS, ROLES, SENTINELS, section, values_of
from tests.helm.rendering import FULLNAME, NAMESPACE, Case, Document, parse, render, template_as

LONGEST_NAME = 53
"""KubeRay's limit: it appends up to ten characters for the name of a Service."""
FIRST_WITH_TOKENS = (2, 52)
OF_KUBERAY = {
    "RAY_REDIS_ADDRESS",
    "REDIS_PASSWORD",
    "REDIS_USERNAME",
    "KUBERAY_GEN_RAY_START_CMD",
    "RAY_CLUSTER_NAME",
    "RAY_CLUSTER_NAMESPACE",
    "FQ_RAY_IP",
    "RAY_AUTH_TOKEN",
    "RAY_AUTH_MODE",
    "RAY_enable_autoscaler_v2",
}
"""Variables that KubeRay sets itself; it rejects some of them, and would duplicate the others."""


def refusals(cluster: Document) -> list[str]:
    """Why KubeRay would reject a cluster, or silently ignore a part of it."""
    spec = cluster["spec"]
    groups = {"head": spec["headGroupSpec"], **{group["groupName"]: group for group in spec["workerGroupSpecs"]}}
    version = tuple(int(part) for part in spec["rayVersion"].split(".")[:2])
    checks: dict[str, bool] = {
        "name": bool(re.fullmatch(rf"[a-z]([-a-z0-9]{{0,{LONGEST_NAME - 2}}}[a-z0-9])?", cluster["metadata"]["name"])),
        "rayVersion too old for tokens": version >= FIRST_WITH_TOKENS,
        "own command without the annotation": cluster["metadata"]["annotations"].get("ray.io/overwrite-container-cmd")
        == "true",
        "FT by annotation and by options": "ray.io/ft-enabled" not in cluster["metadata"]["annotations"],
        "duplicate name of a group": len(groups) == 1 + len(spec["workerGroupSpecs"]),
    }
    for name, group in groups.items():
        pod, parameters = group["template"]["spec"], group["rayStartParams"]
        variables = {entry["name"] for entry in pod["containers"][0].get("env", [])}
        checks |= {
            f"{name}: restartPolicy": pod.get("restartPolicy", "Never") == "Never",
            f"{name}: variables of KubeRay": not variables & OF_KUBERAY,
            f"{name}: resources twice": not (
                group.get("resources") and {"num-cpus", "num-gpus", "memory"} & set(parameters)
            ),
            f"{name}: labels": "labels" not in parameters,
            f"{name}: parameters are strings": all(isinstance(value, str) for value in parameters.values()),
            f"{name}: password": not {"redis-password", "redis-username"} & set(parameters),
            f"{name}: name": bool(re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name)),
        }
        if name != "head":
            checks[f"{name}: bounds"] = 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    return [name for name, passed in checks.items() if not passed]


@each("case", CASES)
def test_kuberay_accepts_the_cluster(case: Case) -> None:
    assert refusals(render(case).cluster.document) == []


@each("release", ["r" * 53, "a-name-that-is-cut-off-exactly-at-a-dash--still-ok"])
def test_a_long_or_odd_release_name_makes_a_valid_cluster(release: str) -> None:
    rendering = parse(template_as(release, DEFAULTS))
    assert refusals(rendering.cluster.document) == []
    assert all(len(manifest.name) <= 63 for manifest in rendering.manifests)


def slots(role: str, cpus: int) -> int:
    """The places of a pod for processes of its role, and in cpu pods one for preparation: chart and limits agree."""
    return int(cpus / SHARE_OF_CPU_POD) + 1 if role == "cpu" else 1000 * cpus


@each("case", CASES)
def test_rays_autoscaler_reads_the_groups_as_intended(case: Case) -> None:
    """By the function with which the autoscaler in the head's pod reads the cluster."""
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    document: Any = {**render(case).cluster.document}
    document["metadata"] = {**document["metadata"], "namespace": NAMESPACE}
    kinds = _derive_autoscaling_config_from_ray_cr(document)["available_node_types"]
    assert kinds["headgroup"]["resources"]["CPU"] == 0
    assert kinds["headgroup"]["resources"]["penstock-head"] == 1000
    values = values_of(case)
    for role in ROLES:
        kind = kinds[render(case).group(role)["groupName"]]
        of = values[section(role)]
        assert kind["resources"]["CPU"] == of["cpus"]
        assert kind["resources"].get("GPU", 0) == of["gpus"]
        assert kind["resources"][f"penstock-{role}"] == slots(role, of["cpus"])
        assert (kind["min_workers"], kind["max_workers"]) == (of["minReplicas"], of["maxReplicas"])


@each("case", CASES)
def test_the_cluster_survives_its_head_and_requires_a_token(case: Case) -> None:
    cluster = render(case).cluster
    options = cluster.at("spec", "gcsFaultToleranceOptions")
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"]["key"] == "ray-password"
    assert options["redisUsername"] == {"value": "ray"}
    assert cluster.at("spec", "authOptions", "mode") == "token"


def test_ray_reaches_the_same_redis_with_its_own_user() -> None:
    address = {
        case.name: render(case).cluster.at("spec", "gcsFaultToleranceOptions", "redisAddress")
        for case in (DEFAULTS, EXTERNAL_REDIS_TLS, SENTINELS)
    }
    assert address[DEFAULTS.name] == f"redis://{FULLNAME}-redis:6379"
    assert address[EXTERNAL_REDIS_TLS.name] == "rediss://redis.data:6380"
    assert address[SENTINELS.name] == "rediss://redis-primary.data:6380"


def test_the_redis_address_follows_the_values() -> None:
    address = {
        case.name: render(case).pod("api").main.env["PENSTOCK_REDIS"]["value"]
        for case in (DEFAULTS, EXTERNAL_REDIS_TLS, SENTINELS)
    }
    assert address[DEFAULTS.name] == f"redis://{FULLNAME}-redis:6379/0"
    assert address[EXTERNAL_REDIS_TLS.name] == "rediss://redis.data:6380/3"
    assert address[SENTINELS.name] == "rediss+sentinel://sentinel-0.data:26379,sentinel-1.data:26379/penstock/0"


def test_an_existing_token_is_used() -> None:
    assert render(EXISTING_SECRETS).cluster.at("spec", "authOptions", "secretName") == "own-ray"
    assert "secretName" not in render(DEFAULTS).cluster.at("spec", "authOptions")


@each("strategy", ["Recreate", "None"])
def test_the_upgrade_strategy_is_a_value(strategy: str) -> None:
    cluster = render(DEFAULTS.but({"ray": {"upgradeStrategy": strategy}})).cluster
    assert cluster.at("spec", "upgradeStrategy", "type") == strategy


def test_kuberay_adds_no_wider_role_to_the_accounts() -> None:
    """KubeRay creates a role and a binding with the cluster's name if there are none."""
    rendering = render(DEFAULTS)
    assert rendering.one("Role", name=FULLNAME)
    binding = rendering.one("RoleBinding", name=FULLNAME)
    assert [subject["name"] for subject in binding.at("subjects")] == [rendering.pod("head").spec["serviceAccountName"]]
    verbs = {
        (resource, verb)
        for rule in rendering.one("Role", name=FULLNAME).at("rules")
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert {("rayclusters", "get"), ("rayclusters", "patch"), ("pods", "list"), ("pods", "get")} <= verbs
    assert {resource for resource, _ in verbs} == {"rayclusters", "pods"}
