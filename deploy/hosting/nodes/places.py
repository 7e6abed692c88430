"""Owns where a process is, as Ray knows it: its node and the GPUs that Ray gave it; and how many a role's nodes hold.

Must not decide which places are avoided.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import ray

from deploy.hosting.environment import GPU_LABEL, NODE_LABEL
from deploy.hosting.environment import place as role_resource
from deploy.hosting.nodes.deaths import Rooms
from deploy.hosting.ray_internals import actor_location, available_resources
from services.settings import ClusterLimitsError, load_cluster_limits
from services.streams.runs.places import TOGETHER, Location

log = logging.getLogger(__name__)

NODE_DIGITS = 12
"""So much of the id of a Ray node names it among those of one machine."""
TINY = 1e-6


def place_at(ray_node: str, gpus: Iterable[str], labels: Mapping[str, str]) -> Location:
    """The place of a process on a Ray node with these labels. `gpus`: their numbers as Ray counts."""
    devices = (device(ray_node, number, labels) for number in gpus)
    return Location(labels.get(NODE_LABEL, ray_node), TOGETHER.join(sorted(devices)))


def device(ray_node: str, number: str, labels: Mapping[str, str]) -> str:
    """The name of a GPU: its UUID; else its number, and on a machine that may host several pods its pod's node too."""
    without = f"{ray_node[:NODE_DIGITS]}.{number}" if NODE_LABEL in labels else number
    return labels.get(f"{GPU_LABEL}{number}", without)


def own_place() -> tuple[Location, str]:
    """The place of this process, an actor of Ray, and the id of its Ray node."""
    context = ray.get_runtime_context()
    gpus = context.get_accelerator_ids().get("GPU", [])
    return place_at(context.get_node_id(), map(str, gpus), context.get_node_labels()), str(context.get_node_id())


class Locations:
    """Where actors are, also after their death; remembers the labels of nodes. Its calls block for a round trip."""

    def __init__(self) -> None:
        self._labels: dict[str, Mapping[str, str]] = {}

    def find(self, actor: str) -> tuple[Location, str] | None:
        """The place of an actor and the id of its Ray node; None before it is placed. `actor`: its id, in hex."""
        located = actor_location(actor)
        if located is None:
            return None
        ray_node, gpus = located
        if ray_node not in self._labels:
            self._labels = {node["NodeID"]: dict(node["Labels"]) for node in ray.nodes()}
        return place_at(ray_node, map(str, gpus), self._labels.get(ray_node, {})), ray_node


def role_nodes(role: str) -> list[dict[str, Any]]:
    """The living nodes that host a role, as Ray lists them."""
    [resource] = role_resource(role)
    return [node for node in ray.nodes() if node["Alive"] and resource in node["Resources"]]


def rooms(role: str, cpus: float, gpus: float) -> Rooms:
    """The devices of the nodes of a role, whose processes take so many CPUs and GPUs each."""
    found, available = role_nodes(role), available_resources()
    held: dict[str, frozenset[str]] = {}
    spare: Counter[str] = Counter()
    for node in found:
        ray_node, labels, name = node["NodeID"], node["Labels"], node_name(node)
        numbers = map(str, range(int(node["Resources"].get("GPU", 0.0)))) if gpus else ()
        devices = frozenset(device(ray_node, number, labels) for number in numbers) if gpus else frozenset({""})
        held[name] = held.get(name, frozenset()) | devices
        left = available.get(ray_node, node["Resources"])
        if left.get("CPU", 0.0) + TINY >= cpus:
            spare[name] += left.get("GPU", 0.0) if gpus else 1
        else:
            spare[name] += 0
    return Rooms(held, gpus or 1, may_grow(role, len(found)), spare)


def node_name(node: Mapping[str, Any]) -> str:
    """The name of a node as Ray lists it: of its machine in a pod, else its id."""
    return str(node["Labels"].get(NODE_LABEL, node["NodeID"]))


def may_grow(role: str, nodes: int) -> bool:
    """Whether a chart allows more pods of the role than there are."""
    try:
        limits = load_cluster_limits()
    except ClusterLimitsError as error:
        log.warning("%s; whether %s may get more pods is unknown", error, role)
        return False
    return limits is not None and limits.of(role).all_pods > nodes
