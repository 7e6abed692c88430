"""Alert rules: promtool accepts them, and every alert fires for a faulty run and is silent for a healthy one."""

import re
import subprocess

import pytest
import yaml

from services.metrics import families
from tests.harness.programs import needed
from tests.observability.external import EXTERNAL
from tests.observability.reading import (
    CASES,
    ROOT,
    RULES,
    SUFFIXES,
    alerts,
    dashboard_expressions,
    everything_named,
    exported,
    matchers_of,
    metrics_of,
    recorded,
    rules,
)

SEVERITIES = {"info", "warning", "critical"}
PAGES = {
    "CheckpointFailing",
    "ControllerAbsent",
    "DiskFull",
    "GroupsDoNotReconcile",
    "RedisDown",
    "RedisVolumeFilling",
    "RunFailed",
    "RunStarved",
    "RunUnjudged",
    "RunWithoutProgress",
}
"""The alerts that wake a person: work is lost, or a run stands still, until that person acts. All others can wait."""
STANDS_STILL = {"RunFailed", "RunStarved", "RunUnjudged", "RunWithoutProgress", "DiskFull", "RedisDown"}
"""Those of a run that goes on only when a person acts, and whose GPUs do nothing meanwhile."""
WITH_A_PAGE = {"api", "learner", "rollout", "sampler", "tracker", "verifier"}
"""The values of the label service that a target has."""
BOTH_WINDOWS = re.compile(r"\b(rate|increase|avg_over_time|delta)\(|:rate\d")
WINDOW = re.compile(r"(?<=\[)\w+(?=\])|(?<=:rate)\w+")
ON_ONE_EVENT = {
    "DeadLetters",
    "PayloadsDamaged",
    "BatchDamaged",
    "CheckpointDamaged",
    "JudgingUnconfined",
    "GpuErrors",
}
"""Alerts that fire on a single event: a second window would only hide it."""


@pytest.fixture(scope="module")
def promtool():
    return needed("promtool")


def run(promtool, *arguments):
    done = subprocess.run([promtool, *arguments], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_rules_and_scrape_configuration(promtool):
    run(promtool, "check", "rules", *sorted(RULES.glob("*.yaml")))
    run(promtool, "check", "config", ROOT / "deploy" / "observability" / "prometheus.yml")


def test_every_rule_file_has_cases():
    assert {path.name for path in CASES.glob("*.yaml")} == {path.name for path in RULES.glob("*.yaml")}


@pytest.mark.parametrize("name", sorted(path.name for path in CASES.glob("*.yaml")))
def test_alerts_fire_and_are_silent(promtool, name):
    run(promtool, "test", "rules", CASES / name)


def test_every_alert_is_tested_firing_and_silent():
    fires, quiet = set(), set()
    for path in CASES.glob("*.yaml"):
        for case in yaml.load(path.read_text(), Loader=yaml.CSafeLoader)["tests"]:
            for moment in case["alert_rule_test"]:
                (fires if moment["exp_alerts"] else quiet).add(moment["alertname"])
    assert fires == quiet == set(alerts())


def test_every_alert_has_a_severity_texts_and_a_runbook():
    for name, rule in alerts().items():
        assert rule["labels"]["severity"] in SEVERITIES, name
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}, name
        folder = f"docs/operations/runbooks/{rule['file'].removesuffix('.yaml')}"
        assert rule["annotations"]["runbook_url"] == f"{folder}/{name}.md"
        by_run = "by (namespace, release, run" in rule["expr"] or "run:penstock" in rule["expr"]
        assert ("$labels.run" in rule["annotations"]["summary"]) == by_run, name


def test_few_alerts_page_and_none_on_learning_does():
    paging = {name: rule for name, rule in alerts().items() if rule["labels"]["severity"] == "critical"}
    assert set(paging) <= PAGES
    assert PAGES - set(paging) <= {"RedisVolumeFilling"}
    assert len(PAGES) <= 10
    assert set(paging) >= STANDS_STILL, "one severity for one reason"
    assert not any(rule["file"] == "learning.yaml" for rule in paging.values())


def test_the_page_lists_the_alerts_that_page():
    text = (ROOT / "docs" / "operations" / "observability.md").read_text()
    part = text.split("### Which alerts page\n")[1].split("\n## ")[0]
    listed = dict(re.findall(r"^\| \[?`?(\w+)`?\]?[^|]*\| (critical|warning|info) \|", part, re.M))
    assert {name for name, severity in listed.items() if severity == "critical"} == PAGES & set(alerts())
    assert len(listed) == len(PAGES & set(alerts()))


def test_alerts_on_rates_use_a_short_and_a_long_window():
    checked = {name for name, rule in alerts().items() if BOTH_WINDOWS.search(rule["expr"])} - ON_ONE_EVENT
    assert "UnknownVerdictRatioHigh" in checked, "it reads recorded rates"
    for name in checked:
        assert len(set(WINDOW.findall(alerts()[name]["expr"]))) >= 2, name


def test_external_metrics_are_read_and_not_exported():
    assert not set(EXTERNAL) & (exported() | recorded())
    assert set(EXTERNAL) <= set(everything_named()), "no rule or dashboard reads it"


def test_rules_read_only_what_is_exported_or_recorded():
    known = exported() | recorded() | set(EXTERNAL)
    for rule in rules():
        assert metrics_of(rule["expr"]) <= known, rule


def test_matchers_of_a_target_name_a_service_that_has_a_page():
    """The controller runs within the API's process, whose target has the service api."""
    own = {f"{family._name}{suffix}": family for family in families() for suffix in SUFFIXES[family._type]}
    expressions = [(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]
    checked = set()
    for where, expression in [*expressions, *dashboard_expressions()]:
        for metric, label, value in matchers_of(expression):
            if label == "service" and (metric == "up" or (metric in own and "service" not in own[metric]._labelnames)):
                assert value == ".*" or set(value.split("|")) <= WITH_A_PAGE, f"{where}: {metric}, service {value}"
                checked.add(metric)
    assert {"up", "penstock_redis_outage_seconds"} <= checked
