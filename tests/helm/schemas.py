"""Owns strict validation of one object: Kubernetes' own schemas, KubeRay's CRDs, the models of prometheus-operator.

Must not accept a field that the schema does not name: an API server would drop a misspelt field silently.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import kubernetes_validate.utils as kubernetes_validate
import pytest
import yaml

from tests.helm.rendering import ROOT, Document, Manifest

CRDS = Path(os.environ.get("PENSTOCK_TEST_CRDS") or ROOT.parent / "shared" / "data" / "crds")
"""KubeRay's CRDs are next to the checkout, because no registry has a package of them."""
HAS_CRDS = (CRDS / "ray.io_rayclusters.yaml").is_file()
needs_crds = pytest.mark.skipif(
    not HAS_CRDS,
    reason=f"no ray.io_rayclusters.yaml in {CRDS}: set PENSTOCK_TEST_CRDS to the folder of KubeRay's CRDs"
    " (helm-chart/kuberay-operator/crds in its repository)",
)
OPEN = "x-kubernetes-preserve-unknown-fields"
MONITORING = "monitoring.coreos.com/"

_read_once = cache(kubernetes_validate.schema_contents)
"""Without a cache the library reads several megabytes for every object."""


def kubernetes_errors(document: Document, version: str) -> list[str]:
    """What a version of Kubernetes rejects in a built-in object. Raises LookupError for an unknown kind."""
    return _kubernetes_errors(json.dumps(document, sort_keys=True), version)


@cache
def _kubernetes_errors(text: str, version: str) -> list[str]:
    """Cached by text: most objects are the same in most cases."""
    try:
        with mock.patch.object(kubernetes_validate, "schema_contents", _read_once):
            kubernetes_validate.validate(json.loads(text), version, strict=True)
    except kubernetes_validate.SchemaNotFoundError as error:
        raise LookupError(error.message) from error
    except jsonschema.ValidationError as error:
        return [f"{_path(error.absolute_path)}: {error.message[:300]}"]
    return []


def custom_errors(document: Document) -> list[str]:
    """What the CRD of a ray.io object rejects or does not know."""
    validator = _validator(document["kind"], document["apiVersion"])
    return [f"{_path(error.absolute_path)}: {error.message[:300]}" for error in validator.iter_errors(document)]


@cache
def _validator(kind: str, api_version: str) -> jsonschema.Draft202012Validator:
    group, _, version = api_version.partition("/")
    text = (CRDS / f"{group}_{kind.lower()}s.yaml").read_text(encoding="utf-8")
    versions = yaml.load(text, Loader=yaml.CSafeLoader)["spec"]["versions"]
    schema = next(entry["schema"]["openAPIV3Schema"] for entry in versions if entry["name"] == version)
    # The API server checks an object's metadata; a CRD only states that it has some.
    schema["properties"]["metadata"] = {"type": "object", OPEN: True}
    return jsonschema.Draft202012Validator(closed(schema))


def closed(schema: Document) -> Document:
    """A structural schema that rejects what an API server would prune: every field that it does not name.

    It accepts unknown fields where the original schema keeps them.
    """
    result = deepcopy(schema)
    _close(result)
    return result


def _close(node: Any) -> None:
    if isinstance(node, list):
        for item in node:
            _close(item)
    if not isinstance(node, dict):
        return
    if node.get("type") == "object" and not node.get(OPEN) and "additionalProperties" not in node:
        node["additionalProperties"] = False
        node.setdefault("properties", {})
    for key, value in node.items():
        # The names below `properties` are fields, not keywords: one may be called `type`.
        for inner in value.values() if key == "properties" else [value]:
            _close(inner)


def monitoring_errors(document: Document) -> list[str]:
    """What prometheus-operator's CRD rejects or does not know.

    Its models drop what they do not name, so the result is compared with the input.
    """
    from cloudcoil.models.prometheus_operator import v1, v1alpha1
    from pydantic import ValidationError

    module = {"v1": v1, "v1alpha1": v1alpha1}[document["apiVersion"].removeprefix(MONITORING)]
    try:
        model = getattr(module, document["kind"]).model_validate_json(json.dumps(document))
    except ValidationError as error:
        return [f"{_path(detail['loc'])}: {detail['msg']}" for detail in error.errors()]
    return list(_lost(document, model.model_dump(mode="json", by_alias=True, exclude_unset=True), ()))


def _lost(given: Any, kept: Any, path: tuple[str | int, ...]) -> Iterable[str]:
    """The paths that are in the input but not in what a model kept."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            if key not in kept:
                yield f"{_path((*path, key))}: unknown field"
            else:
                yield from _lost(value, kept[key], (*path, key))
    elif isinstance(given, list) and isinstance(kept, list):
        for index, (mine, other) in enumerate(zip(given, kept, strict=True)):
            yield from _lost(mine, other, (*path, index))


def _path(steps: Iterable[str | int]) -> str:
    return ".".join(str(step) for step in steps) or "(root)"


def errors(manifest: Manifest, version: str) -> list[str]:
    """The faults of any object that a chart may render, for a version of Kubernetes."""
    if manifest.api_version.startswith("ray.io/"):
        return custom_errors(manifest.document)
    if manifest.api_version.startswith(MONITORING):
        return monitoring_errors(manifest.document)
    return kubernetes_errors(manifest.document, version)
