"""Tests the evaluator: each rule of NetworkPolicy semantics once allows and once denies a connection.

Must not look at the chart.
"""

from __future__ import annotations

from typing import Any

from tests.harness.each import each
from tests.helm.network import Endpoint, Policy, allowed, matches

WEB = Endpoint("web", {"app": "web"}, "ours", ip="10.0.0.1", ports={"http": 8080})
STORE = Endpoint("store", {"app": "store"}, "ours", ip="10.0.0.2", ports={"redis": 6379})
THEIRS = Endpoint("theirs", {"app": "web"}, "theirs", {"team": "red"}, ip="10.0.1.1")
OUTSIDE = Endpoint("outside", ip="203.0.113.7")

DENY_ALL = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
OPEN = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"], "ingress": [{}], "egress": [{}]}


def policies(*specs: dict[str, Any]) -> list[Policy]:
    return [Policy("ours", {"spec": spec}) for spec in specs]


def into_store(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": {"app": "store"}}, "policyTypes": ["Ingress"], "ingress": list(rules)}


def out_of_web(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Egress"], "egress": list(rules)}


FROM_WEB = {"from": [{"podSelector": {"matchLabels": {"app": "web"}}}]}


@each(
    "specs, source, expected",
    [
        ([], THEIRS, True),  # no policy selects it: open
        ([DENY_ALL], WEB, False),
        ([DENY_ALL, OPEN], WEB, True),  # policies add up
        ([into_store()], WEB, False),  # selected, no rule
        ([into_store({})], OUTSIDE, True),  # an empty rule matches every endpoint
        ([into_store({"from": []})], OUTSIDE, True),
        ([into_store(FROM_WEB)], WEB, True),
        ([into_store(FROM_WEB)], THEIRS, False),  # a pod selector alone means this namespace
        ([into_store({"from": [{"podSelector": {}, "namespaceSelector": {}}]})], THEIRS, True),
        ([into_store({"from": [{"namespaceSelector": {"matchLabels": {"team": "red"}}}]})], THEIRS, True),
        ([into_store({"from": [{"namespaceSelector": {"matchLabels": {"team": "blue"}}}]})], THEIRS, False),
        (
            [
                into_store(
                    {
                        "from": [
                            {
                                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "theirs"}},
                                "podSelector": {"matchLabels": {"app": "db"}},
                            }
                        ]
                    }
                )
            ],
            THEIRS,
            False,
        ),
        (
            [into_store({"from": [{"namespaceSelector": {}}, {"podSelector": {"matchLabels": {"app": "db"}}}]})],
            THEIRS,
            True,
        ),
        ([into_store({"from": [{"namespaceSelector": {}}]})], OUTSIDE, False),  # selectors match pods only
        ([into_store({"from": [{"ipBlock": {"cidr": "203.0.113.0/24"}}]})], OUTSIDE, True),
        ([into_store({"from": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": ["203.0.113.0/24"]}}]})], OUTSIDE, False),
        ([into_store(FROM_WEB | {"ports": [{"port": 6379}]})], WEB, True),
        ([into_store(FROM_WEB | {"ports": [{"port": 6380}]})], WEB, False),
        ([into_store(FROM_WEB | {"ports": [{"port": 6000, "endPort": 7000}]})], WEB, True),
        ([into_store(FROM_WEB | {"ports": [{"port": 6000, "endPort": 6378}]})], WEB, False),
        ([into_store(FROM_WEB | {"ports": [{"port": "redis"}]})], WEB, True),
        ([into_store(FROM_WEB | {"ports": [{"port": "http"}]})], WEB, False),  # not a port of the destination
        ([into_store(FROM_WEB | {"ports": [{"port": 6379, "protocol": "UDP"}]})], WEB, False),
        ([into_store(FROM_WEB | {"ports": [{"protocol": "TCP"}]})], WEB, True),
        ([out_of_web()], WEB, False),
        ([out_of_web({"to": [{"podSelector": {"matchLabels": {"app": "store"}}}]})], WEB, True),
        (
            [out_of_web({"to": [{"podSelector": {"matchLabels": {"app": "store"}}}]}), DENY_ALL],
            WEB,
            False,
        ),  # egress allowed, ingress not
        ([out_of_web({"to": [{"podSelector": {"matchLabels": {"app": "api"}}}]})], WEB, False),
        ([out_of_web({"to": [{"podSelector": {}}], "ports": [{"port": "redis"}]})], WEB, True),
        ([out_of_web()], THEIRS, True),  # a policy applies to its namespace only
    ],
)
def test_each_rule_of_the_semantics(specs: list[dict[str, Any]], source: Endpoint, expected: bool) -> None:
    assert allowed(policies(*specs), source, STORE, 6379) is expected


def test_directions_follow_from_the_rules_if_not_stated() -> None:
    selector = {"podSelector": {"matchLabels": {"app": "web"}}}
    assert Policy("ours", {"spec": selector}).directions == {"Ingress"}
    assert Policy("ours", {"spec": {**selector, "egress": [{}]}}).directions == {"Ingress", "Egress"}
    assert allowed(policies(selector), WEB, OUTSIDE, 443)
    assert not allowed(policies(selector), STORE, WEB, 8080)


@each(
    "term, expected",
    [
        ({"key": "app", "operator": "In", "values": ["web", "api"]}, True),
        ({"key": "app", "operator": "In", "values": ["api"]}, False),
        ({"key": "app", "operator": "NotIn", "values": ["web"]}, False),
        ({"key": "absent", "operator": "NotIn", "values": ["web"]}, True),
        ({"key": "app", "operator": "Exists"}, True),
        ({"key": "absent", "operator": "Exists"}, False),
        ({"key": "app", "operator": "DoesNotExist"}, False),
        ({"key": "absent", "operator": "DoesNotExist"}, True),
    ],
)
def test_expressions_of_a_selector(term: dict[str, Any], expected: bool) -> None:
    assert matches({"matchExpressions": [term]}, {"app": "web"}) is expected


def test_an_empty_selector_selects_all_and_none_selects_nothing() -> None:
    assert matches({}, {"app": "web"})
    assert not matches(None, {"app": "web"})
