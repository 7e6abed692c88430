"""Owns the rendered chart: each case rendered by `helm template` and parsed once, its pods as KubeRay runs them.

Must not check what is rendered; the tests do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "penstock"
RELEASE, NAMESPACE = "demo", "training"
FULLNAME = f"{RELEASE}-penstock"
OLDEST, NEWEST = "1.27.0", "1.35.0"
"""The versions of Kubernetes that Chart.yaml accepts."""
COMPONENT = "app.kubernetes.io/component"
RAY_API = ("ray.io/v1", "ray.io/v1/RayCluster")
PROMETHEUS_API = tuple(
    f"{group}{kind}"
    for group, kinds in {
        "monitoring.coreos.com/v1": ("", "/ServiceMonitor", "/PodMonitor", "/PrometheusRule"),
        "monitoring.coreos.com/v1alpha1": ("", "/ScrapeConfig"),
    }.items()
    for kind in kinds
)
HELM = Path(sys.executable).with_name("helm")
DEADLINE_S = 30.0

Document = dict[str, Any]


class _StrictLoader(yaml.CSafeLoader):
    """YAML as an API server reads it: a duplicate key in a mapping is an error; it does not override the first."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"duplicate keys: {sorted(twice)}", node.start_mark)
        return super().construct_mapping(node, deep)


def load_all(text: str) -> list[Any]:
    """Every document of a YAML text that is not empty. Raises yaml.YAMLError for a duplicate key."""
    return [document for document in yaml.load_all(text, Loader=_StrictLoader) if document]


