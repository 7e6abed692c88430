"""Owns the Prometheus metrics of every process and the page that serves them.

Must not be a second store: time series of a run are read from its journal.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram, start_http_server

MESSAGES = Counter("penstock_messages_total", "Messages handled, by stream and result.", ["run", "stream", "result"])
GROUPS = Gauge("penstock_groups", "Groups by state; dispatched is the sum of the others.", ["run", "state"])
STEP = Gauge("penstock_step_metric", "The last rollout step's metrics, by name.", ["run", "name"])
POLICY_VERSION = Gauge("penstock_policy_version", "Policy version that this process holds.", ["run", "service"])
TOKENS = Counter("penstock_response_tokens_total", "Response tokens generated.", ["run"])
SYNC_SECONDS = Histogram(
    "penstock_weight_sync_seconds", "Weight sync by phase.", ["run", "phase"],
    buckets=(0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60),
)  # fmt: skip
VERDICT_SECONDS = Histogram("penstock_verdict_seconds", "Time of one judgement.", ["run", "outcome"])
RUNS = Gauge("penstock_runs", "Runs by state.", ["state"])


def serve_metrics(host: str) -> int:
    """Serve this process's metrics on a free port of `host`; the port."""
    server, _ = start_http_server(0, addr=host)
    return int(server.server_port)
