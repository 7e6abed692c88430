"""Owns every command line of `make test-kind`: kind, kubectl, helm and the container engine.

Must not run one, and needs nothing but the standard library.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
CHART = "helm/penstock"
VALUES = "helm/penstock/values-cpu.yaml"
RECIPE = HERE / "recipe.yaml"
NODES = HERE / "nodes.yaml"
NAMESPACE, RELEASE = "penstock", "penstock"
"""The release's name contains the chart's, so that it is the full name of every object."""
KUBERAY = "1.7.0"
KUBERAY_CHARTS = "https://ray-project.github.io/kuberay-helm/"
NODE_IMAGE = "kindest/node:v1.35.8@sha256:07b2536e30b803ed61d1677a79df6115f798ce64c80f9e22f6ed45afd09323c0"
"""The newest Kubernetes that the chart accepts, of the images that the release notes of kind 0.33 list."""
REPOSITORY = "localhost/penstock"
"""Docker and Podman both keep this name in the archive, and the nodes' container runtime too."""
CLAIMS = ("penstock-runs", "data-penstock-redis-0")
"""The claims that `helm uninstall` keeps."""
ENGINES = ("docker", "podman")
PROGRAMS = ("kind", "kubectl", "helm", "make")

DEADLINES = {
    "build": 5400.0,
    "cluster": 600.0,
    "load": 1200.0,
    "operator": 420.0,
    "install": 600.0,
    "test": 2400.0,
    "uninstall": 900.0,
    "short": 120.0,
}
"""Seconds after which a command is ended, by kind of command."""

IN_POD = 'IFS= read -r PENSTOCK_TOKEN && export PENSTOCK_TOKEN && exec penstock "$@"'
"""Runs `penstock` in the API's pod. The token is the first line of its input: others can see arguments."""


def build(engine: str) -> list[str]:
    """Build the image without CUDA by the Makefile's target."""
    return ["make", "image-cpu", f"BUILDER={engine} build"]


def tag(engine: str, version: str) -> list[str]:
    """Give the image the name that the chart uses here."""
    return [engine, "tag", f"penstock:{version}-cpu", f"{REPOSITORY}:{version}-cpu"]


def save(engine: str, version: str, archive: Path) -> list[str]:
    """Write the image to a file."""
    return [engine, "save", "--output", str(archive), f"{REPOSITORY}:{version}-cpu"]


def load(cluster: str, archive: Path) -> list[str]:
    """Load the image into every node."""
    return ["kind", "load", "image-archive", str(archive), "--name", cluster]


def create_cluster(cluster: str, node_image: str) -> list[str]:
    """Create the cluster; KUBECONFIG names the file that kind, kubectl and helm use."""
    options = ["--config", str(NODES), "--image", node_image, "--wait", "300s"]
    return ["kind", "create", "cluster", "--name", cluster, *options]


def clusters() -> list[str]:
    """The names of existing clusters."""
    return ["kind", "get", "clusters"]


def delete_cluster(cluster: str) -> list[str]:
    """Delete the cluster."""
    return ["kind", "delete", "cluster", "--name", cluster]


def export_logs(cluster: str, folder: Path) -> list[str]:
    """Write the logs of nodes and pods to a folder."""
    return ["kind", "export", "logs", str(folder), "--name", cluster]


def install_operator() -> list[str]:
    """Install KubeRay's operator."""
    options = ["--namespace", "kuberay-system", "--create-namespace", "--wait", "--timeout", "5m"]
    chart = ["kuberay-operator", "--repo", KUBERAY_CHARTS, "--version", KUBERAY]
    return ["helm", "install", "kuberay-operator", *chart, *options]


def create_namespace() -> list[str]:
    """Create the namespace first, so that the chart can look up objects in it."""
    return ["kubectl", "create", "namespace", NAMESPACE]


def install_chart() -> list[str]:
    """Install the chart for a small cluster without GPUs."""
    given = ["-f", VALUES, "--set", f"image.repository={REPOSITORY}"]
    return ["helm", "install", RELEASE, CHART, "--namespace", NAMESPACE, *given, "--timeout", "5m"]


def upgrade_chart(setting: str, *, force: bool) -> list[str]:
    """Change one value; `force`: with Helm 4, which reports a conflict with the autoscaler otherwise."""
    conflicts = ["--force-conflicts"] if force else []
    given = ["--reuse-values", "--set", setting, "--timeout", "5m"]
    return ["helm", "upgrade", RELEASE, CHART, "--namespace", NAMESPACE, *given, *conflicts]


def helm_version() -> list[str]:
    """The version of Helm, such as v3.19.0."""
    return ["helm", "version", "--template", "{{.Version}}"]


def test_release() -> list[str]:
    """Run the chart's own test."""
    return ["helm", "test", RELEASE, "--namespace", NAMESPACE, "--timeout", "35m"]


def uninstall() -> list[str]:
    """Uninstall the release; its hook ends the Ray cluster first."""
    return ["helm", "uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", "--timeout", "12m"]


def _kubectl(*arguments: str) -> list[str]:
    return ["kubectl", "--namespace", NAMESPACE, *arguments]


def selector(component: str = "") -> str:
    """The labels of the release's pods, or of one component's."""
    of_release = f"app.kubernetes.io/instance={RELEASE}"
    return f"{of_release},app.kubernetes.io/component={component}" if component else of_release


def pods(component: str = "") -> list[str]:
    """The pods of a component as JSON, or of the whole release."""
    return _kubectl("get", "pods", "--selector", selector(component), "--output", "json")


def claims() -> list[str]:
    """The names of the release's claims."""
    return _kubectl("get", "persistentvolumeclaims", "--output", "name")


def ray_clusters() -> list[str]:
    """The names of the Ray clusters."""
    return _kubectl("get", "rayclusters.ray.io", "--output", "name")


def delete_pod(name: str) -> list[str]:
    """Delete a pod as an eviction does, with its grace period."""
    return _kubectl("delete", "pod", name, "--wait=false")


def drain(node: str) -> list[str]:
    """Drain a node of the release's pods for at most a minute."""
    options = ["--ignore-daemonsets", "--delete-emptydir-data", "--timeout=60s"]
    return ["kubectl", "drain", node, "--pod-selector", selector(), *options]


def uncordon(node: str) -> list[str]:
    """Let a drained node accept pods again."""
    return ["kubectl", "uncordon", node]


def token() -> list[str]:
    """The administrator's token, in base64."""
    return _kubectl("get", "secret", f"{RELEASE}-access", "--output", "jsonpath={.data.admin-token}")


def penstock(*arguments: str) -> list[str]:
    """A `penstock` command in the API's pod; the first line of its standard input is the token."""
    inside = ["sh", "-c", IN_POD, "penstock", *arguments]
    return _kubectl("exec", "--stdin", f"deployment/{RELEASE}-api", "--", *inside)


def describe() -> list[list[str]]:
    """What is printed after a failure."""
    events = _kubectl("get", "events", "--sort-by", ".lastTimestamp")
    return [["kubectl", "get", "pods", "--all-namespaces", "--output", "wide"], events, _kubectl("describe", "pods")]
