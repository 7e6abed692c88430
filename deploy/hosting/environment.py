"""Owns the environment variables of every process that Ray starts for us.

Must not import ray: the variables have to be there before it is imported.
"""

from __future__ import annotations

import os

NAMESPACE = "penstock"

ROLES = ("head", "cpu", "verifier", "rollout", "learner")
"""What a Ray node may serve: the gateway, the samplers and what prepares models, and the services of those names."""
SLOTS = 1000
"""How many processes of a role fit on a node that serves it, as far as the role is concerned."""

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}

# Read by Ray's own processes when they start.
RAY = {
    # A killed replica leaves an engine process behind; this makes the raylet end the dead worker's whole group.
    "RAY_process_group_cleanup_enabled": "1",
    # Every process here has variables of its own, so a prestarted worker could serve none of them.
    "RAY_prestart_worker_first_driver": "0",
    # Ray runs its workers at nice 15. Ours renew leases and answer within deadlines, which a busy machine would miss.
    "RAY_worker_niceness": "0",
    # A replica that hangs cannot drain, and would keep its GPU from its replacement while it is asked to.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # Ray would otherwise advise on standard error about settings that are deliberate here.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}

RAY_IN_A_POD = {
    # Container logs are read from standard error; files in a pod die with it.
    "RAY_LOG_TO_STDERR": "1",
    "RAY_SERVE_LOG_TO_STDERR": "1",
    "RAY_BACKEND_LOG_LEVEL": "warning",
    # The pod's first process drains the node, together with the services on it.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}


def head_environment(host: str, runs: str) -> dict[str, str]:
    """The variables of a Ray head on this machine: ours, without those that would point it at another cluster."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_NAMESPACE")}
    return {**inherited, **QUIET, **RAY, "PENSTOCK_HOST": host, "PENSTOCK_RUNS": runs}


def cluster_environment() -> dict[str, str]:
    """The variables of a node's Ray in a pod: ours beside those that KubeRay and the chart have set."""
    return {**os.environ, **QUIET, **RAY, **RAY_IN_A_POD}


def process_environment(threads: int) -> dict[str, str]:
    """The variables of one service's process; `threads` bounds its OpenMP and MKL threads."""
    # PENSTOCK_HOST is not among them: it is the node's, and what Ray starts there inherits it.
    forwarded = ("PENSTOCK_RUNS", "PENSTOCK_LOG_LEVEL", "TORCH_EXTENSIONS_DIR")
    return {
        **QUIET,
        **{name: os.environ[name] for name in forwarded if name in os.environ},
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # Spinning OpenMP threads would starve the other services of a small machine.
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def serving(*roles: str) -> dict[str, float]:
    """The custom Ray resources of a node that serves `roles`."""
    return {_resource(role): float(SLOTS) for role in roles}


def place(role: str) -> dict[str, float]:
    """The custom Ray resource that one process of a role takes: it keeps others off the nodes that are not theirs."""
    return {_resource(role): 1.0}


def _resource(role: str) -> str:
    assert role in ROLES, role
    return f"{NAMESPACE}-{role}"
