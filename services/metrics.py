"""Owns the Prometheus metrics of every process and the page that serves them.

Must not be a second store: time series of a run are read from its journal.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from prometheus_client import Counter, Gauge, Histogram, start_http_server

MESSAGES = Counter("penstock_messages_total", "Messages handled, by stream and result.", ["run", "stream", "result"])
GROUPS = Gauge("penstock_groups", "Groups by state; dispatched is the sum of the others.", ["run", "state"])
PROMPTS_DROPPED = Gauge(
    "penstock_prompts_dropped", "Training prompts that are never drawn again, by cause.", ["run", "cause"]
)  # fmt: skip
STEP = Gauge("penstock_step_metric", "The last rollout step's metrics, by name.", ["run", "name"])
EVALUATION = Gauge("penstock_evaluation", "The last evaluation's avg@k, pass@k and maj@k.", ["run", "set", "score"])
POLICY_VERSION = Gauge("penstock_policy_version", "Policy version that this process holds.", ["run", "service"])
SKIPPED_OPTIMIZER_STEPS = Counter(
    "penstock_skipped_optimizer_steps_total", "Optimizer steps left out because their gradient was not finite.", ["run"]
)
TOKENS = Counter("penstock_response_tokens_total", "Response tokens generated.", ["run"])
SYNC_SECONDS = Histogram(
    "penstock_weight_sync_seconds", "Weight sync by phase.", ["run", "phase"],
    buckets=(0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60),
)  # fmt: skip
VERDICT_SECONDS = Histogram("penstock_verdict_seconds", "Time of one judgement.", ["run", "outcome"])
RUNS = Gauge("penstock_runs", "Runs by state.", ["state"])
REDIS_MEMORY = Gauge("penstock_redis_memory_share", "Share of Redis' maxmemory in use; 0 without one.", ["run"])
STARVATION_RUNG = Gauge(
    "penstock_starvation_rung", "Rung of the starvation ladder, 0 (none) to 4 (the run pauses).", ["run"]
)  # fmt: skip
WAIT_SECONDS = Gauge(
    "penstock_wait_seconds", "How long a process has been waiting, by what for.", ["run", "service", "wait"]
)  # fmt: skip
STALLED_WAITS = Gauge(
    "penstock_stalled_waits", "1 for a wait past its deadline, 0 for another.", ["run", "service", "wait"]
)  # fmt: skip


PORTS_VARIABLE = "PENSTOCK_METRICS_PORTS"


def serve_metrics(host: str) -> int:
    """Serve this process's metrics on a port of `host` that is free; the port.

    PENSTOCK_METRICS_PORTS, as `9400-9499`, bounds the choice, so that a firewall can let Prometheus through. Raises
    ValueError for another form, OSError when all of them are taken.
    """
    for port in metrics_ports():
        try:
            server, _ = start_http_server(port, addr=host)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        return int(server.server_port)
    raise OSError(
        errno.EADDRINUSE, f"every port of {PORTS_VARIABLE} = {os.environ[PORTS_VARIABLE]!r} is taken on {host}"
    )


def metrics_ports() -> Sequence[int]:
    """The ports to try, in this order; 0 stands for any free one."""
    text = os.environ.get(PORTS_VARIABLE)
    if not text:
        return (0,)
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 2**16):
        raise ValueError(f"{PORTS_VARIABLE}: value {text!r} is not accepted; a range of ports as 9400-9499 is")
    return range(int(first), int(last) + 1)
