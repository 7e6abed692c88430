"""Tests that null for any value is refused with its name, or renders as if the value were empty.

Must not check what null leaves in place; test_group_defaults.py does for groups, test_bad_input.py for budgets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from typing import Any

import jsonschema
import pytest
import yaml

from tests.harness.each import each
from tests.helm.cases import DEFAULTS, EVERYTHING, EXTERNAL_REDIS, HUB, REWARDS, SENTINELS, TRACKED
from tests.helm.rendering import CHART, Case, Document, HelmError, default_values, merged, template

Path = tuple[str, ...]
TRACES = ("nil pointer", "runtime error", "executing", "error calling", "wrong type", "YAML parse error", "<nil>")
"""Parts of messages of Helm that name a line of a template, and not the value."""
TOGETHER_REFUSED = {("redis", "image", "tag"), ("rollout", "memory"), ("learner", "memory")}
"""Accepted alone: a digest is enough, and a smaller pod holds smaller segments."""
ISSUER = {"issuer": "https://sign-in.example.org", "audience": "penstock", "groups": {"ml": {"*": "viewer"}}}
ALL_ON = Case(
    "all that values can switch on",
    merged(
        merged(merged(EVERYTHING.values, HUB.values), merged(TRACKED.values, REWARDS)),
        {
            "api": {"access": {"oidc": ISSUER}},
            "prices": {"currency": "USD"},
            "ray": {"dashboard": True},
            "verifierCode": {"isolation": "bubblewrap", "seccompProfile": {"type": "Unconfined"}},
        },
    ),
    api_versions=EVERYTHING.api_versions,
)
CASES = (DEFAULTS, ALL_ON, SENTINELS)
NEEDED: list[tuple[Case, Path]] = [
    (DEFAULTS, ("rollout", "memory")),
    (DEFAULTS, ("learner", "memory")),
    *(
        (ALL_ON, tuple(path.split(".")))
        for path in (
            "api.access.oidc.audience",
            "api.access.oidc.groups",
            "api.ingress.host",
            "networkPolicy.clients",
            "verifier.rewardHosts",
            "verifierCode.seccompProfile",
            "verifierCode.seccompProfile.type",
        )
    ),
    (EXTERNAL_REDIS, ("redis", "existingSecret")),
    (EXTERNAL_REDIS, ("redis", "external", "address")),
    (SENTINELS, ("redis", "existingSecret")),
    (SENTINELS, ("redis", "external", "rayAddress")),
    (SENTINELS, ("redis", "external", "sentinel", "service")),
]
"""What another value of a case needs: without it, one line says so."""


@cache
def validator() -> Any:
    return jsonschema.Draft7Validator(json.loads((CHART / "values.schema.json").read_text(encoding="utf-8")))


def fields(schema: Document) -> Document:
    """The fields that a part of the schema names; the keys of an open mapping are the user's."""
    while "$ref" in schema:
        schema = validator().schema["definitions"][schema["$ref"].rpartition("/")[2]]
    return dict(schema.get("properties", {}))


def paths(values: Document, schema: Document, at: Path = ()) -> Iterator[Path]:
    """The path of every value and of every section, at any depth."""
    for name, value in values.items():
        yield (*at, name)
        if isinstance(value, dict):
            inner = fields(schema)[name]
            yield from paths({key: value[key] for key in value if key in fields(inner)}, inner, (*at, name))


def every_path() -> list[Path]:
    return list(paths(default_values(), validator().schema))


def null_at(*where: Path) -> Document:
    """Values with null at these paths."""
    values: Document = {}
    for path in where:
        value: Any = None
        for name in reversed(path):
            value = {name: value}
        values = merged(values, value)
    return values


def valid(path: Path) -> bool:
    """Whether the schema accepts the default values without one: Helm removes null and its default, then validates."""
    values: Document = json.loads(json.dumps(default_values()))
    here = values
    for name in path[:-1]:
        here = here[name]
    del here[path[-1]]
    return not list(validator().iter_errors(values))


def by_depth(chosen: list[Path]) -> list[tuple[Path, ...]]:
    """The paths in groups of one depth, so that none of a group lies within another."""
    return [tuple(group) for _, group in groupby(sorted(chosen, key=len), key=len)]


def empty(text: str) -> set[tuple[str, ...]]:
    """Where rendered objects have null, without the numbers of list items."""

    def walk(node: Any, at: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for key, value in node.items() if isinstance(node, dict) else [("", item) for item in node]:
            if value is None:
                yield (*at, key)
            elif isinstance(value, dict | list):
                yield from walk(value, (*at, key))

    # Dashboards and rules are long, and text alone.
    parts = [part for part in text.split("\n---\n") if "grafana_dashboard" not in part and "PrometheusRule" not in part]
    objects = [document for document in yaml.load_all("\n---\n".join(parts), Loader=yaml.CSafeLoader) if document]
    return {place for document in objects for place in walk(document, (document["kind"],))}


def check_rendered(case: Case, *where: Path) -> None:
    text = template(case.but(null_at(*where)))
    assert "<nil>" not in text, [line for line in text.splitlines() if "<nil>" in line]
    assert empty(text) <= empty_by_itself(case), where


_empty: dict[str, set[tuple[str, ...]]] = {}


def empty_by_itself(case: Case) -> set[tuple[str, ...]]:
    if case.name not in _empty:
        _empty[case.name] = empty(template(case))
    return _empty[case.name]


@each("where", lambda: by_depth([path for path in every_path() if not valid(path)]), called=lambda where: len(where[0]))
def test_a_value_that_is_needed_is_refused_by_name(where: tuple[Path, ...]) -> None:
    with pytest.raises(HelmError) as refused:
        template(DEFAULTS.but(null_at(*where)))
    message = str(refused.value)
    lines = {line.removeprefix("- ") for line in message.splitlines() if line.startswith("- ")}
    assert lines == {f"{'.'.join(path[:-1]) or '(root)'}: {path[-1]} is required" for path in where}
    assert [trace for trace in TRACES if trace in message] == []


def others(case: Case) -> list[Path]:
    """The values that the schema accepts as null, without switches, which would hide what they switch on."""
    apart = {path for by, path in NEEDED if by is case} | TOGETHER_REFUSED
    return [path for path in every_path() if valid(path) and path[-1] != "enabled" and path not in apart]


@each(
    "case, where",
    lambda: [(case, where) for case in CASES for where in by_depth(others(case))],
    called=lambda pair: f"{pair[0]}, depth {len(pair[1][0])}",
)
def test_null_of_every_other_value_renders(case: Case, where: tuple[Path, ...]) -> None:
    check_rendered(case, *where)


@each("path", lambda: [path for path in every_path() if valid(path) and path[-1] == "enabled"], called=".".join)
def test_null_switches_off(path: Path) -> None:
    check_rendered(ALL_ON, path)


@each("case, path", NEEDED, called=lambda pair: ".".join(pair[1]))
def test_null_of_what_another_value_needs_is_one_clear_line(case: Case, path: Path) -> None:
    with pytest.raises(HelmError) as refused:
        template(case.but(null_at(path)))
    message = str(refused.value)
    assert [trace for trace in TRACES if trace in message] == [], message
    (line,) = [line for line in message.splitlines() if " is not valid: expected " in line]
    assert ".".join(path) in line
