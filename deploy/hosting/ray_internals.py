"""Owns every use of Ray's private API. Tested with Ray 2.60.0; pyproject.toml pins that release.

Must not decide anything: each function wraps one call for which Ray has no public equivalent. An upgrade of Ray has to
check each of them (tests/deploy/test_hosting*.py, test_ray_start.py and tests/cluster run them):

- `actor_id` (of an actor's handle): finds the actor in Ray's tables.
- `actor_row` (ray._private.state.actors): state, restarts and process of an actor, to notice processes that keep dying.
- `actor_location` (ray._private.state, its actor table): the GPUs that Ray gave to an actor, also after its death.
- `available_resources` (ray._private.state): what no process takes, by node; Ray's own call adds the nodes up.
- `living_nodes`, `request_drain` (ray._raylet.GcsClient): join and drain of a pod's node, without being a Ray driver.
- `store_reader` (ray._raylet.GcsClient): whether the control store still reaches its Redis.
- `serve_applications` (Serve's controller): state and replicas of an application, with address and process id.
- `set_replicas` (Serve's controller): a new replica count that leaves the other replicas running.
- `delete_application` (serve.delete without waiting): all fleets of a run drain at the same time.
- `bind_replica` (add_port_to_grpc_server of Serve's replicas): one address; Ray listens on every interface.
- `use_token` (Config, AuthenticationTokenLoader): the token; Ray has read its variables when it was imported.
- `local_node_options` (ray.init): the node's address and folder.
- `patient_start` (RayParams, start_ray_process, get_node, ENABLE_RAY_CLUSTER): ports for a new node's agents, a longer
  deadline for its start, and a loopback address if it is given one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import ActorID, NodeID
from ray._private import parameter, ray_constants, services
from ray._private.state import actors as actor_table
from ray._private.state import state as global_state
from ray._raylet import AuthenticationTokenLoader, Config, GcsClient  # type: ignore[attr-defined]  # not in its stub
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from ray.core.generated.gcs_pb2 import ActorTableData

log = logging.getLogger(__name__)

TRIED_WITH = "2.60.0"
LISTEN_PORT = "dashboard_agent_listen_port"
AGENT_PORTS = (LISTEN_PORT, "metrics_agent_port", "metrics_export_port", "runtime_env_agent_port")
ASK_AGAIN_S = 0.5


class NodeStartError(Exception):
    """A new Ray node died, or did not register with the control store in time.

    No RuntimeError: after one of those, ray.init would wait again.
    """


def actor_id(actor: Any) -> str:
    """An actor's id, in hexadecimal digits."""
    return str(actor._actor_id.hex())


def actor_row(actor: Any) -> dict[str, Any]:
    """An actor's row in Ray's actor table: "State", "NumRestarts", "Address", "Pid". Blocks for a round trip."""
    row: dict[str, Any] = actor_table(actor_id(actor))
    return row


def actor_location(actor: str) -> tuple[str, list[int]] | None:
    """The node of an actor, by its id in hex, and its GPUs' numbers there, also after its death; None if unknown.

    Blocks for a round trip.
    """
    stored = global_state.get_actor_info(ActorID.from_hex(actor))
    if stored is None:
        return None
    row = ActorTableData.FromString(stored)
    node = row.address.node_id or row.node_id
    gpus = [each.index for kind in row.resource_mapping if kind.name == "GPU" for each in kind.resource_ids]
    return (NodeID(node).hex(), gpus) if node else None


def available_resources() -> dict[str, dict[str, float]]:
    """What no process takes of each living node, by the node's id in hex; may be a second old. Blocks."""
    found: dict[str, dict[str, float]] = global_state.available_resources_per_node()
    return found


def living_nodes(gcs: str, timeout_s: float) -> set[str]:
    """The ids of the living nodes, in hex. `gcs`: host:port of the cluster's control store. Raises RayError.

    Ray waits some seconds for a connection, then `timeout_s` seconds for the answer.
    """
    nodes = GcsClient(address=gcs).get_all_node_info(timeout=timeout_s)
    return {NodeID.from_binary(info.node_id).hex() for info in nodes.values() if info.state == 0}


def store_reader(gcs: str) -> Callable[[float], None]:
    """A function that makes the control store read a key from its Redis within some seconds; it raises RayError.

    Internal keys are not cached there; the key does not exist. Raises RayError if the store cannot be reached.
    """
    client = GcsClient(address=gcs)

    def read(timeout_s: float) -> None:
        client.internal_kv_get(b"check", b"penstock", timeout=timeout_s)

    return read


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


def bind_replica(host: str) -> None:
    """Make the Serve replica in this process listen for calls on `host` alone. Call it in the replica's constructor.

    Serve unpickles such calls. Penstock makes none, but the port cannot be closed.
    """
    from ray.serve._private import replica

    replica.add_port_to_grpc_server = partial(_add_port, replica.add_port_to_grpc_server, host)


def _add_port(add_port: Any, host: str, server: Any, address: str) -> Any:
    return add_port(server, f"{host}:{address.rpartition(':')[2]}")


def use_token(file: Path) -> None:
    """Make this process, and those that it starts from now on, demand the token in `file` and present it."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def local_node_options(host: str, folder: Path) -> dict[str, Any]:
    """Options of ray.init that fix the address of a new local node, and its folder."""
    return {"_node_ip_address": host, "_temp_dir": str(folder)}


@contextmanager
def patient_start(deadline_s: float, free_ports: Callable[[int], list[int]]) -> Iterator[None]:
    """Inside it, ray.init waits `deadline_s` seconds for its new node. Raises NodeStartError.

    Ray by itself waits 30 s, and its raylet 15 s for the ports that the node's agents choose: too short for a busy
    laptop, and neither is a setting. The agents get their ports here, then the raylet does not wait for them. Ray gives
    its raylet three of the four ports by itself.
    """
    ports = dict(zip(AGENT_PORTS, free_ports(len(AGENT_PORTS)), strict=True))
    found = partial(_registered, services.get_node, time.monotonic() + deadline_s)
    start = partial(_start, services.start_ray_process, f"--{LISTEN_PORT}={ports[LISTEN_PORT]}")
    with (
        _replaced(parameter, "RayParams", partial(_with_ports, parameter.RayParams, ports)),
        _replaced(services, "start_ray_process", start),
        _replaced(services, "get_node", found),
        # Its variable is read when Ray is imported, which may have been before it was set. Ray's processes inherit it.
        _replaced(ray_constants, "ENABLE_RAY_CLUSTER", False),
    ):
        yield


def _with_ports(params: Any, ports: dict[str, int], **options: Any) -> Any:
    return params(**(options | ports))


def _start(start: Any, option: str, command: list[str], process_type: str, **options: Any) -> Any:
    return start([*command, option] if process_type == "raylet" else command, process_type, **options)


def _registered(get_node: Any, ends: float, gcs: str, node: str) -> dict[str, Any]:
    """What the control store knows of the node, once it has registered."""
    while True:
        try:
            row: dict[str, Any] = get_node(gcs, node)
            return row
        except RuntimeError as error:
            log.info("Ray's new node has not registered: %s", error)
        if not any(_is_raylet(child) for child in psutil.Process().children()):
            raise NodeStartError("Ray's node process died while it started; its logs show the reason")
        if time.monotonic() > ends:
            raise NodeStartError("Ray's node process has not registered in time; its logs show the reason")
        time.sleep(ASK_AGAIN_S)


def _is_raylet(process: psutil.Process) -> bool:
    try:
        return process.name() == "raylet" and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)
