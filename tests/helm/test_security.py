"""Tests that every container is confined: user, capabilities, root file system, token, host, images.

Must not check connections; test_network.py does.
"""

from __future__ import annotations

import re
from typing import Any

from tests.harness.each import each
from tests.helm.cases import CASES, DEFAULTS, EXISTING_SECRETS, PINNED, PINNED_DIGESTS, ROLES, section, values_of
from tests.helm.rendering import Case, Container, PodTemplate, render

USERS = {"redis": 999}
OUR_USER = 10001
ALLOWED_VOLUMES = {"configMap", "emptyDir", "projected", "secret", "downwardAPI", "persistentVolumeClaim", "ephemeral"}
"""What the restricted Pod Security Standard accepts, and the chart may need."""
ACCOUNT_TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount"


def effective(pod: PodTemplate, container: Container, field: str) -> Any:
    """A field of a container's securityContext, else of the pod's."""
    own = container.document.get("securityContext") or {}
    return own.get(field, (pod.spec.get("securityContext") or {}).get(field))


def faults(pod: PodTemplate, container: Container) -> list[str]:
    """The ways in which a container is less confined than it must be."""
    own = container.document.get("securityContext") or {}
    user = effective(pod, container, "runAsUser")
    checks = {
        "runAsNonRoot": effective(pod, container, "runAsNonRoot") is True,
        f"runAsUser {user}": user == USERS.get(pod.component, OUR_USER),
        "runAsGroup": bool(effective(pod, container, "runAsGroup")),
        "readOnlyRootFilesystem": own.get("readOnlyRootFilesystem") is True,
        "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
        "privileged": not own.get("privileged"),
        "drop ALL": (own.get("capabilities") or {}).get("drop") == ["ALL"],
        "add": not (own.get("capabilities") or {}).get("add"),
        "seccomp": (effective(pod, container, "seccompProfile") or {}).get("type") == "RuntimeDefault",
    }
    return [f"{pod} {container.name}: {name}" for name, passed in checks.items() if not passed]


@each("case", CASES)
def test_every_container_is_confined(case: Case) -> None:
    assert [
        fault for pod in render(case).pods for container in pod.containers for fault in faults(pod, container)
    ] == []


def test_a_container_with_an_extra_right_is_detected() -> None:
    pod = render(DEFAULTS).pod("api")
    wrong: dict[str, Any] = {
        "readOnlyRootFilesystem": False,
        "allowPrivilegeEscalation": True,
        "privileged": True,
        "runAsUser": 0,
        "runAsNonRoot": False,
        "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
        "seccompProfile": {"type": "Unconfined"},
    }
    for field, value in wrong.items():
        context = {**pod.main.document["securityContext"], field: value}
        assert faults(pod, Container({**pod.main.document, "securityContext": context})), field
    assert len(faults(pod, Container({"name": "bare"}))) >= 3


@each("case", CASES)
def test_every_container_has_requests_and_limits(case: Case) -> None:
    for pod in render(case).pods:
        for container in pod.containers:
            resources = container.document.get("resources", {})
            for kind in ("requests", "limits"):
                assert {"cpu", "memory"} <= set(resources.get(kind, {})), f"{pod} {container.name}: {kind} {resources}"


@each("case", CASES)
def test_nothing_of_the_host_is_shared(case: Case) -> None:
    for pod in render(case).pods:
        assert not [field for field in ("hostNetwork", "hostPID", "hostIPC", "hostUsers") if pod.spec.get(field)], pod
        kinds = {kind for volume in pod.volumes.values() for kind in volume if kind != "name"}
        assert kinds <= ALLOWED_VOLUMES, f"{pod}: {kinds - ALLOWED_VOLUMES}"


@each("case", CASES)
def test_volumes_written_by_pods_belong_to_their_group(case: Case) -> None:
    for pod in render(case).pods:
        assert pod.spec["securityContext"].get("fsGroup") == USERS.get(pod.component, OUR_USER), pod


def token_mounts(pod: PodTemplate) -> dict[str, set[str]]:
    """The containers that see a token of the pod's account, by how it is mounted."""
    sources = {name: volume.get("projected", {}).get("sources", []) for name, volume in pod.volumes.items()}
    projected = {name for name, found in sources.items() if any("serviceAccountToken" in source for source in found)}
    automatic = pod.spec.get("automountServiceAccountToken", True)
    return {
        "automatic": {container.name for container in pod.containers} if automatic else set(),
        "projected": {
            container.name
            for container in pod.containers
            for mount in container.mounts.values()
            if mount["name"] in projected
        },
    }


