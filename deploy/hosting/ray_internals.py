"""Owns every use of Ray's private API. Tested with Ray 2.60.0; pyproject.toml pins that release.

Must not decide anything: each function wraps one call for which Ray has no public equivalent. An upgrade of Ray has to
check each of them (tests/deploy/test_hosting*.py and tests/cluster run them all):

- `actor_row` (ray._private.state.actors): state, restarts and process of an actor, to notice processes that keep dying.
- `living_nodes`, `request_drain` (ray._raylet.GcsClient): join and drain of a pod's node, without being a Ray driver.
- `serve_applications` (Serve's controller): state and replicas of an application, with address and process id.
- `set_replicas` (Serve's controller): a new replica count that leaves the other replicas running.
- `delete_application` (serve.delete without waiting): all fleets of a run drain at the same time.
- `local_node_options` (ray.init): the node's address and folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
from ray import NodeID
from ray._private.state import actors as actor_table
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # missing in its stub
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

TRIED_WITH = "2.60.0"


def actor_row(actor: Any) -> dict[str, Any]:
    """An actor's row in Ray's actor table: "State", "NumRestarts", "Address", "Pid". Blocks for a round trip."""
    row: dict[str, Any] = actor_table(actor._actor_id.hex())
    return row


def living_nodes(gcs: str, timeout_s: float) -> set[str]:
    """The ids of the living nodes, in hex. `gcs`: host:port of the cluster's control store. Raises RayError.

    Ray waits some seconds for a connection, then `timeout_s` seconds for the answer.
    """
    nodes = GcsClient(address=gcs).get_all_node_info(timeout=timeout_s)
    return {NodeID.from_binary(info.node_id).hex() for info in nodes.values() if info.state == 0}


def request_drain(gcs: str, node: str, until_ms: int, timeout_s: float) -> tuple[bool, str]:
    """Ask the control store to place nothing more on a node, which ends at `until_ms` (Unix time in milliseconds).

    Returns whether it accepted, and if not, why. Raises RayError.
    """
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why = GcsClient(address=gcs).drain_node(node, reason, "the pod ends", until_ms, timeout=timeout_s)
    return bool(accepted), str(why)


def _serve_controller() -> Any:
    """Raises RayServeException where Serve does not run."""
    # Serve is imported here because the first process of a pod needs this module but not Serve.
    from ray.serve.context import _get_global_client

    return _get_global_client()._controller


def serve_applications(timeout_s: float) -> dict[str, Any]:
    """What Serve knows of its applications, by name; empty where Serve does not run.

    Raises RayActorError, GetTimeoutError.
    """
    from ray.serve.exceptions import RayServeException

    try:
        controller = _serve_controller()
    except RayServeException:
        return {}
    found: dict[str, Any] = ray.get(controller.get_serve_instance_details.remote(), timeout=timeout_s)["applications"]
    return found


def set_replicas(application: str, deployment: str, replicas: int, timeout_s: float) -> None:
    """Change a deployment's number of replicas. Raises RayServeException, RayActorError, GetTimeoutError.

    This is the call of Serve's external scaler and changes nothing but the target. A new `serve.run` would give the
    deployment a new code version, and thereby restart every replica.
    """
    from ray.serve._private.common import DeploymentID

    identity = DeploymentID(name=deployment, app_name=application)
    ray.get(_serve_controller().update_deployment_replicas.remote(identity, replicas), timeout=timeout_s)


def delete_application(application: str) -> None:
    """Ask Serve to drain and end an application; returns at once."""
    from ray import serve

    serve.delete(application, _blocking=False)


def local_node_options(host: str, folder: Path) -> dict[str, Any]:
    """Options of ray.init that fix the address of a new local node, and its folder."""
    return {"_node_ip_address": host, "_temp_dir": str(folder)}
