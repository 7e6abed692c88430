"""Tests that an invalid value is rejected before any object is created, with its path and what is expected.

Must not check what good values render.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.each import each
from tests.helm.cases import DEFAULTS, DIGEST, GROUPS, INGRESS, REWARDS, ROLES, section
from tests.helm.refused import REFUSED, Refused, Set, together, values_of
from tests.helm.rendering import CHART, NAMESPACE, Case, HelmError, helm, lint, render, template, template_as


def arguments(settings: Set) -> list[str]:
    flags = {"json:": "--set-json", "text:": "--set-string"}
    found: list[str] = []
    for setting in settings:
        prefix = next((prefix for prefix in flags if setting.startswith(prefix)), "")
        found += [flags.get(prefix, "--set"), setting.removeprefix(prefix)]
    return found


def message_of(*cases: Refused) -> str:
    """What Helm says of the values of all these cases at once."""
    settings = tuple(setting for case in cases for setting in case[0])
    with pytest.raises(HelmError) as refused:
        template(DEFAULTS.with_arguments(*arguments(settings)))
    message = str(refused.value)
    assert "nil pointer" not in message
    assert "runtime error" not in message
    return message


def unmentioned(cases: list[Refused]) -> Iterator[Refused]:
    """Those of the cases of which Helm says nothing, when it is given the values of all: no line has all their words.

    It shows no rule of the chart that values break while others break the schema.
    """
    lines = message_of(*cases).splitlines()
    for case in cases:
        sections = {path.partition(".")[0] for path in values_of(case)}
        if not any(all(word in line for word in case[1]) and any(each in line for each in sections) for line in lines):
            yield case


def test_wrong_values_are_rejected_with_their_paths() -> None:
    """Many at a time, for Helm names all; first those of the schema, then those of the chart's rules, then the rest."""
    left = list(REFUSED)
    for _ in range(2):
        left = [case for joined in together(left) for case in unmentioned(joined)]
    assert len(left) < 10
    for case in left:
        check_refused(*case)


def check_refused(settings: Set, words: tuple[str, ...]) -> None:
    message = message_of((settings, words))
    assert [word for word in words if word not in message] == [], message


@pytest.mark.slow  # one at a time
@each("settings, words", REFUSED, called=lambda case: " ".join(case[0]))
def test_a_wrong_value_is_rejected_with_its_path(settings: Set, words: tuple[str, ...]) -> None:
    check_refused(settings, words)


@each("settings", [("rollout.maxReplicas=-1",), ("rolout.maxReplicas=2",), ("image.cpu.tag=latest",)])
def test_lint_rejects_a_wrong_value_too(settings: Set) -> None:
    with pytest.raises(HelmError, match="schema"):
        helm("lint", "--strict", str(CHART), *arguments(settings))


@each("role", [*GROUPS, "api", "redis", "functions"])
def test_every_component_rejects_an_unknown_key(role: str) -> None:
    with pytest.raises(HelmError, match=rf"{section(role)}.*nodeSelectors"):
        template(DEFAULTS.but({section(role): {"nodeSelectors": {"a": "b"}}}))


def test_several_errors_are_reported_at_once() -> None:
    values: dict[str, Any] = {section(role): {"minReplicas": 9, "maxReplicas": 3} for role in ROLES}
    with pytest.raises(HelmError) as refused:
        template(DEFAULTS.but(values))
    assert [role for role in ROLES if f"{section(role)}.minReplicas: 9 is not valid" not in str(refused.value)] == []


GOOD: list[dict[str, Any]] = [
    {"rollout": {"minReplicas": 4, "maxReplicas": 4}},
    {"rollout": {"maxReplicas": 1000, "gpuMemoryGiB": 79.6}, "learner": {"gpuMemoryGiB": None}},
    {"rollout": {"requests": {"cpu": "7500m", "memory": "1.5Gi"}}},
    {"image": {"cpu": {"tag": "1.2.3-cpu"}, "gpu": {"digest": DIGEST}}},
    {"redis": {"memory": "4Gi", "maxMemoryMiB": 3072, "persistence": {"size": "12Gi"}}},
    {"redis": {"minAvailable": None}, "head": {"minAvailable": None}, "api": {"maxUnavailable": None}},
    {"rollout": {"nodeSelector": {"pool": "gpu"}}, "learner": {"nodeSelector": {"pool": "gpu"}}},
    {"commonLabels": {"team.example/name": "red"}, "global": {"anything": True}},
    {"api": {"requests": {}}, "ray": {"gpuResource": "amd.com/gpu"}},
    {"cpu": {"requests": {"cpu": 0.5, "memory": "512Mi", "ephemeral-storage": "1Gi"}}},
    {"learner": {"extraResources": {"rdma/hca_shared_devices_a": 1, "hugepages-2Mi": "5120Mi"}, "minAvailable": 1}},
    {"rollout": {"tolerations": [{"operator": "Exists"}, {"key": "a", "effect": "NoExecute", "tolerationSeconds": 5}]}},
    {
        "ray": {
            "extraVolumes": [{"name": "data", "emptyDir": {}}],
            "extraVolumeMounts": [
                {"name": "data", "mountPath": "/data", "readOnly": True},
                {"name": "data", "mountPath": "/data2", "subPath": "x"},
            ],
        }
    },
    {
        "redis": {
            "existingSecret": "s",
            "external": {"enabled": True, "address": "h:65535"},
            "persistence": {"size": "1Gi"},
        }
    },
    {"learner": {"minAvailable": 0, "disruptions": "allow"}},
    INGRESS,
    REWARDS,
    {"verifier": {"rewardHosts": ["10.1.2.3", "a"]}, "verifierCode": {"maxReplicas": 1000}},
    {
        "verifierCode": {
            "isolation": "bubblewrap",
            "seccompProfile": {"type": "Localhost", "localhostProfile": "profiles/penstock.json"},
            "appArmorProfile": {"type": "Unconfined"},
        }
    },
    {
        "rewardFunctions": {
            "enabled": True,
            "image": "registry.example.org:5000/team/rewards@" + DIGEST,
            "egress": [{"to": [{"podSelector": {}}], "ports": [{"port": "http"}, {"port": 1, "endPort": 65535}]}],
        }
    },
]


