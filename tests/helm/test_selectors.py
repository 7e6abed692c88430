"""Tests that selectors match pods, and only the intended ones.

Must not check ports; test_ports.py does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.each import each
from tests.helm.cases import CASES, DEFAULTS, EVERYTHING, MONITORED
from tests.helm.network import matches
from tests.helm.rendering import (
    COMPONENT,
    NAMESPACE,
    Case,
    HelmError,
    Manifest,
    PodTemplate,
    Rendering,
    render,
    template,
)

INSTANCE, NAME = "app.kubernetes.io/instance", "app.kubernetes.io/name"


def selected(rendering: Rendering, selector: dict[str, Any]) -> set[PodTemplate]:
    """The pod templates that a label selector matches, hooks excluded."""
    return {pod for pod in rendering.lasting_pods if matches(selector, pod.labels)}


def components(pods: set[PodTemplate]) -> set[str]:
    return {pod.component for pod in pods}


@each("case", CASES)
def test_a_workload_selects_its_own_pods_and_no_others(case: Case) -> None:
    rendering = render(case)
    for kind in ("Deployment", "StatefulSet"):
        for workload in rendering.all(kind):
            found = {pod for pod in rendering.pods if matches(workload.at("spec", "selector"), pod.labels)}
            assert {pod.owner for pod in found} == {workload}, f"{workload} selects {found}"


@each("case", CASES)
def test_a_service_reaches_exactly_its_component(case: Case) -> None:
    rendering = render(case)
    for service in rendering.all("Service"):
        found = components(selected(rendering, {"matchLabels": service.at("spec", "selector")}))
        assert found == {service.component}, f"{service} of {service.component!r} reaches {found}"
        assert service.at("spec", "selector").get(INSTANCE), f"{service} would reach another release's pods"


@each("case", CASES)
def test_a_disruption_budget_still_allows_a_drain(case: Case) -> None:
    rendering = render(case)
    for budget in rendering.all("PodDisruptionBudget"):
        found = selected(rendering, budget.at("spec", "selector"))
        assert components(found) == {budget.component}, f"{budget} covers {found}"
        assert budget.at("spec", "selector", "matchLabels").get(INSTANCE), budget
        (most,) = {most_pods(pod) for pod in found}
        spec = {key: budget.at("spec", key) for key in ("minAvailable", "maxUnavailable") if budget.at("spec", key)}
        if budget.component in ("api", "functions"):
            assert spec == {"maxUnavailable": 1}
        else:
            # A single pod is kept until an operator deletes it; of several pods one may be evicted at any time.
            assert spec == {"minAvailable": 1}, f"{budget}: none of {most} may be evicted"
    held = {budget.component for budget in rendering.all("PodDisruptionBudget")}
    of_case = {kind.component for kind in (*rendering.all("StatefulSet"), *rendering.all("Deployment", "functions"))}
    assert held == {"api", "head", "rollout", "learner"} | of_case, (
        "cpu and verifier keep no state: a budget of one of one pod would block a node's drain forever"
    )


def most_pods(pod: PodTemplate) -> int:
    """The largest number of pods of one template."""
    if not pod.group:
        return int(pod.owner.at("spec", "replicas"))
    groups = {group["groupName"]: group for group in pod.owner.at("spec", "workerGroupSpecs")}
    return int(groups[pod.group]["maxReplicas"]) if pod.group in groups else 1


@each("component", ["head", "rollout"])
def test_a_budget_keeps_minavailable_at_most_all_pods(component: str) -> None:
    most = most_pods(render(DEFAULTS).pod(component))
    case = DEFAULTS.but({component: {"minAvailable": most}})
    assert render(case).one("PodDisruptionBudget", component).at("spec", "minAvailable") == most
    with pytest.raises(HelmError, match=f"{component}.minAvailable"):
        template(case.but({component: {"minAvailable": most + 1}}))


def peers(policy: Manifest) -> Iterator[dict[str, Any]]:
    for direction, side in (("ingress", "from"), ("egress", "to")):
        for rule in policy.at("spec", direction, default=None) or []:
            yield from rule.get(side) or []


@each("case", CASES)
def test_every_network_policy_names_existing_pods(case: Case) -> None:
    rendering = render(case)
    for policy in rendering.all("NetworkPolicy"):
        own = {pod for pod in rendering.pods if matches(policy.at("spec", "podSelector"), pod.labels)}
        assert own, f"{policy} selects nothing"
        for peer in peers(policy):
            if "podSelector" in peer and "namespaceSelector" not in peer:
                assert any(matches(peer["podSelector"], pod.labels) for pod in rendering.pods), (policy, peer)


@each("case", CASES)
def test_affinity_and_spread_refer_to_the_pod_itself(case: Case) -> None:
    for pod in render(case).pods:
        for rule in pod.spec.get("topologySpreadConstraints", []):
            assert matches(rule["labelSelector"], pod.labels), f"{pod} spreads pods other than itself: {rule}"


@each("case", CASES)
def test_a_service_monitor_finds_its_service(case: Case) -> None:
    rendering = render(case)
    for monitor in rendering.all("ServiceMonitor"):
        chosen = [
            service for service in rendering.all("Service") if matches(monitor.at("spec", "selector"), service.labels)
        ]
        assert {service.component for service in chosen} == {"api"}, f"{monitor} scrapes {chosen}"
        assert monitor.at("spec", "namespaceSelector", "matchNames", default=[NAMESPACE]) == [NAMESPACE], monitor
    assert rendering.has("ServiceMonitor") is (case in (MONITORED, EVERYTHING))


@each("case", CASES)
def test_labels_name_the_release_and_the_component(case: Case) -> None:
    rendering = render(case)
    for manifest in rendering.manifests:
        assert manifest.labels.get(INSTANCE) == "demo", f"{manifest} cannot be found by its release"
        assert manifest.labels.get(NAME) == "penstock", manifest
        assert manifest.labels.get("helm.sh/chart"), manifest
    for pod in rendering.pods:
        assert pod.labels.get(INSTANCE) == "demo", pod
        assert pod.labels.get(COMPONENT), pod
        # Otherwise KubeRay's value would stay, and selectors by name would miss Ray's pods.
        assert pod.labels.get(NAME) == "penstock", pod
        assert pod.owner.kind == "Pod" or "helm.sh/chart" not in pod.labels, (
            f"{pod} would restart with every new chart version"
        )
