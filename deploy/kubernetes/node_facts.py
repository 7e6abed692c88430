"""Owns what the first process of a worker pod tells about its node: labels for Ray, and why it cannot do its work.

Must not import ray or CUDA: it runs before Ray starts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path

from deploy.hosting.environment import GPU_LABEL, NODE_LABEL
from deploy.hosting.nodes.devices import DevicesUnreadableError, driver_problem, gpu_uuids
from services.streams.runs.node_problems import report_node

log = logging.getLogger(__name__)

NODE, GPUS = "PENSTOCK_NODE", "PENSTOCK_GPUS"
"""The chart's variables: the name of the pod's node, and how many GPUs its container requests."""
LABELS = "RAY_OVERRIDE_LABELS"
"""Ray's own variable for the labels of a node, as JSON."""
TERMINATION = Path("/dev/termination-log")
"""What a container writes there, Kubernetes shows in the status of its pod (`kubectl describe pod`)."""


def node_name() -> str:
    """The name of the pod's node; empty where the chart does not say it."""
    return os.environ.get(NODE, "")


def requested_gpus() -> int:
    """How many GPUs the pod's container requests."""
    return int(os.environ.get(GPUS) or 0)


def gpu_problem() -> str | None:
    """Why the pod's GPUs cannot be used, in one line; None if they can, or there are none."""
    gpus = requested_gpus()
    return driver_problem(gpus) if gpus else None


def label_variables() -> dict[str, str]:
    """Ray's variable with the labels of this node: its name, and the UUIDs of its GPUs."""
    labels: dict[str, str] = json.loads(os.environ.get(LABELS) or "{}")
    if name := node_name():
        labels[NODE_LABEL] = name
    try:
        uuids = gpu_uuids() if requested_gpus() else []
    except DevicesUnreadableError as error:
        log.warning("the UUIDs of the GPUs cannot be read: %s", error)
        uuids = []
    if len(uuids) != requested_gpus():
        log.warning("the GPUs are named by number: NVML sees %d, the pod requests %d", len(uuids), requested_gpus())
        uuids = []
    labels |= {f"{GPU_LABEL}{number}": uuid for number, uuid in enumerate(uuids)}
    return {LABELS: json.dumps(labels)} if labels else {}


def report(role: str, text: str, *, to_runs: bool = True) -> None:
    """Show in the pod's status why it ends, and in the runs that wait for it if its node cannot do its work."""
    try:
        if TERMINATION.exists():
            TERMINATION.write_text(text)
    except OSError as error:
        log.warning("the pod's status cannot show why it ends: %s", error)
    if to_runs:
        asyncio.run(report_node(os.environ.get("PENSTOCK_REDIS", ""), role, node_name() or "unknown", text))
