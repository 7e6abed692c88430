"""Tests that null for any value is refused with its name, or renders as if the value were empty.

Must not check what null leaves in place; test_group_defaults.py does for groups, test_bad_input.py for budgets.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path as File
from typing import Any

import jsonschema
import pytest
import yaml

from tests.harness.each import each
from tests.helm.cases import (
    DEFAULTS,
    EVERYTHING,
    EXTERNAL_REDIS,
    HUB,
    OBJECT_STORE_BY_ROLE,
    REWARDS,
    SENTINELS,
    SHARED_CLAIM,
    TRACKED,
)
from tests.helm.rendering import (
    CHART,
    FULLNAME,
    NAMESPACE,
    Case,
    Document,
    HelmError,
    default_values,
    helm,
    load_all,
    merged,
    parse,
    template,
)

Path = tuple[str, ...]
TRACES = ("nil pointer", "runtime error", "executing", "error calling", "wrong type", "YAML parse error", "<nil>")
"""Parts of messages of Helm that name a line of a template, and not the value."""
TOGETHER_REFUSED = {
    ("redis", "image", "tag"),
    ("rollout", "memory"),
    ("learner", "memory"),
    ("storage", "claim", "existingClaim"),
}
"""Accepted alone: a digest is enough, a smaller pod holds smaller segments, and the chart's own claim has a size."""
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
CASES = (DEFAULTS, ALL_ON, SENTINELS, SHARED_CLAIM, OBJECT_STORE_BY_ROLE)
NEEDED: list[tuple[Case, Path]] = [
    (DEFAULTS, ("rollout", "memory")),
    (DEFAULTS, ("learner", "memory")),
    (DEFAULTS, ("storage", "claim", "sameNode")),
    (SENTINELS, ("storage", "claim", "sameNode")),
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
UNUSED: list[tuple[Case, list[str]]] = [
    (
        DEFAULTS,
        [
            *(
                f"redis.external.{name}"
                for name in ("database", "tls", "caSecret", "username", "rayUsername", "sentinel")
            ),
            *(f"storage.s3.{name}" for name in ("url", "endpoint", "region", "scratch")),
            *(f"rewardFunctions.{name}" for name in ("replicas", "processes", "cpus", "memory", "tmpSize")),
            "metrics.rules.operator.namespace",
            "metrics.dashboards.labels",
        ],
    ),
    (EXTERNAL_REDIS, [f"redis.{name}" for name in ("image", "cpus", "memory", "maxMemoryMiB", "persistence")]),
    (SHARED_CLAIM, [f"storage.claim.{name}" for name in ("size", "accessMode", "sameNode", "keep")]),
    (OBJECT_STORE_BY_ROLE, ["storage.claim"]),
    (DEFAULTS.but({"uninstall": {"drain": False}}, name="no drain"), ["uninstall.timeoutSeconds"]),
]
"""Values that a case does not use: an upgrade whose values have null there must go on working."""
CONDITION = r'Must validate "(then|else)" as "if" was (not )?valid'
"""Helm says so for each condition of the schema, beside the value's own line."""


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


def without(values: Document, path: Path) -> Document:
    """Values without one: so Helm treats null that finds a default."""
    name, *inner = path
    return {key: value for key, value in values.items() if key != name or inner} | (
        {name: without(values[name], tuple(inner))} if inner else {}
    )


def valid(path: Path, case: Case = DEFAULTS) -> bool:
    """Whether the schema accepts the values of a case without one."""
    if (case.name, path) not in _valid:
        _valid[case.name, path] = _accepts(without(merged(default_values(), case.values), path), path[0])
    return _valid[case.name, path]


_valid: dict[tuple[str, Path], bool] = {}


def _accepts(values: Document, section: str) -> bool:
    """Whether the schema accepts one section of the values: none of its rules spans two."""
    schema = validator().schema
    if section not in values:
        return section not in schema["required"]
    return not list(validator().descend(values[section], schema["properties"][section]))


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


@each(
    "case, where",
    lambda: [
        (case, where) for case in CASES for where in by_depth([path for path in every_path() if needs(case, path)])
    ],
    called=lambda pair: f"{pair[0]}, depth {len(pair[1][0])}",
)
def test_a_value_that_is_needed_is_refused_by_name(case: Case, where: tuple[Path, ...]) -> None:
    with pytest.raises(HelmError) as refused:
        template(case.but(null_at(*where)))
    message = str(refused.value)
    lines = {line.removeprefix("- ") for line in message.splitlines() if line.startswith("- ")}
    lines = {line for line in lines if not re.search(CONDITION, line)}
    assert lines == {f"{'.'.join(path[:-1]) or '(root)'}: {path[-1]} is required" for path in where}
    assert [trace for trace in TRACES if trace in message] == []


def needs(case: Case, path: Path) -> bool:
    """Whether the schema refuses null there, and for other reasons than by default."""
    return not valid(path, case) and (case is DEFAULTS or valid(path))


@each(
    "case, path",
    [(case, path) for case, paths in UNUSED for path in paths],
    called=lambda pair: f"{pair[0]}, {pair[1]}",
)
def test_null_of_what_is_not_used_is_accepted(case: Case, path: str) -> None:
    assert valid(tuple(path.split(".")), case)


@each("case, unused", UNUSED, called=lambda pair: pair[0])
def test_null_of_what_is_not_used_changes_nothing(tmp_path: File, case: Case, unused: list[str]) -> None:
    where = [tuple(path.split(".")) for path in unused]
    assert objects(template(case.but(null_at(*where)))) == objects(template(case))
    # Helm keeps a null that finds no default, as one of an earlier upgrade with `--reuse-values`.
    chart, values, own = tmp_path / "penstock", default_values(), tmp_path / "own.json"
    for path in where:
        values = without(values, path)
    shutil.copytree(CHART, chart, dirs_exist_ok=True)
    (chart / "values.yaml").write_text(json.dumps(values))
    own.write_text(json.dumps(merged(case.values, null_at(*where))))
    kept = helm("template", "demo", str(chart), "--namespace", NAMESPACE, "--values", str(own), "--is-upgrade")
    assert objects(kept) == objects(template(case))


@each(
    "path", [path for _, paths in UNUSED[1:] for path in paths if path.rpartition(".")[2] not in ("sameNode", "keep")]
)
def test_a_null_that_was_kept_is_refused_once_it_is_used(path: str) -> None:
    """Nothing removes it: the value is there, and null."""
    assert not validator().is_valid(merged(default_values(), null_at(tuple(path.split(".")))))


def objects(text: str) -> list[Document]:
    """All objects but Secrets, whose generated content differs."""
    return [document for document in load_all(text) if document["kind"] != "Secret"]


def test_null_replicas_are_those_of_an_autoscaler() -> None:
    """A HorizontalPodAutoscaler owns the count; an upgrade with a count in the manifest would reset it."""
    case = ALL_ON.but({"api": {"replicas": None}, "rewardFunctions": {"replicas": None}})
    specs = [manifest.document["spec"] for manifest in parse(template(case)).all("Deployment")]
    assert len(specs) == 2
    assert [spec for spec in specs if "replicas" in spec] == []


OPEN: Document = {
    "image": {"pullPolicy": None, "gpu": None},
    "api": {"service": {"type": None}},
    "ray": {
        "tmpSize": None,
        "upgradeStrategy": None,
        "gpuResource": None,
        "autoscaler": {"idleTimeoutSeconds": None, "upscalingMode": None},
    },
    "head": {"expireEndedSeconds": None},
    "storage": {"claim": {"keep": None}},
}
"""Null leaves these to Kubernetes, KubeRay or the chart."""


def test_null_of_what_has_another_default_renders_it() -> None:
    rendering = parse(template(DEFAULTS.but(OPEN)))
    spec = rendering.cluster.document["spec"]
    assert spec["upgradeStrategy"] == {"type": "None"}  # KubeRay's own
    assert {"idleTimeoutSeconds", "upscalingMode"} & set(spec["autoscalerOptions"]) == set()
    head, rollout = rendering.pod("head"), rendering.pod("rollout")
    assert (head.volumes["tmp"]["emptyDir"], head.volumes["ray-logs"]["emptyDir"]) == ({}, {})
    assert head.main.env["PENSTOCK_EXPIRE_ENDED_S"]["value"] == "0"
    assert rollout.main.document["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert {pod.main.document["imagePullPolicy"] for pod in rendering.pods} == {"IfNotPresent"}
    assert rendering.one("Service", "api").at("spec", "type") == "ClusterIP"
    assert not rendering.one("PersistentVolumeClaim", name=f"{FULLNAME}-runs").kept


def test_null_of_a_buckets_address_is_amazons() -> None:
    rendering = parse(template(OBJECT_STORE_BY_ROLE.but({"storage": {"s3": {"endpoint": None, "region": None}}})))
    env = rendering.pod("head").main.env
    assert env["AWS_REGION"]["value"] == ""
    assert "AWS_ENDPOINT_URL" not in env


EXTERNAL_NULL: Document = {"database": None, "caSecret": None, "username": None, "rayUsername": None}


def test_null_of_an_external_redis_is_its_default_user() -> None:
    rendering = parse(template(EXTERNAL_REDIS.but({"redis": {"external": EXTERNAL_NULL}})))
    env = rendering.pod("api").main.env
    assert env["PENSTOCK_REDIS"]["value"] == "redis://redis.data:6379/0"
    assert {"PENSTOCK_REDIS_USERNAME", "PENSTOCK_REDIS_CA_FILE"} & set(env) == set()
    assert "redisUsername" not in rendering.cluster.document["spec"]["gcsFaultToleranceOptions"]


def others(case: Case) -> list[Path]:
    """The values that the schema accepts as null, without switches, which would hide what they switch on."""
    apart = {path for by, path in NEEDED if by is case} | TOGETHER_REFUSED
    return [path for path in every_path() if valid(path, case) and path[-1] != "enabled" and path not in apart]


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