@each("values", GOOD)
def test_values_at_the_limit_are_accepted(values: dict[str, Any]) -> None:
    assert template(DEFAULTS.but(values))


@pytest.mark.slow
@each("values", GOOD)
def test_lint_accepts_values_at_the_limit_too(values: dict[str, Any]) -> None:
    assert lint(Case("edge", values))


@each("component", ["api", "redis", "head", "rollout"])
def test_null_removes_a_disruption_budget(component: str) -> None:
    values = {component: {"maxUnavailable" if component == "api" else "minAvailable": None}}
    assert render(DEFAULTS).has("PodDisruptionBudget", component)
    assert not render(DEFAULTS.but(values)).has("PodDisruptionBudget", component)


@each("version, accepted", [("1.26.9", False), ("1.27.0", True), ("1.34.2", True), ("v1.30.1-gke.100", True)])
def test_only_supported_versions_of_kubernetes_are_accepted(version: str, accepted: bool) -> None:
    run = ("template", "demo", str(CHART), "--namespace", NAMESPACE, "--kube-version", version)
    if accepted:
        assert helm(*run)
    else:
        with pytest.raises(HelmError, match=r"requires kubeVersion: >=1\.27"):
            helm(*run)


def test_an_invalid_release_name_is_rejected() -> None:
    with pytest.raises(HelmError, match="fullnameOverride"):
        template_as("1-digit", DEFAULTS)


def names_of_other_pods() -> list[str]:
    """Names that the alerts of a release with a shorter name match, such as `penstock-head-.+` of `penstock`."""
    rules = (CHART / "files" / "rules" / "kubernetes.yaml").read_text()
    (components,) = set(re.findall(r"FULLNAME-\(([a-z|]+)\)-", rules))
    others = ["my-penstock-cpu-b", "team-redis", "pen-head-2", "team-cpu-penstock"]
    return [f"penstock-{component}" for component in components.split("|")] + others


REFUSED_NAME = r'fullnameOverride: "{0}" is not valid: .* \(now "{1}"\) .* component .*\bhead\b'


@each("name", names_of_other_pods)
def test_a_name_that_begins_the_names_of_other_pods_is_rejected(name: str) -> None:
    with pytest.raises(HelmError, match=REFUSED_NAME.format(name, name)):
        template(DEFAULTS.but({"fullnameOverride": name}))


@each("release", ["penstock-head", "my-penstock-cpu-b", "penstock-uninstall-2"])
def test_a_release_whose_own_name_does_so_is_rejected(release: str) -> None:
    with pytest.raises(HelmError, match=REFUSED_NAME.format("", release)):
        template_as(release, DEFAULTS)


@each("name", ["x", "penstock"])
def test_a_release_with_a_name_for_the_chart_is_no_exception(name: str) -> None:
    """A release of the chart's own name would count its pods, and so would one with this nameOverride."""
    for release in ("penstock-head", f"{name}-head"):
        full = release if name in release else f"{release}-{name}"
        with pytest.raises(HelmError, match=REFUSED_NAME.format("", full)):
            template_as(release, DEFAULTS.but({"nameOverride": name}))


@each("release", ["team-cpu-penstock", "my-head-penstock", "team-redis-2", "head", "api-penstock"])
def test_a_gitops_tool_still_renders_an_installed_release(release: str) -> None:
    """It calls `helm template`, for which every release is new. No name that the chart makes is the start of these."""
    assert template_as(release, DEFAULTS)


def test_an_installed_release_keeps_the_name_of_a_component() -> None:
    assert template(DEFAULTS.but({"fullnameOverride": "penstock-head"}).with_arguments("--is-upgrade"))


@each("name", ["penstock-heads", "head", "api-penstock", "penstock-overhead-2"])
def test_other_names_with_a_components_name_are_accepted(name: str) -> None:
    assert template(DEFAULTS.but({"fullnameOverride": name}))
