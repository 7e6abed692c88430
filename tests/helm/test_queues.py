"""Tests the Ray cluster in a queue: its labels, annotations and scheduler, a fixed size, and suspension.

Must not run Kueue or Volcano; docs/cluster.md says what they do with what is rendered here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.each import each
from tests.helm.cases import DEFAULTS, EXISTING_SECRETS, GROUPS, NEW_SHARED_CLAIM, ROLES
from tests.helm.kube_api import against
from tests.helm.ray_autoscaler import pods_added
from tests.helm.rendering import FULLNAME, Case, Document, HelmError, render, template
from tests.helm.schemas import custom_errors, needs_crds
from tests.helm.test_kuberay import refusals

QUEUE = "kueue.x-k8s.io/queue-name"
ELASTIC = "kueue.x-k8s.io/elastic-job"
GUIDE = ("../../deploy/values/qwen2.5-32b.yaml",)
KUEUE = Case("Kueue", files=(*GUIDE, "../../deploy/values/kueue.yaml"))
VOLCANO = Case("Volcano", files=(*GUIDE, "../../deploy/values/volcano.yaml"))
FIXED = DEFAULTS.but(
    {
        "ray": {"labels": {QUEUE: "team"}, "autoscaler": {"enabled": False}},
        "rollout": {"minReplicas": 3, "maxReplicas": 9},
        "learner": {"minReplicas": 1},
    },
    name="fixed size",
)


@needs_crds
@each("case", [KUEUE, VOLCANO, FIXED])
def test_kuberay_accepts_a_cluster_in_a_queue(case: Case) -> None:
    cluster = render(case).cluster.document
    assert refusals(cluster) == []
    assert custom_errors(cluster) == []


def test_kueue_finds_its_queue_and_its_gates() -> None:
    """Kueue's webhook adds the gate when a cluster is created, and refuses an update that lacks it."""
    rendering = render(KUEUE)
    assert rendering.cluster.labels[QUEUE] == "penstock"
    assert rendering.cluster.annotations[ELASTIC] == "true"
    assert rendering.cluster.at("spec", "enableInTreeAutoscaling") is True
    assert "suspend" not in rendering.cluster.at("spec"), "Helm would take it from Kueue"
    for pod in rendering.lasting_pods:
        gates = [{"name": ELASTIC}] if pod.component in GROUPS else []
        assert pod.spec.get("schedulingGates", []) == gates, pod
    assert [manifest for manifest in rendering.manifests if QUEUE in manifest.labels] == [rendering.cluster]
    assert len(rendering.cluster.at("spec", "workerGroupSpecs")) <= 7, "older versions of Kueue take no more"


def test_volcano_finds_its_queue_and_the_gang() -> None:
    rendering = render(VOLCANO)
    labels = rendering.cluster.labels
    assert labels["ray.io/scheduler-name"] == "volcano"
    assert labels["volcano.sh/queue-name"] == "penstock"
    # KubeRay's PodGroup with an autoscaler: the head and the minimum of every group.
    minimum = {group["groupName"]: group["minReplicas"] for group in rendering.cluster.at("spec", "workerGroupSpecs")}
    assert minimum == {"cpu": 1, "verifier": 4, "verifier-code": 0, "rollout-gpu": 16, "learner-gpu": 8}
    assert pods_added(rendering.cluster.document) == {name: count for name, count in minimum.items() if count}


@each("case, version", [(KUEUE, "kueue.x-k8s.io/v1beta2"), (VOLCANO, "scheduling.volcano.sh/v1beta1")])
def test_a_queue_that_the_cluster_lacks_is_one_clear_line(tmp_path: Path, case: Case, version: str) -> None:
    """Nothing else would say it: the pods would wait forever, or KubeRay would create none."""
    assert against(tmp_path, case).cluster
    with pytest.raises(HelmError, match=rf"ray\.labels: .* is not valid: .*the cluster has no {version.split('/')[0]}"):
        against(tmp_path, case, without=(version,))


