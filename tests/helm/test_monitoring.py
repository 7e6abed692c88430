"""Tests that rules, dashboards and monitors reach Prometheus and Grafana unchanged.

Must not check expressions; tests/observability does, with a real Prometheus.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tests.harness.each import each
from tests.helm.cases import CASES, DEFAULTS, EVERYTHING, GROUPS, MONITORED
from tests.helm.network import matches
from tests.helm.rendering import CHART, FULLNAME, NAMESPACE, RELEASE, ROOT, Case, Document, load_all, render

RULES = sorted((CHART / "files" / "rules").glob("*.yaml"))
DASHBOARDS = sorted((CHART / "files" / "dashboards").glob("*.json"))
LARGEST = 1_048_576 - 262_144
"""A ConfigMap holds 1 MiB; `kubectl apply` keeps a second copy in an annotation, which holds 256 KiB."""
SEVERITIES = {"critical", "warning", "info"}


def rules_of(groups: list[Document]) -> list[Document]:
    return [rule for group in groups for rule in group["rules"]]


def test_there_are_rules_and_dashboards_to_ship() -> None:
    assert RULES
    assert len(DASHBOARDS) == 5, "run overview, fleet, learner, data plane, verifier"


def test_every_rule_file_is_shipped_with_its_texts() -> None:
    """Helm must not expand Prometheus' templates, which use braces too. Expressions are scoped to the release."""
    shipped = {rule.name: rule.at("spec", "groups") for rule in render(MONITORED).all("PrometheusRule")}
    assert set(shipped) == {f"{FULLNAME}-{path.stem}" for path in RULES}
    for path in RULES:
        groups = load_all(path.read_text(encoding="utf-8"))[0]["groups"]
        assert unscoped(shipped[f"{FULLNAME}-{path.stem}"]) == unscoped(groups), path.name


def unscoped(groups: list[Document]) -> Any:
    """A copy without the expressions, and without the runbooks' addresses, which the values can replace."""
    copy = json.loads(re.sub(r'"runbook_url": "[^"]*/', '"runbook_url": "', json.dumps(groups)))
    for rule in rules_of(copy):
        rule["expr"] = rule["expr"] and ""
    return copy


def test_every_target_has_the_labels_of_its_release() -> None:
    rendering = render(MONITORED)
    scraped = [
        rendering.one("ServiceMonitor").at("spec", "endpoints", 0),
        rendering.one("ScrapeConfig").at("spec"),
        rendering.one("PodMonitor").at("spec", "podMetricsEndpoints", 0),
    ]
    for part in scraped:
        labels = {rule["targetLabel"]: rule.get("replacement") for rule in part["relabelings"] if "targetLabel" in rule}
        assert (labels["namespace"], labels["release"]) == (NAMESPACE, RELEASE)


def test_a_release_named_like_a_number_stays_text() -> None:
    rendering = render(MONITORED.but({"fullnameOverride": "x"}).with_arguments("--namespace", "123"))
    rules = rendering.one("PodMonitor").at("spec", "podMetricsEndpoints", 0, "relabelings")
    assert "123" in [rule.get("replacement") for rule in rules]


def test_ray_is_read_at_the_port_of_every_head_and_worker() -> None:
    rendering = render(MONITORED)
    monitor = rendering.one("PodMonitor")
    [port] = [endpoint["port"] for endpoint in monitor.at("spec", "podMetricsEndpoints")]
    selected = [pod for pod in rendering.pods if matches(monitor.at("spec", "selector"), pod.labels)]
    assert {pod.component for pod in selected} == set(GROUPS)
    for pod in selected:
        assert [ports[port] for ports in (container.ports for container in pod.containers) if port in ports] == [8080]


