"""Tests what pods write to (/dev/shm, /tmp, the working folder), and that data outlives the release if it should.

Must not check Secrets and ConfigMaps; test_references.py does.
"""

from __future__ import annotations

import re
from typing import Any

from tests.harness.each import each
from tests.helm.cases import (
    CASES,
    CPU,
    DEFAULTS,
    NEW_SHARED_CLAIM,
    OBJECT_STORE,
    OBJECT_STORE_BY_ROLE,
    ROLES,
    SHARED_CLAIM,
    section,
)
from tests.helm.quantities import quantity
from tests.helm.rendering import HEAD_GROUP, Case, Container, Document, PodTemplate, default_values, render

RUNS = "/var/lib/penstock"
WRITTEN = (
    "HOME",
    "PENSTOCK_RUNS",
    "TMPDIR",
    "TORCH_EXTENSIONS_DIR",
    "HF_HOME",
    "VLLM_CACHE_ROOT",
    "RAY_TMPDIR",
    "TRITON_CACHE_DIR",
    "XDG_CACHE_HOME",
)
"""Variables that name folders to write to."""
WRITABLE = ("emptyDir", "persistentVolumeClaim", "ephemeral")


def ray_pods(case: Case) -> list[PodTemplate]:
    return [pod for pod in render(case).pods if pod.group]


@each("case", CASES)
def test_shared_memory_is_sized_and_within_the_pods_memory(case: Case) -> None:
    for pod in ray_pods(case):
        volume = pod.volumes[pod.main.mounts["/dev/shm"]["name"]]["emptyDir"]
        assert volume["medium"] == "Memory", pod
        size, limit = quantity(volume["sizeLimit"]), quantity(pod.main.document["resources"]["limits"]["memory"])
        assert 64 * 2**20 < size < limit, f"{pod}: /dev/shm of {size} in a limit of {limit}"


@each("role", ["head", *ROLES])
def test_shared_memory_has_the_size_of_the_values(role: str) -> None:
    pod = render(DEFAULTS.but({section(role): {"shmSize": "3Gi"}})).pod(role)
    assert pod.volumes[pod.main.mounts["/dev/shm"]["name"]]["emptyDir"]["sizeLimit"] == "3Gi"


@each("case", CASES)
def test_rays_object_store_fits_into_shared_memory(case: Case) -> None:
    for pod in ray_pods(case):
        spec = pod.owner.at("spec")
        groups = {group["groupName"]: group for group in spec["workerGroupSpecs"]} | {HEAD_GROUP: spec["headGroupSpec"]}
        parameters = groups[pod.group]["rayStartParams"]
        shared = quantity(pod.volumes[pod.main.mounts["/dev/shm"]["name"]]["emptyDir"]["sizeLimit"])
        assert int(parameters["object-store-memory"]) <= shared, f"{pod}: the raylet would not start"


def on_volume(pod: PodTemplate, container: Container, path: str) -> Document:
    """The volume that holds a container's path. Raises AssertionError if the path is on the read-only root."""
    holding = [mount for mount in container.mounts if path == mount or path.startswith(mount.rstrip("/") + "/")]
    assert holding, f"{pod} {container.name}: {path} is on the read-only root file system"
    mount = container.mounts[max(holding, key=len)]
    claims = {
        claim["metadata"]["name"]: {"persistentVolumeClaim": {}}
        for claim in pod.owner.at("spec", "volumeClaimTemplates", default=[])
    }
    return {**pod.volumes, **claims}[mount["name"]] | {"readOnly": mount.get("readOnly", False)}


@each("case", CASES)
def test_folders_that_variables_name_are_writable(case: Case) -> None:
    for pod in render(case).pods:
        for container in pod.containers:
            folders = {name: entry["value"] for name, entry in container.env.items() if name in WRITTEN}
            for name, folder in folders.items():
                volume = on_volume(pod, container, folder)
                assert set(volume) & set(WRITABLE), f"{pod} {container.name} {name}={folder}: {volume}"
                assert not volume["readOnly"], f"{pod} {container.name} {name}={folder}"


@each("case", CASES)
def test_penstock_containers_have_a_temporary_folder_and_a_home(case: Case) -> None:
    for pod in render(case).pods:
        if pod.component in ("redis", "uninstall"):
            continue
        for container in pod.containers:
            volume = on_volume(pod, container, "/tmp")
            assert "emptyDir" in volume, f"{pod} {container.name}"
            assert "sizeLimit" in volume["emptyDir"], f"{pod} could fill the node's disk"
            assert container.env["HOME"]["value"] == "/tmp/home", f"{pod} {container.name}"


@each("case", CASES)
def test_penstock_files_named_by_variables_are_mounted(case: Case) -> None:
    for pod in render(case).pods:
        for container in pod.containers:
            for name, entry in container.env.items():
                if re.fullmatch(r"PENSTOCK_(BOUNDS|\w+_FILE)", name):
                    on_volume(pod, container, entry["value"])


