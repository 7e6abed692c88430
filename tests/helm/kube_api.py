"""Owns a fake Kubernetes API server: it answers Helm's requests before rendering from a list of objects.

Must not do more: it stores and validates nothing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from tests.helm.rendering import NAMESPACE, Case, Document, Rendering, parse, template

KINDS = {
    "v1": ("Secret", "ConfigMap", "Service", "ServiceAccount", "PersistentVolumeClaim", "Pod"),
    "apps/v1": ("Deployment", "StatefulSet"),
    "batch/v1": ("Job",),
    "policy/v1": ("PodDisruptionBudget",),
    "networking.k8s.io/v1": ("NetworkPolicy", "Ingress"),
    "rbac.authorization.k8s.io/v1": ("Role", "RoleBinding"),
    "ray.io/v1": ("RayCluster",),
    "monitoring.coreos.com/v1": ("ServiceMonitor", "PodMonitor", "PrometheusRule"),
    "monitoring.coreos.com/v1alpha1": ("ScrapeConfig",),
    "cilium.io/v2": ("CiliumNetworkPolicy",),
    "kueue.x-k8s.io/v1beta2": ("LocalQueue",),
    "scheduling.volcano.sh/v1beta1": ("PodGroup",),
    "apiregistration.k8s.io/v1": ("APIService",),
    "apiextensions.k8s.io/v1": ("CustomResourceDefinition",),
}
STOPS_WITHIN_S = 0.02
OF_THE_CLUSTER = ("APIService", "CustomResourceDefinition")
"""Kinds whose objects are in no namespace."""


ROOT_CA: Document = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "kube-root-ca.crt"},
    "data": {"ca.crt": "-----BEGIN CERTIFICATE-----"},
}
"""What Kubernetes puts into every namespace."""


def ray_definition(*options: str) -> Document:
    """The part of KubeRay's definition of RayCluster that the chart reads: the fields of `autoscalerOptions`."""

    def version(name: str, fields: tuple[str, ...]) -> Document:
        inner = {"autoscalerOptions": {"type": "object", "properties": {field: {"type": "array"} for field in fields}}}
        spec = {"type": "object", "properties": inner}
        return {"name": name, "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}}}

    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "rayclusters.ray.io"},
        "spec": {"group": "ray.io", "versions": [version("v1", options), version("v1alpha1", ())]},
    }


def _plural(kind: str) -> str:
    return (
        kind.lower().removesuffix("y") + "ies"
        if kind.endswith("y")
        else kind.lower() + ("es" if kind.endswith("s") else "s")
    )


def _resources(version: str) -> Document:
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": version,
        "resources": [
            {
                "name": _plural(kind),
                "singularName": kind.lower(),
                "kind": kind,
                "namespaced": kind not in OF_THE_CLUSTER,
                "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
            }
            for kind in KINDS[version]
        ],
    }


def _groups(served: Iterable[str]) -> Document:
    groups: dict[str, list[str]] = {}
    for version in served:
        if "/" in version:
            groups.setdefault(version.split("/")[0], []).append(version)
    described = [
        {
            "name": name,
            "versions": [{"groupVersion": version, "version": version.split("/")[1]} for version in versions],
            "preferredVersion": {"groupVersion": versions[0], "version": versions[0].split("/")[1]},
        }
        for name, versions in groups.items()
    ]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": described}


def answers(objects: Iterable[Document], without: Iterable[str] = ()) -> dict[str, Document]:
    """The answers by path, of a cluster that has `objects` but not the API versions in `without`."""
    served = [version for version in KINDS if version not in without]
    found: dict[str, Document] = {
        "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": _groups(served),
        **{_root(version): _resources(version) for version in served},
    }
    for document in (ray_definition("args", "command", "image"), *objects):
        found[_path(document["apiVersion"], document["kind"], document["metadata"]["name"])] = document
    return found


def _path(version: str, kind: str, name: str) -> str:
    folder = "" if kind in OF_THE_CLUSTER else f"/namespaces/{NAMESPACE}"
    return f"{_root(version)}{folder}/{_plural(kind)}/{name}"


def _root(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def _handler(found: dict[str, Document], forbidden: Iterable[str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Headers and body are two writes: without this the second waits for Helm's acknowledgement.
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            code = 403 if any(word in path.split("/") for word in forbidden) else 200 if path in found else 404
            refused: dict[str, Any] = {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "code": code,
                "reason": {403: "Forbidden"}.get(code, "NotFound"),
                "message": f"{path}: {code}",
            }
            body = json.dumps(found[path] if code == 200 else refused).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing: requests do not belong in a test's output."""

    return Handler


@contextmanager
def kube_api(
    folder: Path, objects: Iterable[Document], without: Iterable[str] = (), forbidden: Iterable[str] = ()
) -> Iterator[Path]:
    """Run the fake server; yields a kubeconfig file in `folder` with its address.

    `forbidden` names resources (as in a path) that this user may not read.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(answers(objects, without), tuple(forbidden)))
    serving = threading.Thread(target=server.serve_forever, args=(STOPS_WITHIN_S,), name="kube-api")
    serving.start()
    try:
        config = folder / "kubeconfig"
        address = f"http://127.0.0.1:{server.server_address[1]}"
        config.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "it",
                    "users": [{"name": "it", "user": {}}],
                    "clusters": [{"name": "it", "cluster": {"server": address}}],
                    "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
                }
            ),
            encoding="utf-8",
        )
        yield config
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def against(
    folder: Path,
    case: Case,
    *objects: Document,
    without: Iterable[str] = (),
    forbidden: Iterable[str] = (),
    namespace: bool = True,
) -> Rendering:
    """Render an upgrade of a cluster that has `objects`: `lookup` finds them, and only the cluster's APIs exist.

    Without `namespace` the namespace does not exist, nor the objects that Kubernetes creates in each.
    """
    with kube_api(folder, (*objects, *([ROOT_CA] if namespace else [])), without, forbidden) as config:
        arguments = (
            "--is-upgrade",
            "--validate",
            "--dry-run=server",
            "--disable-openapi-validation",
            "--kubeconfig",
            str(config),
        )
        return parse(template(case, *arguments))


def of_cluster(case: Case) -> list[Document]:
    """The objects that a case declares to exist."""
    return [
        {
            "apiVersion": "v1",
            "kind": kind,
            "metadata": {"name": name},
            "data": dict.fromkeys(keys, "eA=="),
            **({"type": TYPES.get(keys, "Opaque")} if kind == "Secret" else {}),
        }
        for (kind, name), keys in case.external.items()
    ]


TYPES = {
    frozenset({".dockerconfigjson"}): "kubernetes.io/dockerconfigjson",
    frozenset({"tls.crt", "tls.key"}): "kubernetes.io/tls",
}
"""Keys of a Secret -> its type, if that is not Opaque."""