def test_a_scheduler_is_that_of_all_ray_pods() -> None:
    rendering = render(DEFAULTS.but({"ray": {"schedulerName": "yunikorn"}}))
    found = {pod.component for pod in rendering.lasting_pods if pod.spec.get("schedulerName") == "yunikorn"}
    assert found == set(GROUPS)
    assert "schedulerName" not in render(DEFAULTS).pod("head").spec


def test_a_cluster_without_an_autoscaler_keeps_its_size() -> None:
    rendering = render(FIXED)
    assert rendering.cluster.at("spec", "enableInTreeAutoscaling") is False
    assert "autoscalerOptions" not in rendering.cluster.at("spec")
    found = {role: rendering.group(role) for role in ROLES}
    assert {role: (group["replicas"], group["maxReplicas"]) for role, group in found.items()} == {
        "cpu": (1, 1),
        "verifier": (1, 1),
        "verifier-code": (0, 0),
        "rollout": (3, 3),
        "learner": (1, 1),
    }
    text = rendering.one("ConfigMap", name=f"{FULLNAME}-bounds").at("data", "bounds.json")
    assert {role: of["pods"] for role, of in json.loads(text).items() if "pods" in of} == {
        "cpu": 1,
        "verifier": 1,
        "rollout": 3,
        "learner": 1,
    }


def test_a_suspended_cluster_says_so() -> None:
    assert render(DEFAULTS.but({"ray": {"suspend": True}})).cluster.at("spec", "suspend") is True
    assert "suspend" not in render(DEFAULTS).cluster.at("spec")