@each("case", CASES)
def test_only_the_autoscaler_and_the_cleanup_hold_a_token(case: Case) -> None:
    rendering = render(case)
    for pod in rendering.lasting_pods:
        mounts = token_mounts(pod)
        assert not mounts["automatic"], f"{pod}: automountServiceAccountToken is not false"
        assert mounts["projected"] == ({"autoscaler"} if pod.component == "head" else set()), pod
    for account in rendering.all("ServiceAccount"):
        if not account.hooks:
            assert account.at("automountServiceAccountToken") is False, account
    for pod in set(rendering.pods) - set(rendering.lasting_pods):
        needs = pod.owner.hooks & {"pre-delete", "pre-upgrade"}
        mounts = token_mounts(pod)
        assert needs or not (mounts["automatic"] or mounts["projected"]), f"{pod} needs no token"


def test_the_autoscalers_token_is_where_its_client_looks() -> None:
    pod = render(DEFAULTS).pod("head")
    autoscaler = next(container for container in pod.containers if container.name == "autoscaler")
    mount = autoscaler.mounts[ACCOUNT_TOKEN]
    paths = {
        entry["path"]
        for source in pod.volumes[mount["name"]]["projected"]["sources"]
        for entry in source.values()
        if isinstance(entry, dict)
        for entry in ([entry] if "path" in entry else entry["items"])
    }
    assert {"token", "ca.crt"} <= paths
    assert mount.get("readOnly") is True


@each("case", CASES)
def test_roles_have_only_the_rights_in_use(case: Case) -> None:
    rendering = render(case)
    assert not rendering.has("ClusterRole")
    assert not rendering.has("ClusterRoleBinding")
    for role in rendering.all("Role"):
        for rule in role.at("rules"):
            assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]], (role, rule)
            assert "secrets" not in rule["resources"], (role, rule)
            assert not {"escalate", "bind", "impersonate"} & set(rule["verbs"]), (role, rule)


IMAGE = re.compile(
    r"(?P<name>[a-z0-9][a-z0-9./_:-]*?)(?::(?P<tag>[\w][\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)


@each("case", CASES)
def test_every_image_is_one_of_the_values(case: Case) -> None:
    version = render(case).manifests[0].labels["app.kubernetes.io/version"]
    for pod in render(case).pods:
        for container in pod.containers:
            image = IMAGE.fullmatch(container.document["image"])
            assert image, container.document["image"]
            assert image["digest"] or image["tag"] not in (None, "latest"), f"{pod} {container.name}: {image[0]}"
            assert container.document.get("imagePullPolicy", "IfNotPresent") != "Always", container.name
            if pod.component != "redis" and case is not PINNED:
                kind = "gpu" if uses_gpu(case, pod.component) else "cpu"
                assert image["tag"] == f"{version}-{kind}", f"{pod} {container.name}: {image[0]}"


def uses_gpu(case: Case, component: str) -> bool:
    """Whether a component's rendered pods request GPUs."""
    if component not in ROLES:
        return False
    return "nvidia.com/gpu" in render(case).pod(component).main.document["resources"]["limits"]


def test_digests_apply_to_the_images_that_the_values_name() -> None:
    rendering = render(PINNED)
    for pod in rendering.pods:
        for container in pod.containers:
            image = container.document["image"]
            if pod.component == "redis":
                assert image.endswith(f"@{PINNED_DIGESTS['cpu']}"), image
                continue
            kind = "gpu" if uses_gpu(PINNED, pod.component) else "cpu"
            assert image.startswith("registry.example.org/penstock"), image
            assert image.endswith(f"@{PINNED_DIGESTS[kind]}"), f"{pod}: {image}"


def test_registry_secrets_reach_every_pod() -> None:
    for pod in render(EXISTING_SECRETS).pods:
        assert pod.spec.get("imagePullSecrets") == [{"name": "own-registry"}], pod


def test_groups_with_gpus_request_whole_gpus_in_limits() -> None:
    rendering, values = render(DEFAULTS), values_of(DEFAULTS)
    for role in ROLES:
        resources = rendering.pod(role).main.document["resources"]
        wanted = values[section(role)]["gpus"]
        assert int(resources["limits"].get("nvidia.com/gpu", 0)) == wanted, (role, resources)
        assert int(resources["requests"].get("nvidia.com/gpu", wanted)) == wanted, "Kubernetes accepts no other amount"
        assert ("nvidia.com/gpu" in resources["limits"]) == (wanted > 0), (
            "an amount of 0 still requires a node with a driver"
        )
