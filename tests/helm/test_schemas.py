"""Tests that every rendered object is valid, field by field, in every supported version of Kubernetes.

Must not check the meaning of an object.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import product

import pytest

from tests.harness.each import each
from tests.helm.cases import CASES, EVERYTHING
from tests.helm.rendering import NEWEST, OLDEST, Case, Document, Manifest, lint, render
from tests.helm.schemas import HAS_CRDS, custom_errors, errors, kubernetes_errors, needs_crds


@pytest.mark.slow  # `make check` lints the chart with its defaults and with the CPU profile
@each("case", CASES)
def test_lint_finds_nothing(case: Case) -> None:
    assert "1 chart(s) linted, 0 chart(s) failed" in lint(case)


@each("case, version", list(product(CASES, [OLDEST, NEWEST])), called=lambda case: f"{case[0]}, Kubernetes {case[1]}")
def test_objects_are_valid_in_oldest_and_newest_kubernetes(case: Case, version: str) -> None:
    rendering = render(replace(case, kube_version=version))
    ours = [manifest for manifest in rendering.manifests if not manifest.api_version.startswith("ray.io/")]
    found = [f"{manifest} {error}" for manifest in ours for error in errors(manifest, version)]
    # A Ray pod is a pod: Kubernetes' schema of pods applies to it as well as the CRD.
    found += [f"{pod} {error}" for pod in rendering.pods for error in kubernetes_errors(as_pod(pod.document), version)]
    assert found == []


def as_pod(template: Document) -> Document:
    """A pod made from a template."""
    metadata = {key: value for key, value in template.get("metadata", {}).items() if key in ("labels", "annotations")}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "any", **metadata}, "spec": template["spec"]}


@needs_crds
@each("case", CASES)
def test_the_ray_cluster_fits_its_crd(case: Case) -> None:
    for manifest in render(case).manifests:
        if manifest.api_version.startswith("ray.io/"):
            assert custom_errors(manifest.document) == []


def misspelt(document: Document) -> Iterator[tuple[str, Document]]:
    """Copies of an object, each with one misspelt field: the top-level fields, and those of its spec."""
    for parent in ((), ("spec",)):
        fields = document if not parent else document.get("spec") or {}
        for name in fields:
            if name in ("apiVersion", "kind", "metadata", "spec"):
                continue
            wrong = deepcopy(document)
            holder = wrong if not parent else wrong["spec"]
            holder[f"{name}s"] = holder.pop(name)
            yield f"{'.'.join([*parent, name])}s", wrong


def every_kind() -> list[Manifest]:
    """One object of each kind that the chart can render, except Cilium's, whose schema is not available here."""
    return list({manifest.kind: manifest for manifest in render(EVERYTHING).manifests}.values())


def test_a_misspelt_field_is_found_in_every_kind() -> None:
    missed = [
        f"{manifest}: {name}"
        for manifest in every_kind()
        for name, wrong in misspelt(manifest.document)
        if not (manifest.kind == "RayCluster" and not HAS_CRDS) and not errors(Manifest(wrong), NEWEST)
    ]
    assert missed == []


@needs_crds
@each(
    "path, field, value",
    [
        (("spec", "headGroupSpec", "template", "spec", "containers", 0), "readinessProb", {}),
        (("spec", "headGroupSpec", "template", "spec"), "hostNetwrok", True),
        (("spec", "workerGroupSpecs", 0), "maxReplica", 2),
        (("spec", "workerGroupSpecs", 0), "maxReplicas", "2"),
        (("spec", "workerGroupSpecs", 0, "template", "spec", "containers", 0, "resources", "limits"), "cpu", "2x"),
        (("spec", "gcsFaultToleranceOptions"), "redisAdress", "redis:6379"),
        (("spec", "authOptions"), "mode", "Token"),
        (("spec", "upgradeStrategy"), "type", "NewCluster"),
    ],
)
def test_a_fault_deep_in_the_ray_cluster_is_found(path: tuple[str | int, ...], field: str, value: object) -> None:
    document = deepcopy(render(EVERYTHING).cluster.document)
    assert custom_errors(document) == []
    holder = document
    for step in path:
        holder = holder[step]  # type: ignore[index]
    holder[field] = value
    assert custom_errors(document)