@each("case", CASES)
def test_runs_are_stored_where_the_values_say(case: Case) -> None:
    kind = case.values.get("storage", {}).get("kind", "claim") if not case.files else None
    for pod in ray_pods(case):
        if pod.component in ("verifier", "verifier-code"):
            continue
        assert pod.main.env["PENSTOCK_RUNS"]["value"] == RUNS, pod
        volume = on_volume(pod, pod.main, RUNS)
        if kind == "claim":
            assert "persistentVolumeClaim" in volume, pod
            assert "PENSTOCK_STORE" not in pod.main.env, pod
        if kind == "s3":
            assert pod.main.env["PENSTOCK_STORE"]["value"].startswith("s3://bucket"), pod
            assert "persistentVolumeClaim" not in volume, f"{pod}: a bucket needs no shared volume"


def test_the_bucket_has_the_address_of_the_values() -> None:
    env = render(OBJECT_STORE).pod("learner").main.env
    assert env["PENSTOCK_STORE"]["value"] == "s3://bucket/team"
    assert env["AWS_ENDPOINT_URL"]["value"] == "https://minio.example.org:9000"
    assert env["AWS_REGION"]["value"] == "us-east-1"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert env[name]["valueFrom"]["secretKeyRef"] == {"name": "own-s3", "key": name}


def test_scratch_space_is_a_volume_or_the_nodes_disk() -> None:
    for case, kind in ((OBJECT_STORE, "emptyDir"), (OBJECT_STORE_BY_ROLE, "ephemeral")):
        pod = render(case).pod("rollout")
        assert kind in on_volume(pod, pod.main, RUNS), case
    volume = on_volume(
        render(OBJECT_STORE_BY_ROLE).pod("rollout"), render(OBJECT_STORE_BY_ROLE).pod("rollout").main, RUNS
    )
    claim = volume["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert (claim["storageClassName"], claim["resources"]["requests"]["storage"]) == ("fast", "300Gi")


def node_bound(pod: PodTemplate) -> list[dict[str, Any]]:
    """The rules that force pods of a release onto one node."""
    rules: list[dict[str, Any]] = (
        pod.spec.get("affinity", {}).get("podAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", [])
    )
    return [rule for rule in rules if rule["topologyKey"] == "kubernetes.io/hostname"]


def test_only_a_volume_of_one_node_keeps_its_pods_together() -> None:
    for role in ("cpu", "rollout", "learner"):
        assert node_bound(render(DEFAULTS).pod(role)), f"{role} may start on a node that cannot mount its volume"
        assert not node_bound(render(SHARED_CLAIM).pod(role)), role
        assert not node_bound(render(OBJECT_STORE).pod(role)), role
    assert not node_bound(render(DEFAULTS).pod("verifier"))


def test_a_volume_for_many_nodes_is_only_requested_if_chosen() -> None:
    for case in (DEFAULTS, CPU, OBJECT_STORE):
        for claim in render(case).all("PersistentVolumeClaim"):
            assert claim.at("spec", "accessModes") == ["ReadWriteOnce"], claim


def test_data_outlives_the_release_by_default() -> None:
    claim = render(DEFAULTS).one("PersistentVolumeClaim")
    assert claim.kept
    assert claim.at("spec", "resources", "requests", "storage") == default_values()["storage"]["claim"]["size"]
    shared = render(NEW_SHARED_CLAIM).one("PersistentVolumeClaim")
    assert not shared.kept
    assert shared.at("spec", "accessModes") == ["ReadWriteMany"]
    assert shared.at("spec", "storageClassName") == "nfs"
    assert "storageClassName" not in claim.document["spec"], "an empty class is not the default class"
    assert not render(SHARED_CLAIM).has("PersistentVolumeClaim")


def test_redis_keeps_its_volume_by_default() -> None:
    redis = render(DEFAULTS).one("StatefulSet", "redis")
    assert (
        redis.at("spec", "persistentVolumeClaimRetentionPolicy", default={"whenDeleted": "Retain"})["whenDeleted"]
        == "Retain"
    )
    dropped = render(DEFAULTS.but({"redis": {"persistence": {"keep": False}}})).one("StatefulSet", "redis")
    assert dropped.at("spec", "persistentVolumeClaimRetentionPolicy", "whenDeleted") == "Delete"


def test_redis_fits_its_memory_and_four_times_into_its_disk() -> None:
    values, pod = default_values()["redis"], render(DEFAULTS).pod("redis")
    limit = quantity(pod.main.document["resources"]["limits"]["memory"])
    assert values["maxMemoryMiB"] * 2**20 <= 0.75 * limit
    claim = render(DEFAULTS).one("StatefulSet", "redis").at("spec", "volumeClaimTemplates", 0)
    assert quantity(claim["spec"]["resources"]["requests"]["storage"]) >= 4 * values["maxMemoryMiB"] * 2**20
