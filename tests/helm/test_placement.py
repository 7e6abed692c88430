"""Tests that placement, priorities, variables and annotations reach exactly the pods that the values name.

Must not check resources; test_security.py does.
"""

from __future__ import annotations

from tests.harness.each import each
from tests.helm.cases import (
    CASES,
    DEFAULTS,
    DRIVERS,
    GROUPS,
    NEW_SHARED_CLAIM,
    OBJECT_STORE_BY_ROLE,
    OF_RAY,
    PLACED,
    PLACEMENT,
    RDMA,
    ROLES,
    section,
)
from tests.helm.rendering import Case, Document, render


@each("component", [*PLACED, "redis"])
def test_each_component_is_placed_as_the_values_say(component: str) -> None:
    pod = render(PLACEMENT).pod(component)
    own = {"key": "pool", "operator": "Equal", "value": component, "effect": "NoSchedule"}
    of_ray = component in GROUPS
    assert pod.spec["nodeSelector"] == {"pool": component} | ({"zone": "a"} if of_ray else {})
    expected = [own, *([OF_RAY] if of_ray else []), *([DRIVERS] if component in ("rollout", "learner") else [])]
    assert sorted(pod.spec["tolerations"], key=str) == sorted(expected, key=str)
    assert pod.spec["priorityClassName"] == f"priority-{component}"
    if component != "redis":
        keys = [rule["topologyKey"] for rule in pod.spec["topologySpreadConstraints"]]
        assert keys == [f"topology.example/{component}"]


GPU_LABEL = {"nvidia.com/gpu.present": "true"}
GUIDE = [Case(name, files=(f"../../deploy/values/{name}.yaml",)) for name in ("qwen2.5-7b", "qwen2.5-32b")]


def tolerates(tolerations: list[Document], taint: str) -> bool:
    """Whether a pod tolerates a NoSchedule taint."""
    return any(
        toleration.get("key") in (None, taint)
        and toleration.get("operator") == "Exists"
        and toleration.get("effect") in (None, "NoSchedule")
        for toleration in tolerations
    )


def bound_to_gpus(case: Case) -> set[str]:
    """The components that can only run on GPU nodes: they request GPUs, or a selector requires such a node."""
    return {
        pod.component
        for pod in render(case).lasting_pods
        if "nvidia.com/gpu" in pod.main.document["resources"]["limits"]
        or any(label.startswith("nvidia.com/") for label in pod.spec.get("nodeSelector", {}))
    }


@each("case", GUIDE)
def test_pods_bound_to_gpu_nodes_tolerate_their_taint(case: Case) -> None:
    bound = bound_to_gpus(case)
    assert {"rollout", "learner"} <= bound
    pods = render(case).lasting_pods
    assert [
        pod
        for pod in pods
        if pod.component in bound and not tolerates(pod.spec.get("tolerations", []), "nvidia.com/gpu")
    ] == []


@each(
    "values, tolerating",
    [
        ({"ray": {"nodeSelector": GPU_LABEL}}, set(GROUPS)),
        ({"ray": {"nodeSelector": GPU_LABEL}, "rollout": {"nodeSelector": {"pool": "a"}}}, set(GROUPS)),
        ({"ray": {"nodeSelector": {"kubernetes.io/hostname": "box"}}}, set(GROUPS)),
        ({"verifier": {"nodeSelector": {"accelerator": "h100"}}}, {"rollout", "learner", "verifier"}),
        (
            {"rollout": {"nodeSelector": {"pool": "a"}}, "verifier": {"nodeSelector": {"pool": "b"}}},
            {"rollout", "learner"},
        ),
        ({}, {"rollout", "learner"}),
        ({"ray": {"nodeSelector": GPU_LABEL}, "rollout": {"gpus": 0}, "learner": {"gpus": 0}}, set()),
    ],
)
def test_which_pods_tolerate_the_taint_of_gpu_nodes(values: Document, tolerating: set[str]) -> None:
    rendering = render(NEW_SHARED_CLAIM.but(values))
    assert {
        pod.component for pod in rendering.lasting_pods if tolerates(pod.spec.get("tolerations", []), "nvidia.com/gpu")
    } == tolerating


def test_pods_with_a_gpu_slice_tolerate_the_gpu_taint() -> None:
    rendering = render(DEFAULTS.but({"ray": {"gpuResource": "nvidia.com/mig-1g.10gb"}}))
    tolerations = rendering.pod("rollout").spec["tolerations"]
    assert [tolerates(tolerations, f"nvidia.com/{name}") for name in ("gpu", "mig-1g.10gb", "other")] == [
        True,
        True,
        False,
    ]


@each("component", GROUPS)
def test_variables_and_annotations_go_to_one_group(component: str) -> None:
    rendering = render(
        DEFAULTS.but({section(component): {"env": [{"name": "MARK", "value": "x"}], "annotations": {"mark": "x"}}})
    )
    assert {pod.component for pod in rendering.lasting_pods if "MARK" in pod.main.env} == {component}
    assert {pod.component for pod in rendering.lasting_pods if "mark" in pod.annotations} == {component}


def test_variables_of_all_ray_pods_go_to_all_ray_pods() -> None:
    rendering = render(DEFAULTS.but({"ray": {"env": [{"name": "MARK", "value": "x"}]}}))
    assert {pod.component for pod in rendering.lasting_pods if "MARK" in pod.main.env} == set(GROUPS)


def test_rdma_goes_to_the_groups_that_the_values_name() -> None:
    rendering = render(RDMA)
    for role in ROLES:
        pod, has_rdma = rendering.pod(role), role in ("rollout", "learner")
        assert ("vpc.amazonaws.com/efa" in pod.main.document["resources"]["limits"]) is has_rdma
        assert (pod.spec.get("runtimeClassName") == "nvidia") is has_rdma
        assert ("NCCL_SOCKET_IFNAME" in pod.main.env) is has_rdma


def test_the_accounts_role_and_label_reach_head_and_workers() -> None:
    rendering = render(OBJECT_STORE_BY_ROLE)
    accounts = {
        account.name
        for account in rendering.all("ServiceAccount")
        if "eks.amazonaws.com/role-arn" in account.annotations
    }
    assert accounts
    for component in ("head", "cpu", "rollout", "learner"):
        pod = rendering.pod(component)
        assert pod.spec["serviceAccountName"] in accounts, component
        assert pod.labels["azure.workload.identity/use"] == "true", component


@each("case", CASES)
def test_pods_end_in_order_before_they_are_killed(case: Case) -> None:
    for pod in render(case).lasting_pods:
        if pod.group:
            assert pod.spec["terminationGracePeriodSeconds"] >= 90, f"{pod}: draining takes up to 60 s"
        elif pod.component == "redis":
            assert pod.spec.get("terminationGracePeriodSeconds", 30) >= 30, pod


@each("case", CASES)
def test_replicas_of_the_api_are_spread_over_nodes(case: Case) -> None:
    rules = render(case).pod("api").spec["topologySpreadConstraints"]
    assert [rule["topologyKey"] for rule in rules] == [
        "topology.example/api" if case is PLACEMENT else "kubernetes.io/hostname"
    ]
    assert rules[0]["whenUnsatisfiable"] == "ScheduleAnyway"


def test_labels_for_every_object_reach_every_object() -> None:
    rendering = render(DEFAULTS.but({"commonLabels": {"team": "red"}}))
    assert [str(manifest) for manifest in rendering.manifests if manifest.labels.get("team") != "red"] == []
