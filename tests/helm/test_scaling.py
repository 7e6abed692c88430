"""Tests that the chart sets limits only: counts belong to the controller, and survive an upgrade.

Must not check how the controller uses them; tests/services/controller does.
"""

from __future__ import annotations

import json
from copy import deepcopy
from itertools import product
from typing import Any

from services.settings import ClusterLimits
from tests.harness.each import each
from tests.helm.cases import CASES, CPU, DEFAULTS, EXISTING_SECRETS, ROLES, section, values_of
from tests.helm.rendering import FULLNAME, Case, Document, Rendering, render
from tests.helm.test_kuberay import slots

GROUP_NAMES = {
    "cpu": ("cpu", "cpu"),
    "verifier": ("verifier", "verifier"),
    "verifier-code": ("verifier-code", "verifier-code"),
    "rollout": ("rollout", "rollout-gpu"),
    "learner": ("learner", "learner-gpu"),
}
"""Role -> its group's name without and with GPUs."""


def bounds(rendering: Rendering) -> dict[str, dict[str, Any]]:
    return dict(json.loads(rendering.one("ConfigMap", name=f"{FULLNAME}-bounds").at("data", "bounds.json")))


@each("case", CASES)
def test_groups_and_limits_are_those_of_the_values(case: Case) -> None:
    rendering, values = render(case), values_of(case)
    sizes = {role: values[section(role)] for role in ROLES}
    found = bounds(rendering)
    found.pop("rewards", None)
    assert found == {
        role.replace("-", "_"): {"pods": of["maxReplicas"], "cpus": of["cpus"], "gpus": of["gpus"]}
        for role, of in sizes.items()
        if of["maxReplicas"]
    }
    for role in ROLES:
        group = rendering.group(role)
        assert (group["minReplicas"], group["maxReplicas"]) == (
            sizes[role]["minReplicas"],
            sizes[role]["maxReplicas"],
        )
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert group["groupName"] == GROUP_NAMES[role][sizes[role]["gpus"] > 0]
    assert len(rendering.cluster.at("spec", "workerGroupSpecs")) == len(ROLES)


def test_the_limits_have_the_memory_of_gpus_only_if_it_is_set() -> None:
    """An earlier release refuses a field that it does not know."""
    found = bounds(render(DEFAULTS.but({"rollout": {"gpuMemoryGiB": 79.6}})))
    assert found == {**bounds(render(DEFAULTS)), "rollout": {"pods": 4, "cpus": 8, "gpus": 1, "gpu_memory_gib": 79.6}}
    read = ClusterLimits.model_validate(found)
    assert (read.rollout.gpu_memory_gib, read.learner.gpu_memory_gib) == (79.6, None)


@each("case", CASES)
def test_groups_announce_their_role_and_the_head_no_cpu(case: Case) -> None:
    cluster = render(case).cluster
    head = announced(cluster.at("spec", "headGroupSpec"))
    assert head["CPU"] == 0
    assert head["penstock-head"] == 1000
    for role in ROLES:
        group = render(case).group(role)
        found = announced(group)
        assert {name for name in found if name.startswith("penstock-")} == {f"penstock-{role}"}
        values = values_of(case)[section(role)]
        assert found[f"penstock-{role}"] == slots(role, values["cpus"]), group["groupName"]
        assert found["CPU"] == values["cpus"], group["groupName"]
        assert found.get("GPU", 0) == values["gpus"], group["groupName"]


def announced(group: Document) -> dict[str, float]:
    """The resources that a group's nodes announce to Ray, in either of KubeRay's two ways (never both at once)."""
    if group.get("resources"):
        clash = {"num-cpus", "num-gpus", "memory", "resources"} & set(group["rayStartParams"])
        assert not clash, f"KubeRay rejects {clash} together with `resources`"
        return {name: float(amount) for name, amount in group["resources"].items()}
    parameters = group["rayStartParams"]
    custom = json.loads(parameters.get("resources", '"{}"').strip("'\"").replace("\\", "") or "{}")
    return {**custom, "CPU": float(parameters.get("num-cpus", -1)), "GPU": float(parameters.get("num-gpus", 0))}


def without_bounds(rendering: Rendering) -> list[Document]:
    """All objects, without what a limit may change."""
    found = []
    for manifest in rendering.manifests:
        document = deepcopy(manifest.document)
        if manifest.kind == "RayCluster":
            for group in document["spec"]["workerGroupSpecs"]:
                for field in ("minReplicas", "maxReplicas", "replicas"):
                    group.pop(field)
        if manifest.kind == "PodDisruptionBudget" and manifest.component == "learner":
            document["spec"].pop("minAvailable")  # all of its pods
        if manifest.kind != "Secret" and manifest.name != f"{FULLNAME}-bounds":  # without a cluster, tokens are new
            found.append(document)
    return found


@each(
    "case, role",
    list(product([EXISTING_SECRETS, CPU.but({"redis": {"existingSecret": "own-redis"}})], ROLES)),
    called=lambda case: f"{case[0]}: {case[1]}",
)
def test_a_changed_limit_changes_no_pod(case: Case, role: str) -> None:
    before, after = render(case), render(case.but({section(role): {"minReplicas": 1, "maxReplicas": 9}}))
    assert [pod.document for pod in before.pods] == [pod.document for pod in after.pods], "pods would restart"
    assert without_bounds(before) == without_bounds(after)
    assert bounds(after)[role.replace("-", "_")]["pods"] == 9
    assert after.group(role)["maxReplicas"] == 9


@each("case", CASES)
def test_the_limits_are_a_folder_that_follows_an_upgrade(case: Case) -> None:
    """A file mounted by subPath would not follow an upgrade."""
    for component in ("api", "head"):
        pod = render(case).pod(component)
        assert pod.main.env["PENSTOCK_BOUNDS"]["value"] == "/etc/penstock/bounds/bounds.json"
        mount = pod.main.mounts["/etc/penstock/bounds"]
        assert "subPath" not in mount
        assert pod.volumes[mount["name"]]["configMap"]["name"] == f"{FULLNAME}-bounds"
        assert not pod.volumes[mount["name"]]["configMap"].get("optional")


def test_rays_autoscaler_is_on() -> None:
    cluster = render(DEFAULTS).cluster
    assert cluster.at("spec", "enableInTreeAutoscaling") is True
    assert cluster.at("spec", "autoscalerOptions", "version") == "v2"


@each("case", CASES)
def test_no_other_object_writes_counts(case: Case) -> None:
    for kind in ("HorizontalPodAutoscaler", "ScaledObject", "VerticalPodAutoscaler"):
        assert not render(case).has(kind)