@dataclass(frozen=True)
class Case:
    """One way to install the chart, and the objects that it expects in the namespace.

    `external`: the objects that the values declare to exist, (kind, name) -> their keys.
    """

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    external: Mapping[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    api_versions: tuple[str, ...] = RAY_API
    kube_version: str = NEWEST
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    def but(self, values: Mapping[str, Any], *, name: str = "") -> Case:
        """The same case with `values` merged into its own."""
        return replace(self, name=name or f"{self.name}, changed", values=merged(self.values, values))

    def with_arguments(self, *arguments: str) -> Case:
        """The same case with more arguments for `helm template`."""
        return replace(self, arguments=(*self.arguments, *arguments))


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `over` into `under` as Helm does: mappings are merged, everything else is replaced."""
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[key] = merged(below, value) if both else deepcopy(value)
    return result


class Manifest:
    """One rendered object, with what tests need of any object."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.kind: str = document["kind"]
        self.api_version: str = document["apiVersion"]
        metadata = document["metadata"]
        self.name: str = metadata["name"]
        self.labels: dict[str, str] = metadata.get("labels") or {}
        self.annotations: dict[str, str] = metadata.get("annotations") or {}
        self.component = self.labels.get(COMPONENT, "")

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"

    __repr__ = __str__

    def at(self, *path: str | int, default: Any = None) -> Any:
        """The value at a path, or `default` if the path does not exist."""
        here: Any = self.document
        for step in path:
            try:
                here = here[step]
            except (KeyError, IndexError, TypeError):
                return default
        return here

    @property
    def hooks(self) -> frozenset[str]:
        """The hooks on which Helm applies this object, e.g. {"test"}; empty for an ordinary object."""
        return frozenset(part.strip() for part in self.annotations.get("helm.sh/hook", "").split(",") if part.strip())

    @property
    def kept(self) -> bool:
        """Whether `helm uninstall` keeps it."""
        return self.annotations.get("helm.sh/resource-policy") == "keep"


@dataclass(frozen=True, eq=False)
class Container:
    """One container; `init`: it ends before the others start."""

    document: Document
    init: bool = False

    @property
    def name(self) -> str:
        return str(self.document["name"])

    @property
    def command(self) -> list[str]:
        """Command and arguments in one line."""
        return [*self.document.get("command", []), *self.document.get("args", [])]

    @property
    def env(self) -> dict[str, Document]:
        """The environment variables by name, each with its document."""
        return {entry["name"]: entry for entry in self.document.get("env", [])}

    @property
    def mounts(self) -> dict[str, Document]:
        """The volume mounts by path."""
        return {mount["mountPath"]: mount for mount in self.document.get("volumeMounts", [])}

    @property
    def ports(self) -> dict[str, int]:
        """The ports by name."""
        return {port["name"]: port["containerPort"] for port in self.document.get("ports", [])}


@dataclass(frozen=True, eq=False)
class PodTemplate:
    """The pod template of one workload; `group` is the worker group of a RayCluster, else empty."""

    owner: Manifest
    document: Document
    group: str = ""

    def __str__(self) -> str:
        return f"{self.owner}{'/' + self.group if self.group else ''}"

    __repr__ = __str__

    @property
    def labels(self) -> dict[str, str]:
        return self.document.get("metadata", {}).get("labels") or {}

    @property
    def annotations(self) -> dict[str, str]:
        return self.document.get("metadata", {}).get("annotations") or {}

    @property
    def component(self) -> str:
        return self.labels.get(COMPONENT, "")

    @property
    def spec(self) -> Document:
        return dict(self.document["spec"])

    @property
    def volumes(self) -> dict[str, Document]:
        return {volume["name"]: volume for volume in self.spec.get("volumes", [])}

    @cached_property
    def containers(self) -> tuple[Container, ...]:
        """Every container: init, ordinary, and in the head's pod the autoscaler, which KubeRay adds."""
        spec = self.spec
        found = [Container(document, init=True) for document in spec.get("initContainers", [])]
        found += [Container(document) for document in spec["containers"]]
        if self.group == HEAD_GROUP:
            found += [Container(document) for document in _autoscaler(self.owner, spec["containers"][0])]
        return tuple(found)

    @property
    def main(self) -> Container:
        """The first ordinary container: KubeRay treats it as Ray's."""
        return next(container for container in self.containers if not container.init)


HEAD_GROUP = "headgroup"
"""KubeRay's own name for the group of the head."""


def _autoscaler(cluster: Manifest, ray: Document) -> list[Document]:
    """The container that KubeRay adds to the head: its defaults, overridden by autoscalerOptions."""
    if not cluster.at("spec", "enableInTreeAutoscaling"):
        return []
    options = deepcopy(cluster.at("spec", "autoscalerOptions", default={}))
    keys = ("image", "resources", "securityContext", "env", "envFrom", "volumeMounts", "command", "args")
    standard = {
        "name": "autoscaler",
        "image": ray["image"],
        "command": ["/bin/bash", "-c", "--"],
        "args": ["$(KUBERAY_GEN_AUTOSCALER_START_CMD)"],
    }
    return [standard | {key: options[key] for key in keys if options.get(key)}]


def _ray_pod(cluster: Manifest, group: str, kind: str, template: Document) -> PodTemplate:
    """A group's pods with KubeRay's labels, whose node type, group and cluster override the template's."""
    document = deepcopy(template)
    metadata = document.setdefault("metadata", {})
    fixed = {"ray.io/node-type": kind, "ray.io/group": group, "ray.io/cluster": cluster.name}
    standard = {
        "ray.io/is-ray-node": "yes",
        "ray.io/identifier": f"{cluster.name}-{kind}",
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/created-by": "kuberay-operator",
    }
    metadata["labels"] = standard | (metadata.get("labels") or {}) | fixed
    return PodTemplate(cluster, document, group)


def _of_cluster(cluster: Manifest) -> Iterator[PodTemplate]:
    yield _ray_pod(cluster, HEAD_GROUP, "head", cluster.at("spec", "headGroupSpec", "template"))
    for group in cluster.at("spec", "workerGroupSpecs", default=[]):
        yield _ray_pod(cluster, group["groupName"], "worker", group["template"])


def _at(*path: str) -> Callable[[Manifest], Iterator[PodTemplate]]:
    def templates(owner: Manifest) -> Iterator[PodTemplate]:
        yield PodTemplate(owner, owner.at(*path))

    return templates


_POD_TEMPLATES: dict[str, Callable[[Manifest], Iterator[PodTemplate]]] = {
    "Deployment": _at("spec", "template"),
    "StatefulSet": _at("spec", "template"),
    "DaemonSet": _at("spec", "template"),
    "Job": _at("spec", "template"),
    "CronJob": _at("spec", "jobTemplate", "spec", "template"),
    "Pod": _at(),
    "RayCluster": _of_cluster,
}


class Rendering:
    """All objects that one case renders."""

    def __init__(self, manifests: tuple[Manifest, ...]) -> None:
        self.manifests = manifests

    def all(self, kind: str, component: str = "") -> list[Manifest]:
        """The objects of a kind, and of a component if one is given."""
        return [
            manifest for manifest in self.manifests if manifest.kind == kind and component in ("", manifest.component)
        ]

    def one(self, kind: str, component: str = "", name: str = "") -> Manifest:
        """The only object of a kind, component and name. Raises AssertionError if there is none or several."""
        found = [manifest for manifest in self.all(kind, component) if name in ("", manifest.name)]
        assert len(found) == 1, f"{kind} {component or name}: expected one, found {found} in {self.manifests}"
        return found[0]

    def has(self, kind: str, component: str = "") -> bool:
        """Whether an object of a kind (and component) is rendered."""
        return bool(self.all(kind, component))

    @cached_property
    def pods(self) -> tuple[PodTemplate, ...]:
        """The pod templates of all workloads, with those of Ray's groups and of test pods."""
        return tuple(
            pod
            for manifest in self.manifests
            for pod in _POD_TEMPLATES.get(manifest.kind, lambda _: iter(()))(manifest)
        )

    @property
    def lasting_pods(self) -> tuple[PodTemplate, ...]:
        """The pods of the release, without those that a hook starts."""
        return tuple(pod for pod in self.pods if not pod.owner.hooks)

    def pod(self, component: str) -> PodTemplate:
        """The only pod template of a component, hooks excluded."""
        found = [pod for pod in self.lasting_pods if pod.component == component]
        assert len(found) == 1, f"pods of {component}: expected one template, found {found}"
        return found[0]

    @property
    def cluster(self) -> Manifest:
        return self.one("RayCluster")

    def group(self, role: str) -> Document:
        """The worker group whose pods have a component's label."""
        found = [
            group
            for group in self.cluster.at("spec", "workerGroupSpecs")
            if group["template"]["metadata"]["labels"].get(COMPONENT) == role
        ]
        assert len(found) == 1, f"worker group of {role}: {[group['groupName'] for group in found]}"
        return dict(found[0])


class HelmError(Exception):
    """Helm failed; the text is its standard error."""


def helm(*arguments: str) -> str:
    """Run the real Helm, offline, and return its output. Raises HelmError with its message if it fails."""
    # Helm caches API discovery by the server's address; tests keep that out of the home folder.
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [HELM, *arguments],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
            cwd=ROOT,
            # Helm runs for a tenth of a second; garbage collection would take much of that.
            env={**os.environ, "KUBECACHEDIR": cache, "GOGC": "400"},
        )
    if done.returncode:
        raise HelmError((done.stderr + done.stdout).strip())
    return done.stdout


