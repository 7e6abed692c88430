"""Tests that an install checks its cluster first, and reports what is missing and how to get it.

Must not check values that are invalid in any cluster; test_bad_input.py does.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import yaml

from tests.harness.each import each
from tests.helm.cases import (
    CASES,
    DEFAULTS,
    EXISTING_SECRETS,
    EXTERNAL_REDIS,
    HUB,
    OBJECT_STORE,
    OWN_TLS,
    PUBLISHED,
    REWARDED,
    SENTINELS,
    SHARED_CLAIM,
)
from tests.helm.kube_api import against, of_cluster, ray_definition
from tests.helm.rendering import Case, Document, HelmError, render
from tests.helm.schemas import CRDS, needs_crds


@each("case", [case for case in CASES if "PriorityClass" not in {kind for kind, _ in case.external}])
def test_a_cluster_with_all_objects_of_a_case_is_accepted(tmp_path: Path, case: Case) -> None:
    assert against(tmp_path, case, *of_cluster(case)).cluster


def test_a_missing_kuberay_is_one_clear_message(tmp_path: Path) -> None:
    with pytest.raises(HelmError) as refused:
        against(tmp_path, DEFAULTS, without=("ray.io/v1",))
    assert "KubeRay is missing" in str(refused.value)


@each(
    "part, kind",
    [
        ("serviceMonitor", "v1/ServiceMonitor"),
        ("scrapeConfig", "v1alpha1/ScrapeConfig"),
        ("podMonitor", "v1/PodMonitor"),
        ("rules", "v1/PrometheusRule"),
    ],
)
def test_missing_prometheus_definitions_are_one_clear_message(tmp_path: Path, part: str, kind: str) -> None:
    case = DEFAULTS.but({"metrics": {part: {"enabled": True}}})
    with pytest.raises(HelmError) as refused:
        against(tmp_path, case, without=("monitoring.coreos.com/v1", "monitoring.coreos.com/v1alpha1"))
    message = str(refused.value)
    assert f"metrics.{part}.enabled" in message
    assert f"the cluster has no monitoring.coreos.com/{kind}" in message


@each(
    "case, path, name, keys",
    [
        (EXISTING_SECRETS, "redis.existingSecret", "own-redis", ("penstock-password", "ray-password")),
        (EXISTING_SECRETS, "ray.authSecret", "own-ray", ("auth_token",)),
        (EXISTING_SECRETS, "imagePullSecrets[0].name", "own-registry", ("secret docker-registry own-registry",)),
        (OBJECT_STORE, "storage.s3.existingSecret", "own-s3", ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")),
        (HUB, "hub.existingSecret", "own-hub", ("HF_TOKEN",)),
        (SENTINELS, "redis.external.caSecret", "own-ca", ("ca.crt",)),
        (OWN_TLS, "redis.tls.existingSecret", "own-redis-tls", ("tls.crt", "tls.key", "ca.crt")),
        (SENTINELS, "redis.existingSecret", "own-redis", ("sentinel-password",)),
        (PUBLISHED, "api.ingress.tlsSecret", "own-tls", ("secret tls own-tls --cert=FILE --key=FILE",)),
        (SHARED_CLAIM, "storage.claim.existingClaim", "own-claim", ()),
        (REWARDED, "verifier.rewardSecret", "own-rewards", ("--from-file=PENSTOCK_REWARD_KEY=FILE",)),
        (
            REWARDED.but({"rewardFunctions": {"existingSecret": "own-functions"}}, name="functions"),
            "rewardFunctions.existingSecret",
            "own-functions",
            ("--from-file=secret=FILE",),
        ),
    ],
    called=lambda case: f"{case[0]}: {case[1]}",
)
def test_a_missing_object_is_one_clear_message(
    tmp_path: Path, case: Case, path: str, name: str, keys: tuple[str, ...]
) -> None:
    others = [document for document in of_cluster(case) if document["metadata"]["name"] != name]
    with pytest.raises(HelmError) as refused:
        against(tmp_path, case, *others)
    message = str(refused.value)
    assert path in message
    assert name in message
    assert all(key in message for key in keys), message


@each("key, accepted", [("PENSTOCK_REWARD_KEY", True), ("LD_PRELOAD", False), ("PENSTOCK_REWARD_HOSTS", False)])
def test_a_secret_of_rewards_holds_nothing_else(tmp_path: Path, key: str, accepted: bool) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "own-rewards"}, "data": {key: "eA=="}}
    others = [document for document in of_cluster(REWARDED) if document["metadata"]["name"] != "own-rewards"]
    if accepted:
        assert against(tmp_path, REWARDED, secret, *others).cluster
    else:
        with pytest.raises(HelmError, match=rf'verifier\.rewardSecret: "own-rewards" is not valid: its key "{key}"'):
            against(tmp_path, REWARDED, secret, *others)


def test_a_secret_without_a_key_is_one_clear_message(tmp_path: Path) -> None:
    half = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "own-redis"},
        "data": {"penstock-password": "eA=="},
    }
    with pytest.raises(HelmError, match="ray-password"):
        against(tmp_path, EXTERNAL_REDIS, half)


@each("namespace", [True, False], called={True: "namespace", False: "no namespace yet"}.get)
def test_an_operator_that_is_too_old_is_one_clear_message(tmp_path: Path, namespace: bool) -> None:
    """Helm 4 would report an unknown field; Helm 3 would create a cluster whose autoscaler never restarts."""
    for options in [("image",), ("command",), ("args",)]:
        with pytest.raises(HelmError, match=r"KubeRay is too old .*expected 1\.7 or newer.*helm show crds"):
            against(tmp_path, DEFAULTS, ray_definition(*options), namespace=namespace)


@needs_crds
def test_kuberays_own_definition_is_new_enough(tmp_path: Path) -> None:
    text = (CRDS / "ray.io_rayclusters.yaml").read_text(encoding="utf-8")
    assert against(tmp_path, DEFAULTS, yaml.load(text, Loader=yaml.CSafeLoader)).cluster


def test_the_operator_check_can_be_switched_off(tmp_path: Path) -> None:
    forbidden = ("customresourcedefinitions",)
    with pytest.raises(HelmError, match="customresourcedefinitions"):
        against(tmp_path, DEFAULTS, forbidden=forbidden)
    unchecked = DEFAULTS.but({"ray": {"checkOperator": False}})
    assert against(tmp_path, unchecked, ray_definition("image"), forbidden=forbidden).cluster


def test_a_missing_operator_is_reported_without_a_namespace(tmp_path: Path) -> None:
    """With `--create-namespace` Helm renders first, when the objects of the namespace cannot be checked."""
    with pytest.raises(HelmError, match="KubeRay is missing"):
        against(tmp_path, DEFAULTS, without=("ray.io/v1",), namespace=False)
    assert against(tmp_path, EXTERNAL_REDIS, namespace=False).cluster


def test_cilium_without_its_kind_is_one_clear_message(tmp_path: Path) -> None:
    case = DEFAULTS.but({"networkPolicy": {"cilium": True}})
    with pytest.raises(HelmError, match=r"networkPolicy\.cilium: true is not valid: .*CiliumNetworkPolicy"):
        against(tmp_path, case, without=("cilium.io/v2",))
    assert against(tmp_path, case).has("CiliumNetworkPolicy")


def test_a_registry_secret_of_another_type_is_one_clear_message(tmp_path: Path) -> None:
    """Nodes ignore such a Secret silently."""
    opaque = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "own-registry"},
        "type": "Opaque",
        "data": {".dockerconfigjson": "e30="},
    }
    with pytest.raises(HelmError) as refused:
        against(tmp_path, EXISTING_SECRETS, *of_cluster(EXISTING_SECRETS), opaque)
    for word in (
        "imagePullSecrets[0].name",
        "Opaque",
        "kubernetes.io/dockerconfigjson",
        "delete secret own-registry",
        "create secret docker-registry own-registry --from-file=.dockerconfigjson=FILE",
    ):
        assert word in str(refused.value), refused.value


def live_redis(**changed: object) -> Document:
    """The StatefulSet as created earlier, with other values of these fields of its claim."""
    document = deepcopy(render(DEFAULTS).one("StatefulSet", "redis").document)
    claim = document["spec"]["volumeClaimTemplates"][0]["spec"]
    for field, value in changed.items():
        if field == "size":
            claim["resources"]["requests"]["storage"] = value
        else:
            claim[field] = value
    return document


@each(
    "live, words",
    [
        (
            {"size": "10Gi"},
            (
                "redis.persistence.size: 20Gi is not valid",
                "expected 10Gi",
                "patch pvc data-demo-penstock-redis-0",
                '"storage":"20Gi"',
            ),
        ),
        ({"storageClassName": "fast"}, ("redis.persistence.storageClass", 'expected "fast"')),
    ],
)
def test_an_immutable_field_of_redis_is_one_clear_message(
    tmp_path: Path, live: dict[str, object], words: tuple[str, ...]
) -> None:
    with pytest.raises(HelmError) as refused:
        against(tmp_path, DEFAULTS, live_redis(**live))
    for word in (*words, "delete statefulset demo-penstock-redis --cascade=orphan"):
        assert word in str(refused.value), refused.value


@each("live", [{}, {"size": "20480Mi"}])
def test_an_upgrade_with_the_same_redis_volume_passes(tmp_path: Path, live: dict[str, object]) -> None:
    assert against(tmp_path, DEFAULTS, live_redis(**live)).has("StatefulSet", "redis")


def test_an_external_redis_has_no_volume_to_check(tmp_path: Path) -> None:
    objects = (*of_cluster(EXTERNAL_REDIS), live_redis(size="1Gi"))
    assert not against(tmp_path, EXTERNAL_REDIS, *objects).has("StatefulSet", "redis")


def of_release(kind: str, name: str, release: str, version: str) -> Document:
    """An object in the namespace, of another release; of none, if the name is empty."""
    annotations = {"annotations": {"meta.helm.sh/release-name": release}} if release else {}
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, **annotations}}


@each(
    "kind, name, version",
    [
        ("RayCluster", "demo-penstock", "ray.io/v1"),
        ("Deployment", "demo-penstock-api", "apps/v1"),
        ("StatefulSet", "demo-penstock-redis", "apps/v1"),
    ],
)
def test_the_name_of_another_release_is_one_clear_line(tmp_path: Path, kind: str, name: str, version: str) -> None:
    """Releases `demo` and `demo-penstock` have the same full name, and so have two with the same fullnameOverride."""
    for release, whose in (("demo-penstock", "of release demo-penstock"), ("", "of no release")):
        with pytest.raises(HelmError) as refused:
            against(tmp_path, DEFAULTS, of_release(kind, name, release, version))
        message = str(refused.value)
        assert 'fullnameOverride: "" is not valid: expected another name' in message
        assert f"namespace training has the {kind} {name} {whose}" in message
        assert message.count("is not valid") == 1


def test_the_objects_of_the_same_release_are_no_clash(tmp_path: Path) -> None:
    mine = [
        of_release("RayCluster", "demo-penstock", "demo", "ray.io/v1"),
        of_release("Deployment", "demo-penstock-api", "demo", "apps/v1"),
    ]
    assert against(tmp_path, DEFAULTS, *mine).cluster
