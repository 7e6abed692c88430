"""Owns the environment variables and custom resources of every process that Ray starts for us.

Must not import ray: the variables must be set before it is imported.
"""

from __future__ import annotations

import os
from pathlib import Path

from services.storage.hub.copies import OFFLINE

NAMESPACE = "penstock"
RECIPES = str(Path(__file__).parents[1] / "recipes")
"""The recipes that the page's form starts from."""

ROLES = ("head", "cpu", "verifier", "verifier-code", "rollout", "learner")
"""The roles of a Ray node: `head` hosts the gateway, `cpu` samplers and model preparation, the others the services.

`verifier-code` hosts the verifiers of runs whose rewards run programs.
"""
SLOTS = 1000
"""How many processes of a role a node accepts: more than ever start, so that a role only selects nodes."""

NODE_LABEL = "penstock.dev/node"
"""The label of a Ray node with the name of its machine, which stays when the pod is replaced."""
GPU_LABEL = "penstock.dev/gpu-"
"""With a GPU's number as Ray counts: the label of its node with its UUID."""

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}

HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""The secrets of the hub. Only the gateway, which may hold them for its node, and preparation keep them."""
TRACKER_SECRETS = ("WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "DATABRICKS_TOKEN")
"""The secrets of trackers. Of the services, only the tracker keeps them."""

OTHER_CLUSTER = ("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""What a user's shell may say about another Ray cluster."""

# Read by Ray's own processes when they start.
RAY = {
    # A killed replica leaves an engine process behind; with this the raylet kills the dead worker's process group.
    "RAY_process_group_cleanup_enabled": "1",
    # Every process has environment variables of its own, so a prestarted worker cannot be used.
    "RAY_prestart_worker_first_driver": "0",
    # Ray runs its workers at nice 15. On a busy machine ours would then miss lease renewals and deadlines.
    "RAY_worker_niceness": "0",
    # A replica that hangs cannot drain, and would keep its GPU from its replacement meanwhile.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # A busy laptop needs more than the 60 s that Ray gives by default.
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "120",
    # Here too: 30 s, after which the raylet ends, and no process can be placed.
    "RAY_agent_register_timeout_ms": "120000",
    # Serve's controller looks at its replicas ten times a second by default, and every process of Serve exports metrics
    # as often, which we do not read: with these, an idle stack takes a third less of a core. A replica that ended is
    # noticed up to 0.4 s later.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
    # Otherwise Ray warns on standard error about settings that are intended.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}

RAY_ON_A_LAPTOP = {
    # Otherwise Ray replaces a loopback address by that of the network, and listens on every interface. Ray does this by
    # default where it does not support clusters of machines, hence the name.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}

RAY_IN_A_POD = {
    # Logs of a container are collected from standard error; files in a pod are lost with it.
    "RAY_LOG_TO_STDERR": "1",
    "RAY_SERVE_LOG_TO_STDERR": "1",
    "RAY_BACKEND_LOG_LEVEL": "warning",
    # The control store ends after this many errors of one request (5 by default, 3 s), also while Redis refuses writes
    # because its memory or volume is full. deploy.hosting.nodes.ray_node notices if it has lost Redis.
    "RAY_num_redis_request_retries": "1000000",
    # The pod's first process drains the node and the services on it.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}


def head_environment(host: str, runs: str) -> dict[str, str]:
    """The variables of a Ray head on this machine, without those that point to another Ray cluster or its token."""
    inherited = {name: value for name, value in os.environ.items() if name not in OTHER_CLUSTER}
    ours = {**_hub_offline(), **QUIET, **RAY, **RAY_ON_A_LAPTOP, "PENSTOCK_HOST": host, "PENSTOCK_RUNS": runs}
    return {"PENSTOCK_RECIPES": RECIPES, **inherited, **ours}


def cluster_environment() -> dict[str, str]:
    """The variables of Ray in a pod: ours, and those that KubeRay and the chart have set."""
    return {**os.environ, **_hub_offline(), **QUIET, **RAY, **RAY_IN_A_POD}


def _hub_offline() -> dict[str, str]:
    """Whether the operator wants no connection to the hub: QUIET sets the hub's own variable for everything."""
    return {OFFLINE: os.environ.get(OFFLINE, os.environ.get("HF_HUB_OFFLINE", ""))}


def service_environment(threads: int, gpus: float, *, tracks: bool = False) -> dict[str, str]:
    """The variables of one service's process, without secrets that it would inherit from its node.

    `tracks`: it is the tracker, which needs those of trackers.
    With 0 `gpus` it sees none of its node's, which Ray leaves visible: torch would use them.
    """
    hidden = {} if gpus else {"CUDA_VISIBLE_DEVICES": ""}
    secrets = {} if tracks else dict.fromkeys(TRACKER_SECRETS, "")
    return process_environment(threads) | dict.fromkeys(HUB_TOKENS, "") | secrets | hidden


def process_environment(threads: int) -> dict[str, str]:
    """The variables of the gateway and of preparation; `threads` limits a process's OpenMP and MKL threads.

    Ray shows these variables to all that may ask it, so that no secret is among them; a process inherits its node's.
    """
    # PENSTOCK_HOST is not forwarded: it belongs to the node, whose processes inherit it from Ray.
    forwarded = ("PENSTOCK_RUNS", "PENSTOCK_LOG_LEVEL", "TORCH_EXTENSIONS_DIR")
    return {
        **QUIET,
        **{name: os.environ[name] for name in forwarded if name in os.environ},
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # OpenMP threads that spin while waiting would starve the other services on a small machine.
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def serving(*roles: str) -> dict[str, float]:
    """The custom Ray resources of a node with these roles."""
    return {_resource(role): float(SLOTS) for role in roles}


def place(role: str) -> dict[str, float]:
    """The custom Ray resource that one process of a role takes; only nodes with that role have it."""
    return {_resource(role): 1.0}


def _resource(role: str) -> str:
    assert role in ROLES, role
    return f"{NAMESPACE}-{role}"