def _run(verb: tuple[str, ...], case: Case, *more: str) -> str:
    """Run a Helm command on the chart with a case's values in a file."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as values:
        json.dump(case.values, values)  # JSON is valid YAML
        values.flush()
        files = [argument for name in case.files for argument in ("--values", str(CHART / name))]
        return helm(*verb, str(CHART), *files, "--values", values.name, "--namespace", NAMESPACE, *more)


def template(case: Case, *more: str) -> str:
    """The output of `helm template` for a case. Raises HelmError if the chart rejects its values."""
    return template_as(RELEASE, case, *more)


def template_as(release: str, case: Case, *more: str) -> str:
    """The same for a release with another name."""
    versions = [argument for version in case.api_versions for argument in ("--api-versions", version)]
    return _run(("template", release), case, "--kube-version", case.kube_version, *versions, *case.arguments, *more)


def lint(case: Case) -> str:
    """The output of `helm lint --strict` for a case. Raises HelmError if there is a warning."""
    return _run(("lint", "--strict"), case, "--kube-version", case.kube_version)


def parse(text: str) -> Rendering:
    """The objects of a rendered text."""
    return Rendering(tuple(Manifest(document) for document in load_all(text)))


_rendered: dict[str, Rendering] = {}


def render(case: Case) -> Rendering:
    """The rendered case. It is rendered once per process, so tests must not change it."""
    key = json.dumps([case.values, case.files, case.api_versions, case.kube_version, case.arguments], sort_keys=True)
    if key not in _rendered:
        _rendered[key] = parse(template(case))
    return _rendered[key]


@cache
def default_values() -> Document:
    """The chart's values.yaml."""
    return dict(load_all((CHART / "values.yaml").read_text(encoding="utf-8"))[0])
