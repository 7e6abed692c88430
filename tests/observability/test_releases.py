"""Two releases in one Prometheus: every expression tells them apart, and each release's own rules see only itself."""

import json
import re
import subprocess

import promql_parser
import yaml

from tests.harness.each import each
from tests.harness.programs import needed
from tests.helm.cases import MONITORED, ROLES
from tests.helm.rendering import FULLNAME, NAMESPACE, RELEASE, render
from tests.observability.external import OF_KUBERNETES
from tests.observability.reading import (
    RULES,
    alerts,
    dashboard_expressions,
    dashboards,
    metrics_of,
    panels,
    rules,
    walk,
)

BOTH = {"namespace", "release"}
PLACES = ((NAMESPACE, RELEASE), (NAMESPACE, "other"), ("elsewhere", RELEASE))
"""Namespace and name of three releases; the first brings the rules."""


def aggregations(expression):
    """Every aggregation, with the labels that it keeps and the metrics below it."""
    for part in walk(promql_parser.parse(expression)):
        if isinstance(part, promql_parser.AggregateExpr):
            modifier = part.modifier
            kept = set(modifier.labels) if modifier and modifier.type == promql_parser.AggModifierType.By else set()
            yield kept, metrics_of(str(part))


def matchings(expression):
    """The labels of every `on (...)` and `ignoring (...)`, with which of the two it is."""
    for part in walk(promql_parser.parse(expression)):
        matching = getattr(getattr(part, "modifier", None), "matching", None)
        if matching is not None:
            yield matching.type, set(matching.labels), metrics_of(str(part))


def expressions():
    yield from ((rule.get("alert") or rule["record"], rule["expr"]) for rule in rules())
    yield from dashboard_expressions()


@each("where, expression", expressions, called=": ".join)
def test_every_aggregation_keeps_namespace_and_release(where, expression):
    for kept, metrics in aggregations(expression):
        assert metrics <= set(OF_KUBERNETES) or kept >= BOTH, (where, kept, metrics)
    for kind, labels, metrics in matchings(expression):
        assert kind == promql_parser.LabelModifierType.Include, f"{where}: ignoring"
        assert metrics <= set(OF_KUBERNETES) or labels >= BOTH, (where, labels)


def test_the_walk_finds_what_is_wrong():
    [(kept, _), (inner, _)] = aggregations("sum(max by (namespace, release, run) (penstock_groups))")
    assert (kept, inner) == (set(), {*BOTH, "run"})
    [(kind, labels, _)] = matchings("a > on (run) b")
    assert (kind, labels) == (promql_parser.LabelModifierType.Include, {"run"})
    [(kind, _, _)] = matchings("a > ignoring (run) b")
    assert kind != promql_parser.LabelModifierType.Include


def test_rules_on_kubernetes_name_the_release_themselves():
    for name, rule in alerts().items():
        if metrics_of(rule["expr"]) & set(OF_KUBERNETES):
            assert 'NAMESPACE"' in rule["expr"], name
            assert '"release", "RELEASE", "", ""' in rule["expr"], name


def test_every_query_selects_the_chosen_releases():
    for name, board in dashboards().items():
        names = [variable["name"] for variable in board["templating"]["list"]]
        assert names[:4] == ["datasource", "namespace", "release", "run"], name
        for panel in panels(board):
            for target in panel["targets"]:
                expression = target["expr"]
                for variable in ("namespace", "release"):
                    selected = expression.count(f'{variable}=~"${variable}')
                    read = sum(
                        isinstance(part, promql_parser.VectorSelector)
                        and (variable == "namespace" or part.name not in OF_KUBERNETES)
                        and part.name != "kube_deployment_status_replicas_available"
                        for part in walk(promql_parser.parse(expression.replace("$__rate_interval", "1m")))
                    )
                    assert selected == read, (name, panel["title"], variable)


def scoped():
    """The rules as the chart ships them for one release, with the labels of their alerts."""
    documents = render(MONITORED).all("PrometheusRule")
    return [group for document in documents for group in document.at("spec", "groups")]


