"""Owns where a learner's ranks may be placed: apart from the nodes that its run avoids, if there is room elsewhere.

Must not place or end ranks.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping

import ray

from deploy.hosting.environment import NODE_LABEL
from deploy.hosting.nodes.places import Locations, may_grow, node_name, role_nodes
from deploy.hosting.nodes.ray_node import Node, drain
from deploy.hosting.ray_internals import available_resources
from services.streams.runs.places import AVOIDED_S, AvoidedPlace

log = logging.getLogger(__name__)

ROLE = "learner"
RAY_NODE_LABEL = "ray.io/node-id"
TINY = 1e-6
DRAINED_S = 60.0
"""By when a node that is left has ended."""
REASON = "ranks failed"


def room_elsewhere(
    ranks: int, needs: Mapping[str, float], avoided: Collection[str], own: Collection[str] | None = None
) -> bool:
    """Whether all ranks have room on nodes whose names are not `avoided`. `needs`: of one rank, by Ray's resource.

    `own`: the ids of the nodes that have room for these ranks reserved, one for each rank: then only what others leave
    counts; without it all that the nodes have.
    """
    nodes = role_nodes(ROLE)
    others = [node for node in nodes if node_name(node) not in avoided]
    if may_grow(ROLE, len(nodes)):
        return True
    if own is None:
        return sum(held(node["Resources"], needs) for node in others) >= ranks
    free, reserved = available_resources(), Counter(own)
    left = (held(free.get(node["NodeID"], {}), needs, reserved[node["NodeID"]]) for node in others)
    return sum(left) >= ranks


def held(resources: Mapping[str, float], needs: Mapping[str, float], reserved: int = 0) -> int:
    """How many ranks a node holds with these resources, and those of so many ranks that are `reserved` there."""
    wanted = {kind: amount for kind, amount in needs.items() if amount}
    fitting = (int(resources.get(kind, 0.0) / amount + reserved + TINY) for kind, amount in wanted.items())
    return min(fitting, default=1)


def replaceable(ray_node: str) -> bool:
    """Whether the node is a pod, which Kubernetes replaces once it has ended."""
    return any(node["NodeID"] == ray_node and NODE_LABEL in node["Labels"] for node in role_nodes(ROLE))


def of_ranks(avoided: Collection[AvoidedPlace]) -> list[AvoidedPlace]:
    """The places that ranks avoid."""
    return [place for place in avoided if place.service == ROLE]


def selector(ranks: int, needs: Mapping[str, float], avoided: Collection[AvoidedPlace]) -> dict[str, str] | None:
    """The labels that a rank's node must have, so that none is avoided; None if there is no room elsewhere."""
    names = {place.node for place in of_ranks(avoided)}
    if not names:
        return None
    if not room_elsewhere(ranks, needs, names):
        log.warning("the learner has no room apart from %s; it is placed there again", ", ".join(sorted(names)))
        return None
    ids = [node["NodeID"] for node in role_nodes(ROLE) if node_name(node) in names]
    named = sorted(names - set(ids))
    found = {RAY_NODE_LABEL: f"!in({','.join(ids)})"} if ids else {}
    return found | ({NODE_LABEL: f"!in({','.join(named)})"} if named else {}) or None


def leave(avoided: Collection[AvoidedPlace]) -> None:
    """Drain the pods in which the ranks failed: each ends when nothing runs there any more, and is replaced."""
    gcs = ray.get_runtime_context().gcs_address
    for place in of_ranks(avoided):
        if place.ray_node and replaceable(place.ray_node):
            log.warning("%s is drained: %s", place.place, place.reason)
            drain(Node(place.ray_node, gcs), DRAINED_S)


def blamed(
    faults: Mapping[str, str],
    died: str,
    locations: Locations,
    ranks: int,
    needs: Mapping[str, float],
    own: Collection[str],
) -> list[AvoidedPlace]:
    """The nodes that are behind these faults, by the rank's actor, if the ranks can leave them; else none.

    `own`: see `room_elsewhere`.
    Ranks whose process died (`died` is part of the fault) cause the errors of the others. If all died, no node is.
    """
    dead = [actor for actor, fault in faults.items() if died in fault] or list(faults)
    if len(dead) == ranks > 1:
        return []
    found = {where[0].node: where for actor in dead if (where := locations.find(actor))}
    return [
        AvoidedPlace(service=ROLE, node=node, count=1, reason=REASON, until=time.time() + AVOIDED_S, ray_node=ray_node)
        for node, (_, ray_node) in found.items()
        if room_elsewhere(ranks, needs, {node}, own) or replaceable(ray_node)
    ]
