"""Owns parsing of rules, dashboards and PromQL for the tests. Results are cached, so tests must not change them.

Must not depend on a particular alert or panel.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser
import yaml

from services.metrics import families

ROOT = Path(__file__).parents[2]
RULES = ROOT / "helm" / "penstock" / "files" / "rules"
DASHBOARDS = ROOT / "helm" / "penstock" / "files" / "dashboards"
RUNBOOKS = ROOT / "docs" / "operations" / "runbooks"
CASES = Path(__file__).parent / "rules"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}


@cache
def rules() -> list[dict[str, Any]]:
    """Every rule, with the name of its file under `file`."""
    found = []
    for path in sorted(RULES.glob("*.yaml")):
        for group in yaml.load(path.read_text(), Loader=yaml.CSafeLoader)["groups"]:
            found += [{**rule, "file": path.name} for rule in group["rules"]]
    return found


@cache
def alerts() -> dict[str, dict[str, Any]]:
    """Every alert by its name; names are unique."""
    found = [rule for rule in rules() if "alert" in rule]
    assert len({rule["alert"] for rule in found}) == len(found)
    return {rule["alert"]: rule for rule in found}


@cache
def recorded() -> set[str]:
    """The names that recording rules produce."""
    return {rule["record"] for rule in rules() if "record" in rule}


@cache
def dashboards() -> dict[str, dict[str, Any]]:
    """Every dashboard by its file name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))}


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """The dashboard's panels, without the rows."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def dashboard_expressions() -> Iterator[tuple[str, str]]:
    """Every PromQL expression of every dashboard, with its location; Grafana's variables are replaced."""
    for name, board in dashboards().items():
        for panel in panels(board):
            for target in panel["targets"]:
                yield f"{name}: {panel['title']}", substituted(target["expr"])
        for variable in board["templating"]["list"]:
            if found := re.fullmatch(r"label_values\((.+), \w+\)", str(variable["query"])):
                yield f"{name}: variable {variable['name']}", substituted(found[1])
        for annotation in board["annotations"]["list"]:
            yield f"{name}: annotation {annotation['name']}", substituted(annotation["expr"])


def substituted(expression: str) -> str:
    """An expression as Grafana sends it."""
    text = expression.replace("$__rate_interval", "1m")
    for variable in ("namespace", "release", "run", "service", "stream"):
        text = text.replace(f"${variable}", ".*")
    assert "$" not in text, text
    return text


def metrics_of(expression: str) -> set[str]:
    """The metrics that an expression reads. Raises ValueError if it does not parse."""
    return {selector.name for selector in _selectors(promql_parser.parse(expression))}


def matchers_of(expression: str) -> Iterator[tuple[str, str, str]]:
    """Every matcher of an expression as (metric, label, value or regular expression)."""
    for selector in _selectors(promql_parser.parse(expression)):
        for matcher in selector.matchers.matchers:
            yield selector.name, matcher.name, matcher.value


def _selectors(expression: Any) -> Iterator[Any]:
    for part in walk(expression):
        if isinstance(part, promql_parser.VectorSelector):
            yield part


def walk(expression: Any) -> Iterator[Any]:
    """An expression and every part of it."""
    yield expression
    if isinstance(expression, promql_parser.MatrixSelector):
        yield expression.vector_selector
        return
    for part in ("lhs", "rhs", "expr", "param"):
        if (inner := getattr(expression, part, None)) is not None:
            yield from walk(inner)
    for argument in getattr(expression, "args", None) or ():
        yield from walk(argument)


@cache
def exported() -> set[str]:
    """The names under which Prometheus stores the metrics of services.metrics."""
    return {f"{family._name}{suffix}" for family in families() for suffix in SUFFIXES[family._type]}


def everything_named() -> dict[str, set[str]]:
    """Every metric that a rule or a dashboard reads, with the locations of its readers."""
    found: dict[str, set[str]] = {}
    expressions = [(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]
    for where, expression in [*expressions, *dashboard_expressions()]:
        for metric in metrics_of(expression):
            found.setdefault(metric, set()).add(where)
    return found