@each("base", ["https://example.org/runbooks", "https://example.org/a/b"])
def test_every_alert_links_to_its_own_runbook(base: str) -> None:
    rendering = render(MONITORED.but({"metrics": {"rules": {"runbooks": base}}}))
    areas = {page.stem: page.parent.name for page in (ROOT / "docs/operations/runbooks").glob("*/*.md")}
    alerts = [
        rule
        for document in rendering.all("PrometheusRule")
        for rule in rules_of(document.at("spec", "groups"))
        if "alert" in rule
    ]
    assert alerts
    for rule in alerts:
        assert rule["annotations"]["runbook_url"] == f"{base}/{areas[rule['alert']]}/{rule['alert']}.md"
        assert rule["labels"]["severity"] in SEVERITIES, rule["alert"]


@each("ray, left_out", [({"suspend": True}, {"ControllerAbsent"}), ({"suspend": False}, set()), ({}, set())])
def test_a_suspended_cluster_has_no_alert_on_its_controller(ray: Document, left_out: set[str]) -> None:
    shipped = {
        rule["alert"]
        for document in render(MONITORED.but({"ray": ray})).all("PrometheusRule")
        for rule in rules_of(document.at("spec", "groups"))
        if "alert" in rule
    }
    assert {page.stem for page in (ROOT / "docs/operations/runbooks").glob("*/*.md")} - shipped == left_out


def test_names_of_alerts_and_groups_are_unique() -> None:
    groups = [group for rule in render(MONITORED).all("PrometheusRule") for group in rule.at("spec", "groups")]
    names = [group["name"] for group in groups]
    alerts = [rule["alert"] for rule in rules_of(groups) if "alert" in rule]
    assert len(names) == len(set(names))
    assert len(alerts) == len(set(alerts))


def test_every_dashboard_is_shipped_where_grafana_looks() -> None:
    maps = [
        config_map
        for config_map in render(MONITORED).all("ConfigMap")
        if config_map.labels.get("grafana_dashboard") == "1"
    ]
    shipped = {key: text for config_map in maps for key, text in config_map.at("data").items()}
    assert set(shipped) == {path.name for path in DASHBOARDS}
    for path in DASHBOARDS:
        assert json.loads(shipped[path.name]) == json.loads(path.read_text(encoding="utf-8")), path.name
        assert len(shipped[path.name]) < LARGEST, path.name
    assert all(config_map.annotations["folder"] == "Penstock" for config_map in maps)
    assert all(
        "grafana_dashboard" not in config_map.labels
        for config_map in render(MONITORED).all("ConfigMap")
        if config_map not in maps
    )


def test_monitors_have_the_given_labels_and_intervals() -> None:
    rendering = render(MONITORED)
    for kind in ("ServiceMonitor", "ScrapeConfig", "PodMonitor", "PrometheusRule"):
        assert all(manifest.labels["release"] == "watch" for manifest in rendering.all(kind)), kind
    assert rendering.one("ServiceMonitor").at("spec", "endpoints", 0, "interval") == "20s"
    assert rendering.one("ScrapeConfig").at("spec", "scrapeInterval") == "25s"
    assert rendering.one("PodMonitor").at("spec", "podMetricsEndpoints", 0, "interval") == "35s"


@each("case", [case for case in CASES if case not in (MONITORED, EVERYTHING)])
def test_nothing_needs_prometheus_operator_unless_enabled(case: Case) -> None:
    assert [
        str(manifest) for manifest in render(case).manifests if manifest.api_version.startswith("monitoring.coreos.com")
    ] == []


@each("part", ["serviceMonitor", "scrapeConfig", "podMonitor", "rules", "dashboards"])
def test_each_part_is_enabled_alone(part: str) -> None:
    kinds = {
        "serviceMonitor": "ServiceMonitor",
        "scrapeConfig": "ScrapeConfig",
        "podMonitor": "PodMonitor",
        "rules": "PrometheusRule",
        "dashboards": "ConfigMap",
    }
    rendering = render(DEFAULTS.but({"metrics": {part: {"enabled": True}}}))
    added = {str(manifest) for manifest in rendering.manifests} - {
        str(manifest) for manifest in render(DEFAULTS).manifests
    }
    assert added
    assert {name.split("/")[0] for name in added} == {kinds[part]}
