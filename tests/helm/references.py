"""Owns references by name in rendered objects: to Secrets, ConfigMaps, claims, accounts, roles, Services.

Must not judge whether a reference is satisfied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.helm.rendering import Document, Manifest

KEYED = ("Secret", "ConfigMap")


@dataclass(frozen=True)
class Reference:
    """One object that another names; `key` is the key of a Secret or ConfigMap, empty for the whole object."""

    kind: str
    name: str
    key: str
    where: str
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.where} -> {self.kind}/{self.name}{'#' + self.key if self.key else ''}"


_Found = Iterator[tuple[str, str, str]]
"""Kind, name and key."""


def _key_ref(kind: str) -> Callable[[Any], _Found]:
    def found(value: Document) -> _Found:
        yield kind, value["name"], value["key"]

    return found


def _whole(kind: str, field: str) -> Callable[[Any], _Found]:
    def found(value: Document) -> _Found:
        yield kind, value[field], ""

    return found


def _volume(kind: str) -> Callable[[Any], _Found]:
    """The references of a volume, or of one source of a projected volume: every key listed under `items`."""

    def found(value: Document) -> _Found:
        name = value.get("secretName") or value.get("name")
        if name is None:
            return
        for key in [item["key"] for item in value.get("items") or []] or [""]:
            yield kind, str(name), key

    return found


def _name(kind: str) -> Callable[[Any], _Found]:
    def found(value: str) -> _Found:
        yield kind, value, ""

    return found


def _names(kind: str) -> Callable[[Any], _Found]:
    def found(value: list[Document]) -> _Found:
        for entry in value:
            yield kind, entry["name"], ""

    return found


def _tls(value: Any) -> _Found:
    for entry in value if isinstance(value, list) else []:
        if "secretName" in entry:
            yield "Secret", entry["secretName"], ""


def _subjects(value: list[Document]) -> _Found:
    for entry in value:
        if entry["kind"] == "ServiceAccount":
            yield "ServiceAccount", entry["name"], ""


_FIELDS: dict[str, Callable[[Any], _Found]] = {
    "secretKeyRef": _key_ref("Secret"),
    "configMapKeyRef": _key_ref("ConfigMap"),
    "secretRef": _whole("Secret", "name"),
    "configMapRef": _whole("ConfigMap", "name"),
    "secret": _volume("Secret"),
    "configMap": _volume("ConfigMap"),
    "persistentVolumeClaim": _whole("PersistentVolumeClaim", "claimName"),
    "imagePullSecrets": _names("Secret"),
    "serviceAccountName": _name("ServiceAccount"),
    "priorityClassName": _name("PriorityClass"),
    "serviceName": _name("Service"),
    "authOptions": lambda value: iter([("Secret", value["secretName"], "")] if value.get("secretName") else []),
    "tls": _tls,
    "subjects": _subjects,
    "credentials": _key_ref("Secret"),
    "roleRef": lambda value: iter([(value["kind"], value["name"], "")]),
}
"""Field -> the objects that it names; these fields mean the same in every kind that a chart renders."""

_DATA = frozenset({"data", "stringData", "binaryData", "labels", "annotations", "matchLabels"})
"""Fields whose keys are the user's own."""


def references(manifest: Manifest) -> list[Reference]:
    """All references of an object, in the order of its fields."""
    return list(_walk(manifest.document, str(manifest)))


def _walk(node: Any, where: str) -> Iterator[Reference]:
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from _walk(item, f"{where}[{item['name'] if isinstance(item, dict) and 'name' in item else index}]")
    if not isinstance(node, dict):
        return
    for field, value in node.items():
        here = f"{where}.{field}"
        if field in _FIELDS and value:
            optional = isinstance(value, dict) and bool(value.get("optional"))
            for kind, name, key in _FIELDS[field](value):
                yield Reference(kind, name, key, here, optional)
        if field not in _DATA:
            yield from _walk(value, here)
