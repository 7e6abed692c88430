"""Tests several groups per role: what each takes from its section, and how Ray's autoscaler and the limits use them.

Must not check the sections' own groups; test_scaling.py and test_group_defaults.py do.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.settings import ClusterLimits, ResourceRequest
from services.settings.cluster_limits import SHARE_OF_CPU_POD
from tests.harness.each import each
from tests.helm.cases import DEFAULTS, NEW_SHARED_CLAIM, section
from tests.helm.ray_autoscaler import pods_added
from tests.helm.rendering import COMPONENT, FULLNAME, Case, Document, HelmError, Rendering, render, template
from tests.helm.schemas import custom_errors, needs_crds
from tests.helm.test_kuberay import refusals

SPOT: dict[str, Any] = {
    "name": "spot",
    "maxReplicas": 8,
    "nodeSelector": {"pool": "spot"},
    "tolerations": [{"key": "spot", "operator": "Exists", "effect": "NoSchedule"}],
    "priority": 10,
}
LARGE: dict[str, Any] = {"name": "h200", "minReplicas": 1, "maxReplicas": 2, "gpus": 8, "cpus": 64, "memory": "512Gi"}
GROUPED = NEW_SHARED_CLAIM.but(
    {
        "rollout": {
            "gpuMemoryGiB": 80,
            "nodeSelector": {"gpu": "h100"},
            "env": [{"name": "MARK", "value": "x"}],
            "groups": [SPOT, {**LARGE, "gpuMemoryGiB": 141}],
        },
        "verifier": {"groups": [{"name": "spot", "maxReplicas": 3}]},
    },
    name="several groups per role",
)


def groups(rendering: Rendering) -> dict[str, Document]:
    return {group["groupName"]: group for group in rendering.cluster.at("spec", "workerGroupSpecs")}


def test_further_groups_take_the_values_of_their_section() -> None:
    found = groups(render(GROUPED))
    assert list(found) == [
        "cpu",
        "verifier",
        "verifier-spot",
        "verifier-code",
        "rollout-gpu",
        "rollout-spot",
        "rollout-h200",
        "learner-gpu",
    ]
    for name in ("rollout-gpu", "rollout-spot", "rollout-h200"):
        template = found[name]["template"]
        assert template["metadata"]["labels"][COMPONENT] == "rollout"
        assert {"name": "MARK", "value": "x"} in template["spec"]["containers"][0]["env"]
        slots = slots_of(found[name]["rayStartParams"]["resources"])
        assert slots == {"penstock-rollout": 1000 * int(found[name]["rayStartParams"]["num-cpus"])}
    spot, large = found["rollout-spot"], found["rollout-h200"]
    assert spot["template"]["spec"]["nodeSelector"] == {"gpu": "h100", "pool": "spot"}
    assert spot["template"]["spec"]["tolerations"][0]["key"] == "spot"
    assert large["template"]["spec"]["nodeSelector"] == {"gpu": "h100"}
    assert (spot["minReplicas"], spot["maxReplicas"], spot["priority"]) == (0, 8, 10)
    assert (large["minReplicas"], large["maxReplicas"]) == (1, 2)
    assert large["rayStartParams"]["num-gpus"] == "8"
    assert "priority" not in found["rollout-gpu"]


def slots_of(resources: str) -> dict[str, int]:
    return dict(json.loads(resources.strip("'")))


@needs_crds
def test_kuberay_accepts_several_groups() -> None:
    cluster = render(GROUPED).cluster.document
    assert refusals(cluster) == []
    assert custom_errors(cluster) == []


def test_the_limits_have_every_group() -> None:
    text = render(GROUPED).one("ConfigMap", name=f"{FULLNAME}-bounds").at("data", "bounds.json")
    assert json.loads(text)["rollout"] == {
        "pods": 4,
        "cpus": 8,
        "gpus": 1,
        "gpu_memory_gib": 80,
        "groups": [
            {"pods": 8, "cpus": 8, "gpus": 1, "gpu_memory_gib": 80},
            {"pods": 2, "cpus": 64, "gpus": 8, "gpu_memory_gib": 141},
        ],
    }
    limits = ClusterLimits.model_validate_json(text)
    assert limits.rollout.all_pods == 14
    assert limits.rollout.most(ResourceRequest(8, 1)) == 4 + 8 + 2 * 8
    assert limits.rollout.least_gpu_memory_gib == 80
    assert limits.verifier.all_pods == 7
    assert "groups" not in json.loads(text)["learner"]


REPLICA = {"penstock-rollout": 1.0, "CPU": 8.0, "GPU": 1.0}


def test_the_autoscaler_prefers_the_group_with_priority() -> None:
    cluster = render(GROUPED.but({"rollout": {"groups": [SPOT]}})).cluster.document
    minimum = {"cpu": 1, "verifier": 1}
    assert pods_added(cluster) == minimum
    assert pods_added(cluster, REPLICA) == minimum | {"rollout-spot": 1}
    assert pods_added(cluster, *[REPLICA] * 10) == minimum | {"rollout-spot": 8, "rollout-gpu": 2}


def test_the_autoscaler_prefers_the_pod_that_it_fills() -> None:
    """Ray compares how completely a pod would be used, and only then priorities."""
    cluster = render(GROUPED).cluster.document
    minimum = {"cpu": 1, "verifier": 1, "rollout-h200": 1}
    assert pods_added(cluster, *[REPLICA] * 8) == minimum, "they fit into the pod that runs at all times"
    assert pods_added(cluster, *[REPLICA] * 12) == minimum | {"rollout-spot": 4}
    assert pods_added(cluster, *[REPLICA] * 16) == minimum | {"rollout-h200": 2}
    wide = {"penstock-rollout": 1.0, "CPU": 8.0, "GPU": 4.0}
    assert pods_added(cluster, *[wide] * 3)["rollout-h200"] == 2, "no other group has four GPUs in a pod"


@each("cpus", [1, 4])
def test_cpu_pods_grow_when_they_are_full(cpus: int) -> None:
    """Samplers request no CPUs of Ray, because a laptop has none to spare; a pod takes a number of them instead."""
    cluster = render(DEFAULTS.but({"cpu": {"cpus": cpus, "maxReplicas": 3}})).cluster.document
    sampler = {"penstock-cpu": 1.0}
    full = int(cpus / SHARE_OF_CPU_POD) + 1
    assert pods_added(cluster, *[sampler] * full)["cpu"] == 1
    assert pods_added(cluster, *[sampler] * (full + 1))["cpu"] == 2
    assert pods_added(cluster, *[sampler] * (3 * full))["cpu"] == 3


def test_a_fraction_of_a_gpu_shares_one_pod() -> None:
    cluster = render(DEFAULTS).cluster.document
    half = {"penstock-rollout": 1.0, "CPU": 2.0, "GPU": 0.5}
    assert pods_added(cluster, *[half] * 4)["rollout-gpu"] == 2


def test_one_budget_covers_all_groups_of_a_role() -> None:
    rendering = render(GROUPED)
    (budget,) = rendering.all("PodDisruptionBudget", "rollout")
    wanted = budget.at("spec", "selector", "matchLabels")
    covered = [name for name, group in groups(rendering).items() if wanted.items() <= labels(group).items()]
    assert covered == ["rollout-gpu", "rollout-spot", "rollout-h200"]
    assert render(GROUPED.but({"rollout": {"minAvailable": 14}})).has("PodDisruptionBudget", "rollout")
    with pytest.raises(HelmError, match=r"rollout\.minAvailable: 15 is not valid: expected at most .*\(14\)"):
        template(GROUPED.but({"rollout": {"minAvailable": 15}}))


def labels(group: Document) -> dict[str, str]:
    return dict(group["template"]["metadata"]["labels"])


@each(
    "values, words",
    [
        ({"rollout": {"groups": [SPOT, SPOT]}}, ("rollout.groups[1].name", '"spot"', "unique")),
        ({"rollout": {"groups": [{**SPOT, "name": "gpu"}]}}, ("rollout.groups[0].name", "rollout-gpu")),
        ({"verifier": {"groups": [{**SPOT, "name": "code"}]}}, ("verifier.groups[0].name", "verifier-code")),
        ({"verifier": {"groups": [{"name": "a", "maxReplicas": 1, "gpus": 1}]}}, ("verifier.groups.0.gpus", "0")),
        (
            {"verifier": {"groups": [{"name": "a", "maxReplicas": 1, "gpuMemoryGiB": 80}]}},
            ("verifier.groups.0.gpuMemoryGiB", "null"),
        ),
        ({"rollout": {"groups": [{"maxReplicas": 1}]}}, ("rollout.groups.0", "name is required")),
        ({"rollout": {"groups": [{"name": "a"}]}}, ("rollout.groups.0", "maxReplicas is required")),
        ({"rollout": {"groups": [{**SPOT, "name": "Spot"}]}}, ("rollout.groups.0.name", "pattern")),
        ({"rollout": {"groups": [{**SPOT, "minAvailable": 1}]}}, ("rollout.groups.0", "minAvailable is not allowed")),
        ({"rollout": {"groups": [{**SPOT, "minReplicas": 9}]}}, ("rollout.groups[0].minReplicas: 9 is not valid",)),
        ({"rollout": {"groups": [{**SPOT, "memory": "1Gi"}]}}, ("rollout.groups[0].shmSize: 8Gi is not valid",)),
        ({"cpu": {"groups": []}}, ("cpu", "groups is not allowed")),
        ({"rollout": {"priority": -1}}, ("rollout.priority", "greater than or equal to 0")),
    ],
)
def test_a_wrong_group_is_one_clear_line(values: Document, words: tuple[str, ...]) -> None:
    with pytest.raises(HelmError) as refused:
        template(NEW_SHARED_CLAIM.but(values))
    assert [word for word in words if word not in str(refused.value)] == [], refused.value


def test_groups_on_other_nodes_cannot_share_one_volume() -> None:
    with pytest.raises(HelmError, match=r"rollout\.groups\[0\]\.nodeSelector: pool = \"spot\" is not valid"):
        template(DEFAULTS.but({"rollout": {"nodeSelector": {"pool": "a"}, "groups": [SPOT]}}))


@each("disruptions, most, expected", [("block", 8, 8), ("allow", 8, None), ("block", 1, 1)])
def test_all_or_none_of_the_learners_pods_may_be_evicted(disruptions: str, most: int, expected: int | None) -> None:
    """One evicted pod stops all ranks: a budget that keeps one of eight would let a drain stop a run seven times."""
    case = DEFAULTS.but({"learner": {"disruptions": disruptions, "maxReplicas": most}})
    budgets = render(case).all("PodDisruptionBudget", "learner")
    assert [budget.at("spec", "minAvailable") for budget in budgets] == ([] if expected is None else [expected])


@each("own, blocked", [({"minAvailable": 0}, False), ({"minAvailable": 1}, True), ({"minAvailable": None}, True)])
def test_the_previous_charts_value_still_allows_evictions(own: Document, blocked: bool) -> None:
    """`helm upgrade --reuse-values` has no `disruptions`. Beside `block`, 0 is refused: both cannot hold."""
    case: Case = DEFAULTS.but({section("learner"): {**own, "disruptions": None}})
    assert render(case).has("PodDisruptionBudget", "learner") is blocked
