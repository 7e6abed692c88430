"""Tests that values.yaml, its schema, its comments and the chart's README agree.

Must not check the effect of values.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema

from tests.harness.each import each
from tests.helm.cases import CASES, ROLES, section
from tests.helm.rendering import CHART, ROOT, Case, Document, default_values, load_all, merged

COMMENT = "# -- "


@cache
def schema() -> Document:
    return dict(json.loads((CHART / "values.schema.json").read_text(encoding="utf-8")))


def resolved(node: Document) -> Document:
    """A schema merged with its reference and its `allOf`."""
    result = dict(node)
    for part in [*node.get("allOf", []), *([definition(node["$ref"])] if "$ref" in node else [])]:
        inner = resolved(part)
        properties = {**inner.get("properties", {}), **result.get("properties", {})}
        both = set(inner.get("properties", {})) & set(result.get("properties", {}))
        properties |= {name: {"allOf": [inner["properties"][name], result["properties"][name]]} for name in both}
        result = {**inner, **result} | ({"properties": properties} if properties else {})
    return result


def definition(reference: str) -> Document:
    here: Any = schema()
    for step in reference.removeprefix("#/").split("/"):
        here = here[step]
    return dict(here)


def differences(values: Any, node: Document, path: str = "") -> Iterator[str]:
    """Keys that only the values have, and keys that only the schema has; keys of an open mapping are the user's."""
    node = resolved(node)
    if "properties" not in node or not isinstance(values, dict):
        return
    if node.get("additionalProperties") is not False:
        yield f"{path or '(root)'}: the schema accepts unknown keys"
    for key in sorted(set(values) ^ set(node["properties"])):
        where = "values.yaml" if key in values else "the schema"
        yield f"{path}{key}: only in {where}"
    for key in set(values) & set(node["properties"]):
        yield from differences(values[key], node["properties"][key], f"{path}{key}.")


def test_values_and_schema_have_the_same_keys() -> None:
    """A group may also set what all groups have, and values of an older chart say that a group has no GPUs."""
    values = default_values()
    groups = {section(role): {**values["groupDefaults"], "gpus": 0, **values[section(role)]} for role in ROLES}
    assert set(differences(values | groups, schema())) <= {"global: only in the schema"}


def untyped(node: Document, path: str = "") -> Iterator[str]:
    """Values whose schema accepts anything."""
    node = resolved(node)
    if not {"type", "enum", "const"} & set(node):
        yield path or "(root)"
    for key, inner in node.get("properties", {}).items():
        yield from untyped(inner, f"{path}{key}.")


def test_every_key_of_the_schema_has_a_type() -> None:
    assert list(untyped(schema())) == []


def test_the_schema_is_a_valid_json_schema() -> None:
    jsonschema.Draft7Validator.check_schema(schema())
    assert schema()["$schema"].startswith("http://json-schema.org/draft-07"), "Helm reads draft 7"


@each("name", ["values.yaml", "values-cpu.yaml"])
def test_shipped_values_are_valid(name: str) -> None:
    values = merged(default_values(), load_all((CHART / name).read_text(encoding="utf-8"))[0])
    assert [error.message for error in jsonschema.Draft7Validator(schema()).iter_errors(values)] == []


def undocumented() -> list[str]:
    """The keys of values.yaml without a comment above them, unless each of their keys has one."""
    lines = (CHART / "values.yaml").read_text(encoding="utf-8").splitlines()
    found, documented = [], -1
    for index, line in enumerate(lines):
        match = re.match(r"( *)([\w-]+):(.*)", line)
        if not match or line.lstrip().startswith("#"):
            continue
        indent = len(match[1])
        if documented >= 0 and indent > documented:
            continue  # below a mapping that has a comment
        documented = -1
        if lines[index - 1].strip().startswith(COMMENT):
            documented = indent
        elif match[3].strip():
            found.append(f"line {index + 1}: {line.strip()}")
    return found


def test_every_value_has_a_comment() -> None:
    assert undocumented() == []


def test_the_charts_readme_is_up_to_date() -> None:
    command = [sys.executable, "-m", "deploy.kubernetes.chart_readme", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


@each("case", CASES)
def test_the_cases_use_only_values_that_exist(case: Case) -> None:
    """Helm would reject them too; this test names the place."""
    values = merged(default_values(), json.loads(json.dumps(case.values)))
    assert [error.message for error in jsonschema.Draft7Validator(schema()).iter_errors(values)] == []
