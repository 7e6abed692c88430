"""Tests that every object that another names exists: it is rendered, or the values declare that it exists.

Must not check what references are for.
"""

from __future__ import annotations

from tests.harness.each import each
from tests.helm.cases import CASES, DEFAULTS
from tests.helm.references import KEYED, Reference, references
from tests.helm.rendering import Case, Manifest, Rendering, render

OF_KUBERNETES = {("ConfigMap", "kube-root-ca.crt"): frozenset({"ca.crt"})}
"""What Kubernetes itself creates in every namespace."""


def provided(case: Case, rendering: Rendering) -> dict[tuple[str, str], frozenset[str]]:
    """Every object that exists once the case is installed, with its keys."""
    there = {(manifest.kind, manifest.name): keys_of(manifest) for manifest in rendering.manifests}
    for workload in rendering.all("StatefulSet"):
        for claim in workload.at("spec", "volumeClaimTemplates", default=[]):
            there[("PersistentVolumeClaim", claim["metadata"]["name"])] = frozenset()
    return {**there, **OF_KUBERNETES, **case.external}


def keys_of(manifest: Manifest) -> frozenset[str]:
    """The keys of a Secret or ConfigMap."""
    return frozenset(
        key for field in ("data", "stringData", "binaryData") for key in manifest.at(field, default=None) or {}
    )


def unsatisfied(case: Case, rendering: Rendering) -> list[Reference]:
    """The references to objects or keys that would not exist."""
    there = provided(case, rendering)
    return [
        reference
        for manifest in rendering.manifests
        for reference in references(manifest)
        if not reference.optional
        and (
            (reference.kind, reference.name) not in there
            or (
                reference.kind in KEYED
                and reference.key
                and reference.key not in there[(reference.kind, reference.name)]
            )
        )
    ]


@each("case", CASES)
def test_every_reference_exists(case: Case) -> None:
    assert [str(reference) for reference in unsatisfied(case, render(case))] == []


def test_a_missing_object_and_a_missing_key_are_detected() -> None:
    rendering = render(DEFAULTS)
    for gone in ("Secret", "ConfigMap", "ServiceAccount"):
        without = Rendering(tuple(manifest for manifest in rendering.manifests if manifest.kind != gone))
        assert any(reference.kind == gone for reference in unsatisfied(DEFAULTS, without)), gone
    keyless = Rendering(
        tuple(
            Manifest({**manifest.document, "data": {}, "stringData": {}}) if manifest.kind == "Secret" else manifest
            for manifest in rendering.manifests
        )
    )
    assert any(reference.key for reference in unsatisfied(DEFAULTS, keyless))


@each("case", CASES)
def test_external_objects_are_used_and_not_rendered(case: Case) -> None:
    rendering = render(case)
    rendered = {(manifest.kind, manifest.name) for manifest in rendering.manifests}
    named = {(reference.kind, reference.name) for manifest in rendering.manifests for reference in references(manifest)}
    assert not rendered & set(case.external), "an existing object would be overwritten"
    assert set(case.external) <= named, "a value that declares an object has no effect"


@each("case", CASES)
def test_every_mount_has_its_volume_and_every_volume_a_mount(case: Case) -> None:
    for pod in render(case).pods:
        mounted = {
            mount["name"] for container in pod.containers for mount in container.document.get("volumeMounts", [])
        }
        claims = {claim["metadata"]["name"] for claim in pod.owner.at("spec", "volumeClaimTemplates", default=[])}
        assert mounted <= set(pod.volumes) | claims, f"{pod}: mounts without a volume"
        assert set(pod.volumes) <= mounted, f"{pod}: volumes that no container mounts"


@each("case", CASES)
def test_names_of_objects_are_unique_and_valid(case: Case) -> None:
    rendering = render(case)
    named = [(manifest.kind, manifest.name) for manifest in rendering.manifests]
    assert len(named) == len(set(named)), [reference for reference in named if named.count(reference) > 1]
    too_long = [str(manifest) for manifest in rendering.manifests if len(manifest.name) > 63]
    assert too_long == []
