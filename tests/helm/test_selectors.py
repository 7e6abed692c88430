"""Owns the test that selectors find pods, and only the pods they are meant for.

Must not check ports; test_ports.py does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helm.cases import CASES
from tests.helm.network import matches
from tests.helm.rendering import COMPONENT, NAMESPACE, Case, Manifest, PodTemplate, Rendering, render

INSTANCE, NAME = "app.kubernetes.io/instance", "app.kubernetes.io/name"


def selected(rendering: Rendering, selector: dict[str, Any]) -> set[PodTemplate]:
    """The lasting pod templates that a label selector selects."""
    return {pod for pod in rendering.lasting_pods if matches(selector, pod.labels)}


def components(pods: set[PodTemplate]) -> set[str]:
    return {pod.component for pod in pods}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_workload_selects_its_own_pods_and_no_others(case: Case) -> None:
    rendering = render(case)
    for kind in ("Deployment", "StatefulSet"):
        for workload in rendering.all(kind):
            found = {pod for pod in rendering.pods if matches(workload.at("spec", "selector"), pod.labels)}
            assert {pod.owner for pod in found} == {workload}, f"{workload} selects {found}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_service_reaches_exactly_its_component(case: Case) -> None:
    rendering = render(case)
    for service in rendering.all("Service"):
        found = components(selected(rendering, {"matchLabels": service.at("spec", "selector")}))
        assert found == {service.component}, f"{service} of {service.component!r} reaches {found}"
        assert service.at("spec", "selector").get(INSTANCE), f"{service} would reach another release's pods"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_disruption_budget_covers_its_component_and_lets_a_node_be_drained(case: Case) -> None:
    rendering = render(case)
    for budget in rendering.all("PodDisruptionBudget"):
        found = selected(rendering, budget.at("spec", "selector"))
        assert components(found) == {budget.component}, f"{budget} covers {found}"
        assert budget.at("spec", "selector", "matchLabels").get(INSTANCE), budget
        at_least = budget.at("spec", "minAvailable")
        for pod in found:
            replicas = pod.owner.at("spec", "replicas")
            if pod.owner.kind in ("Deployment", "StatefulSet") and at_least is not None:
                # A single one may be held on purpose, until somebody sets its budget to null.
                assert replicas in (1, *range(at_least + 1, replicas + 1)), (
                    f"{budget}: of {replicas} none may be evicted"
                )


def peers(policy: Manifest) -> Iterator[dict[str, Any]]:
    for direction, side in (("ingress", "from"), ("egress", "to")):
        for rule in policy.at("spec", direction, default=None) or []:
            yield from rule.get(side) or []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_network_policy_applies_to_something_and_names_pods_that_exist(case: Case) -> None:
    rendering = render(case)
    for policy in rendering.all("NetworkPolicy"):
        own = {pod for pod in rendering.pods if matches(policy.at("spec", "podSelector"), pod.labels)}
        assert own, f"{policy} selects nothing"
        for peer in peers(policy):
            if "podSelector" in peer and "namespaceSelector" not in peer:
                assert any(matches(peer["podSelector"], pod.labels) for pod in rendering.pods), (policy, peer)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_affinity_and_spread_speak_of_the_pod_itself(case: Case) -> None:
    for pod in render(case).pods:
        for rule in pod.spec.get("topologySpreadConstraints", []):
            assert matches(rule["labelSelector"], pod.labels), f"{pod} spreads others than itself: {rule}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_service_monitor_finds_a_service_and_a_pod_monitor_finds_pods(case: Case) -> None:
    rendering = render(case)
    for monitor in rendering.all("ServiceMonitor"):
        chosen = [one for one in rendering.all("Service") if matches(monitor.at("spec", "selector"), one.labels)]
        assert {one.component for one in chosen} == {"api"}, f"{monitor} scrapes {chosen}"
    for monitor in rendering.all("PodMonitor"):
        assert selected(rendering, monitor.at("spec", "selector")), monitor
    for monitor in [*rendering.all("ServiceMonitor"), *rendering.all("PodMonitor")]:
        assert monitor.at("spec", "namespaceSelector", "matchNames", default=[NAMESPACE]) == [NAMESPACE], monitor


@pytest.mark.parametrize("case", CASES, ids=str)
def test_objects_and_pods_bear_the_release_and_their_component(case: Case) -> None:
    rendering = render(case)
    for one in rendering.manifests:
        assert one.labels.get(INSTANCE) == "demo", f"{one} cannot be found by its release"
        assert one.labels.get(NAME) == "penstock", one
        assert one.labels.get("helm.sh/chart"), one
    for pod in rendering.pods:
        assert pod.labels.get(INSTANCE) == "demo", pod
        assert pod.labels.get(COMPONENT), pod
        # KubeRay's own value would otherwise stand, and selectors on the name would miss Ray's pods.
        assert pod.labels.get(NAME) == "penstock", pod
        assert pod.owner.kind == "Pod" or "helm.sh/chart" not in pod.labels, (
            f"{pod} would restart with every new chart version"
        )