def test_the_chart_scopes_every_selector():
    for group in scoped():
        for rule in group["rules"]:
            where = rule.get("alert") or rule["record"]
            for part in walk(promql_parser.parse(rule["expr"])):
                if isinstance(part, promql_parser.VectorSelector):
                    found = {matcher.name: matcher.value for matcher in part.matchers.matchers}
                    if part.name not in OF_KUBERNETES:
                        assert (found["namespace"], found["release"]) == (NAMESPACE, RELEASE), where
                    elif part.name == "kube_deployment_status_replicas_available":
                        assert found == {"namespace": "kuberay-system", "deployment": "kuberay-operator"}
                    else:
                        assert found.get("namespace", found.get("exported_namespace")) == NAMESPACE, where
                        assert any(FULLNAME in value for value in found.values()), where
            assert not {"NAMESPACE", "RELEASE", "FULLNAME", "CLAIM", "OPERATOR"} & set(
                rule["expr"].replace('"', " ").replace("-", " ").split()
            ), where


def test_rules_on_pods_match_those_of_the_release():
    patterns = {
        matcher.value
        for group in scoped()
        for rule in group["rules"]
        for part in walk(promql_parser.parse(rule["expr"]))
        if isinstance(part, promql_parser.VectorSelector)
        for matcher in part.matchers.matchers
        if matcher.name in ("pod", "exported_pod")
    }
    names = {f"{FULLNAME}-{name}-x7k2p" for name in ("api", "functions", "redis", "head")}
    names |= {f"{FULLNAME}-{role}-worker-x7k2p" for role in (*ROLES, "rollout-spot")}
    for pattern in patterns:
        assert {name for name in names if re.fullmatch(pattern, name)} == names
        assert not re.fullmatch(pattern, f"{FULLNAME}-staging-api-x7k2p"), "another release"
        assert not re.fullmatch(pattern, "other-penstock-api-x7k2p")
    assert patterns


SERIES = {
    "RunFailed": ('penstock_run_state{{{at}, run="sick", state="failed"}}', "1x60"),
    "RedisMemoryShort": ('penstock_redis_memory_ratio{{{at}, run="{release}-{namespace}"}}', "0.95x60"),
    "EntropyCollapse": ('penstock_recent_entropy_nats{{{at}, run="sick", steps="10", statistic="mean"}}', "0.1x60"),
    "ProcessDown": ('up{{{at}, job="penstock", service="rollout", run="sick"}}', "0x60"),
}
"""By alert: a series and the values with which it fires, where {at} is the place."""
ALSO = 'penstock_recent_entropy_nats{{{at}, run="sick", steps="all", statistic="highest_median"}}'


def labels_of(place):
    return f'namespace="{place[0]}", release="{place[1]}"'


def fires(tmp_path, groups, sick, expected):
    """Assert that with the places `sick` in a bad state, the alerts of SERIES fire in the places `expected` alone."""
    kept = [
        {
            "name": group["name"],
            "rules": [
                {key: value for key, value in rule.items() if key != "annotations"} | {"labels": {}}
                for rule in group["rules"]
                if rule.get("alert") in SERIES
            ],
        }
        for group in groups
    ]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": kept}))
    series, moments = [], []
    for alert, (pattern, bad) in SERIES.items():
        for place in PLACES:
            good = {"0.95x60": "0.1x60", "0.1x60": "0.6x60", "1x60": "0x60", "0x60": "1x60"}[bad]
            text = pattern.format(at=labels_of(place), namespace=place[0], release=place[1])
            series.append({"series": text, "values": bad if place in sick else good})
        moments.append(
            {
                "alertname": alert,
                "eval_time": "30m",
                "exp_alerts": [
                    {"exp_labels": {"namespace": place[0], "release": place[1]} | more(alert)} for place in expected
                ],
            }
        )
    series += [{"series": ALSO.format(at=labels_of(place)), "values": "0.6x60"} for place in PLACES]
    test = {"interval": "1m", "input_series": series, "alert_rule_test": moments}
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "case.yaml").write_text(json.dumps(document))
    done = subprocess.run(
        [needed("promtool"), "test", "rules", tmp_path / "case.yaml"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def more(alert):
    return {
        "RunFailed": {"run": "sick"},
        "EntropyCollapse": {"run": "sick"},
        "ProcessDown": {"job": "penstock", "service": "rollout", "run": "sick"},
        "RedisMemoryShort": {},
    }[alert]


def test_one_set_of_rules_keeps_two_releases_apart(tmp_path):
    groups = [
        group
        for path in sorted(RULES.glob("*.yaml"))
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    ]
    fires(tmp_path, groups, PLACES[1:], PLACES[1:])


def test_the_rules_of_a_release_ignore_the_others(tmp_path):
    fires(tmp_path, scoped(), PLACES, PLACES[:1])
