"""Owns what the first process of a pod asks Ray about the node that it has started: whether it joined, and its drain.

Must not start or end processes.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import NamedTuple

import psutil
from ray import NodeID
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # its stub leaves it out
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from ray.exceptions import RayError

log = logging.getLogger(__name__)

ASK_S = 5.0


class Node(NamedTuple):
    """A Ray node: its id, and where its cluster's control store (GCS) listens, as host:port."""

    id: str
    gcs: str


def started_node(process: psutil.Process) -> Node | None:
    """The node whose raylet runs below `process`; None while there is none."""
    try:
        below = process.children(recursive=True)
    except psutil.NoSuchProcess:
        return None
    for one in below:
        try:
            if one.name() != "raylet":
                continue
            options = dict(part.split("=", 1) for part in one.cmdline() if part.startswith("--") and "=" in part)
        except psutil.NoSuchProcess:
            continue
        if "--node_id" in options and "--gcs-address" in options:
            return Node(options["--node_id"], options["--gcs-address"])
    return None


def joined(node: Node) -> bool:
    """Whether the control store counts the node among the living; False when it does not answer.

    Ray waits some seconds for a connection, and then ASK_S seconds for the answer.
    """
    try:
        nodes = GcsClient(address=node.gcs).get_all_node_info(timeout=ASK_S)
    except RayError as error:
        log.info("Ray's control store at %s does not answer: %s", node.gcs, _first_line(error))
        return False
    alive = {NodeID.from_binary(info.node_id).hex() for info in nodes.values() if info.state == 0}
    return node.id in alive


def drain(node: Node, deadline_s: float) -> None:
    """Have nothing more placed on the node, which ends within `deadline_s` seconds; what cannot be done is logged.

    Returns after ASK_S seconds at the latest: Ray connects under a limit of its own, which leaves no time to drain.
    """
    asking = threading.Thread(target=_ask_to_drain, args=(node, deadline_s), name="ray-drain", daemon=True)
    asking.start()
    asking.join(ASK_S)
    if asking.is_alive():
        log.warning("Ray's control store at %s has not answered in %g s; it may still place here", node.gcs, ASK_S)


def _ask_to_drain(node: Node, deadline_s: float) -> None:
    until_ms = int((time.time() + deadline_s) * 1000)
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    try:
        accepted, why = GcsClient(address=node.gcs).drain_node(node.id, reason, "the pod ends", until_ms, timeout=ASK_S)
    except RayError as error:
        log.warning("Ray's control store at %s was not told of the drain: %s", node.gcs, _first_line(error))
        return
    if not accepted:
        log.warning("Ray refuses to drain node %s: %s", node.id, why)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