@each(
    "values, words",
    [
        ({"labels": {QUEUE: "a"}}, ("ray.labels", QUEUE, ELASTIC, "ray.autoscaler.enabled")),
        ({"annotations": {ELASTIC: "true"}}, ("ray.annotations", ELASTIC, QUEUE)),
        ({"labels": {QUEUE: "a"}, "annotations": {ELASTIC: "true"}, "suspend": True}, ("ray.suspend: true",)),
        ({"autoscaler": {"enabled": False}}, ("rollout.minReplicas: 0", "learner.minReplicas: 0")),
        ({"labels": {"app.kubernetes.io/name": "x"}}, ("ray.labels", "app.kubernetes.io/name")),
        ({"labels": {"ray.io/cluster": "x"}}, ("ray.labels", "ray.io/cluster")),
        ({"annotations": {"ray.io/overwrite-container-cmd": "false"}}, ("ray.annotations", "overwrite-container-cmd")),
        ({"annotations": {"meta.helm.sh/release-name": "x"}}, ("ray.annotations", "meta.helm.sh/release-name")),
        ({"schedulerName": "Not Valid"}, ("ray.schedulerName", "pattern")),
        (
            {"labels": {"ray.io/scheduler-name": "volcano"}, "schedulerName": "volcano"},
            ('ray.schedulerName: "volcano" is not valid: expected ""', "ray.io/scheduler-name"),
        ),
    ],
)
def test_what_a_queue_would_reject_is_one_clear_line(values: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(HelmError) as refused:
        template(DEFAULTS.but({"ray": values}))
    assert [word for word in words if word not in str(refused.value)] == [], refused.value


@each("label", ["ray.io/priority-class-name", "ray.io/gang-scheduling-enabled", "yunikorn.apache.org/queue"])
def test_labels_of_kuberay_that_the_chart_does_not_set_are_free(label: str) -> None:
    cluster = render(DEFAULTS.but({"ray": {"labels": {label: "x"}, "annotations": {label: "y"}}})).cluster
    assert (cluster.labels[label], cluster.annotations[label]) == ("x", "y")


@each("value, found", [("commonLabels", "objects"), ("podLabels", "pods")])
def test_labels_go_to_objects_or_to_pods(value: str, found: str) -> None:
    """A label in a pod template replaces the pod when it changes, and one in a selector cannot change."""
    before, after = render(EXISTING_SECRETS), render(EXISTING_SECRETS.but({value: {"team": "rot-weiss"}}))
    objects = {str(manifest) for manifest in after.manifests if manifest.labels.get("team") == "rot-weiss"}
    pods = {str(pod) for pod in after.pods if pod.labels.get("team") == "rot-weiss"}
    assert objects == ({str(manifest) for manifest in after.manifests} if found == "objects" else objects & pods)
    assert pods >= ({str(pod) for pod in after.lasting_pods} if found == "pods" else set())
    if found == "objects":
        changed = [pod for pod in before.lasting_pods if after.pod(pod.component).document != pod.document]
        assert changed == []
    for manifest in after.manifests:
        selectors = [manifest.at("spec", "selector"), manifest.at("spec", "podSelector")]
        assert "rot-weiss" not in json.dumps(selectors), manifest


@each("label", ["ray.io/group", "penstock.dev/shares-volume", "app.kubernetes.io/component"])
def test_a_pods_label_of_the_chart_or_kuberay_is_refused(label: str) -> None:
    values = {"podLabels": {label: "x"}, "serviceAccount": {"podLabels": {label: "x"}}}
    with pytest.raises(HelmError) as refused:
        template(DEFAULTS.but(values))
    for path in ("podLabels", "serviceAccount.podLabels"):
        assert f'\n{path}: "{label}" is not valid: expected a name that neither' in str(refused.value), refused.value


QUEUES = ("ray.io/scheduler-name", QUEUE, "kueue.x-k8s.io/priority-class", "volcano.sh/queue-name", "x.volcano.sh/y")


@each("label", QUEUES)
def test_a_queue_is_that_of_the_ray_cluster_alone(label: str) -> None:
    """Kueue would also hold the API, Redis and the Job that drains at uninstall."""
    everywhere: dict[str, Any] = {
        "commonLabels": {label: "x"},
        "podLabels": {label: "x"},
        "serviceAccount": {"podLabels": {label: "x"}},
        "rewardFunctions": {"podLabels": {label: "x"}},
    }
    with pytest.raises(HelmError) as refused:
        template(DEFAULTS.but(everywhere))
    message = str(refused.value)
    for path in ("commonLabels", "podLabels", "serviceAccount.podLabels"):
        assert f'\n{path}: "{label}" is not valid: expected it in ray.labels' in message, message
    assert f'rewardFunctions.podLabels: "{label}" is not valid' in message


@each("labels", [{"x y": "a"}, {"a": "a b"}, {"a": "-"}, {"a": "x" * 64}, {"/a": "b"}, {"Upper.example/a": "b"}])
def test_labels_that_kubernetes_would_reject_are_refused(labels: dict[str, str]) -> None:
    """Those of pods in a RayCluster would be rejected only as the first pod is created, in KubeRay's log."""
    everywhere: dict[str, Any] = {
        "commonLabels": labels,
        "podLabels": labels,
        "ray": {"labels": labels, "nodeSelector": labels},
        "head": {"nodeSelector": labels},
    }
    with pytest.raises(HelmError) as refused:
        template(DEFAULTS.but(everywhere))
    for path in ("commonLabels", "podLabels", "ray.labels", "ray.nodeSelector", "head.nodeSelector"):
        assert f"- {path}" in str(refused.value), refused.value


def test_labels_at_the_limit_are_accepted() -> None:
    labels = {"a": "", "b-2.example/Name_x.y": "x" * 63, "n" * 63: "A.b_c-9"}
    values = {"ray": {"labels": labels}, "commonLabels": labels, "podLabels": labels}
    assert labels.items() <= render(DEFAULTS.but(values)).cluster.labels.items()


def muted(template: Document) -> Document:
    """A pod template as KubeRay 1.7 compares it: without tolerations and scheduling gates."""
    spec = {name: value for name, value in template["spec"].items() if name not in ("tolerations", "schedulingGates")}
    return {**template, "spec": spec}


def test_changed_tolerations_replace_the_pods() -> None:
    """KubeRay leaves them out of the hash by which it finds changed templates."""
    case = NEW_SHARED_CLAIM.but({"redis": {"existingSecret": "own-redis"}})
    added = [{"key": "maintenance", "operator": "Exists"}]
    before, after = render(case), render(case.but({"rollout": {"tolerations": added}}))
    for role in ROLES:
        same = muted(before.group(role)["template"]) == muted(after.group(role)["template"])
        assert same is (role != "rollout"), role
