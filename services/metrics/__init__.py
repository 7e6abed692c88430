"""Owns the Prometheus metrics of every process and the page that serves them.

Must not be a second store: time series of a run are read from its event log.

docs/operations/observability.md explains each metric. A process shows a run's metrics until it exits; the controller
removes those of a run with `forget`. A counter with known labels starts at 0 (`expose`): otherwise a rate would miss
its first event.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from itertools import product
from typing import Any

from prometheus_client import Counter, Gauge, Histogram, start_http_server
from prometheus_client.metrics import MetricWrapperBase

from services.contracts import DropReason, Lane, Outcome, SampleResult, SandboxFault, TaskResult, VerdictResult
from services.metrics.recent import forget_recent, recent_families
from services.metrics.tables import table_families

STREAMS = {kind: tuple(f"{lane.value}-{kind}" for lane in Lane) for kind in ("tasks", "samples", "verdicts")}
"""By kind: the streams that consumer groups read, as the label `stream` names them (lane and kind)."""
PORTS = "PENSTOCK_METRICS_PORTS"

# Runs, as the controller sees them.
RUNS = Gauge("penstock_runs", "Runs by state.", ["state"])
RUN_STATE = Gauge("penstock_run_state", "1 for the run's state, until an hour after its end.", ["run", "state"])
PROCESSES = Gauge("penstock_processes", "Live processes of a run.", ["run", "service", "state"])
REPLICAS_DESIRED = Gauge("penstock_replicas_desired", "Ready processes that a run should have.", ["run", "service"])

LEDGER_TOKENS = Gauge("penstock_ledger_tokens", "Response tokens of a run, by use.", ["run", "use"])
GPU_SECONDS = Gauge("penstock_gpu_seconds", "GPU time that a run was charged, by use.", ["run", "use"])
COST = Gauge("penstock_cost", "What a run has cost, in a currency.", ["run", "currency"])

# Tuning.
TUNING_DECISIONS = Counter(
    "penstock_tuning_decisions_total", "Decisions of tuning, by what they move.", ["run", "knob", "direction", "mode"]
)
TUNING_IDLE = Gauge(
    "penstock_tuning_idle_ratio", "Share of the time that the learner waited for batches, as tuning measured.", ["run"]
)
TUNING_IDLE_TARGET = Gauge("penstock_tuning_idle_target_ratio", "Target of that share.", ["run"])
TUNING_STALENESS = Gauge("penstock_tuning_staleness_steps", "Mean staleness, as tuning measured.", ["run"])
TUNING_STALENESS_TARGET = Gauge("penstock_tuning_staleness_target_steps", "Target of that mean.", ["run"])

# Every process of a run.
AVOIDED_PLACES = Gauge(
    "penstock_avoided_places",
    "Nodes and devices that a run avoids, because its processes failed there.",
    ["run", "service"],
)
LOST_GPUS = Gauge(
    "penstock_lost_gpus",
    "1 for GPUs that a run avoids because they reported an error that does not pass; the kind names it.",
    ["run", "service", "node", "device", "kind"],
)
GPU_ERRORS = Counter(
    "penstock_gpu_errors_total",
    "Errors of GPUs that run Penstock: Xids, uncorrected ECC errors, failed or pending remapping.",
    ["node", "device", "kind"],
)
_WAIT = ["run", "service", "wait"]
WAIT_SECONDS = Gauge("penstock_wait_seconds", "How long a process has been waiting, by reason.", _WAIT)
WAIT_DEADLINE_SECONDS = Gauge("penstock_wait_deadline_seconds", "Deadline of a current wait.", _WAIT)
STALLED_WAITS = Gauge("penstock_stalled_waits", "1 for a wait past its deadline, otherwise 0.", _WAIT)
EVENTS = Counter("penstock_events_total", "Events of a run, by phase.", ["run", "service", "phase"])

# The data plane.
_STREAM = ["run", "stream"]
GROUPS = Gauge("penstock_groups", "Groups by state; dispatched is the sum of the others.", ["run", "state"])
DROPPED_PROMPTS = Gauge("penstock_dropped_prompts", "Training prompts that are not drawn again.", ["run", "cause"])
UNKNOWN_SHARE = Gauge(
    "penstock_unknown_verdicts_ratio", "Unknown ones of the last training verdicts, of a batch of them.", ["run"]
)
STARVATION_LEVEL = Gauge("penstock_starvation_level", "Starvation level, 0 (none) to 4 (the run pauses).", ["run"])
MESSAGES = Counter("penstock_messages_total", "Messages handled, by stream and result.", [*_STREAM, "result"])
REDELIVERED_MESSAGES = Counter(
    "penstock_redelivered_messages_total",
    "Messages that another consumer claimed because their lease had expired.",
    _STREAM,
)
DEAD_LETTERS = Counter("penstock_dead_letters_total", "Messages that were dead-lettered, by cause.", ["run", "cause"])
STREAM_ENTRIES = Gauge("penstock_stream_entries", "Entries in a stream, acknowledged ones included.", _STREAM)
STREAM_PENDING = Gauge("penstock_stream_pending_entries", "Entries delivered and not yet acknowledged.", _STREAM)
STREAM_LAG = Gauge("penstock_stream_lag_entries", "Entries not delivered yet; NaN if unknown.", _STREAM)
STREAM_IDLE_SECONDS = Gauge(
    "penstock_stream_oldest_idle_seconds", "Longest time since a lease was renewed; 0 without leases.", _STREAM
)
DAMAGED_PAYLOADS = Counter(
    "penstock_damaged_payloads_total", "Payloads found missing or damaged, by service.", ["run", "service"]
)
REDIS_OUTAGE = Gauge(
    "penstock_redis_outage_seconds", "How long Redis has not answered this process; 0 while it answers."
)
REDIS_MEMORY = Gauge(
    "penstock_redis_memory_ratio", "Used part of Redis' maxmemory; 0 without a limit, NaN if not known.", ["run"]
)

# Generation and weights.
TOKENS = Counter("penstock_response_tokens_total", "Response tokens generated.", ["run"])
KEPT_TOKENS = Counter(
    "penstock_kept_tokens_total", "Tokens of half-drawn responses that another replica went on from.", ["run"]
)
DROPPED_TOKENS = Counter(
    "penstock_dropped_tokens_total", "Tokens that were drawn and are drawn again, by reason.", ["run", "reason"]
)
POLICY_VERSION = Gauge("penstock_policy_version", "Policy version that this process holds.", ["run", "service"])
SYNC_SECONDS = Histogram(
    "penstock_weight_sync_seconds",
    "Duration of a weight sync, by phase.",
    ["run", "phase"],
    # To twice the highest weights.timeout_s of a shipped recipe: a quantile never exceeds the last finite bucket.
    buckets=(0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 90, 120, 180, 300, 450, 600),
)
SYNC_FAILURES = Counter(
    "penstock_weight_sync_failures_total",
    "Weight syncs that failed: broadcasts of the learner, plans of a rollout replica.",
    ["run", "service"],
)

# Verification.
VERDICT_SECONDS = Histogram(
    "penstock_verdict_seconds",
    "Duration of a judgement, by outcome.",
    ["run", "outcome"],
    buckets=(0.005, 0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60),
)
FAULTS = Counter("penstock_sandbox_faults_total", "Judgements that failed in the sandbox.", ["run", "fault"])

# Learning and evaluation; the metrics of a rollout step are in services.metrics.tables.
SKIPPED_OPTIMIZER_STEPS = Counter(
    "penstock_skipped_optimizer_steps_total", "Optimizer steps skipped for a non-finite gradient.", ["run"]
)
EVALUATION_SCORE = Gauge(
    "penstock_evaluation_score_ratio",
    "avg@k, pass@k, maj@k and mean score of the last evaluation.",
    ["run", "set", "score"],
)
EVALUATION_PROMPTS = Gauge(
    "penstock_evaluation_prompts", "Prompts of the last evaluation, answered or dropped.", ["run", "set", "result"]
)

# Trackers.
TRACKED_ROWS = Counter(
    "penstock_tracked_rows_total", "Rows that a sink of the tracker took, by kind.", ["run", "sink", "kind"]
)
TRACKING_FAILURES = Counter("penstock_tracking_failures_total", "Failures of a tracker's sink.", ["run", "sink"])

# The API.
API_SECONDS = Histogram(
    "penstock_api_request_seconds",
    "Duration of a request, by route template.",
    ["route", "method", "status"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)

_Labels = tuple[dict[str, str], ...]


def _of(**values: tuple[str, ...]) -> _Labels:
    """Every combination of the labels' values."""
    return tuple(dict(zip(values, combination, strict=True)) for combination in product(*values.values()))


AT_ZERO: dict[str, tuple[tuple[MetricWrapperBase, _Labels], ...]] = {
    "sampler": (
        (REDELIVERED_MESSAGES, _of(stream=STREAMS["verdicts"])),
        (MESSAGES, _of(stream=STREAMS["verdicts"], result=tuple(VerdictResult))),
    ),
    "rollout": (
        (TOKENS, _of()),
        (KEPT_TOKENS, _of()),
        (DROPPED_TOKENS, _of(reason=tuple(DropReason))),
        (REDELIVERED_MESSAGES, _of(stream=STREAMS["tasks"])),
        (MESSAGES, _of(stream=STREAMS["tasks"], result=tuple(TaskResult))),
        (SYNC_FAILURES, _of(service=("rollout",))),
        (SYNC_SECONDS, _of(phase=("staging", "pause"))),
    ),
    "verifier": (
        (VERDICT_SECONDS, _of(outcome=tuple(Outcome))),
        (FAULTS, _of(fault=tuple(SandboxFault))),
        (REDELIVERED_MESSAGES, _of(stream=STREAMS["samples"])),
        (MESSAGES, _of(stream=STREAMS["samples"], result=tuple(SampleResult))),
        (DAMAGED_PAYLOADS, _of(service=("verifier",))),
    ),
    "learner": (
        (SKIPPED_OPTIMIZER_STEPS, _of()),
        (SYNC_FAILURES, _of(service=("learner",))),
        (SYNC_SECONDS, _of(phase=("form", "broadcast", "publish"))),
        (DAMAGED_PAYLOADS, _of(service=("learner",))),
    ),
}
"""By service: the counters of its processes, each with its labels other than the run."""


def expose(run: str, service: str) -> None:
    """Show the counters of a process of this service as 0."""
    for family, combinations in AT_ZERO.get(service, ()):
        for labels in combinations:
            family.labels(run=run, **labels)


def families() -> Iterator[MetricWrapperBase]:
    """Every metric of Penstock: those of this module in its order, then those of the tables and of the windows."""
    yield from (family for family in list(globals().values()) if isinstance(family, MetricWrapperBase))
    yield from table_families()
    yield from recent_families()


def forget(run: str) -> None:
    """Remove every metric of this run, except its state: its process has ended, or the controller released it."""
    for family in families():
        if "run" in family._labelnames and family is not RUN_STATE:
            family.remove_by_labels({"run": run})
    forget_recent(run)


def metrics_ports() -> range:
    """The ports that a metrics page may use: PENSTOCK_METRICS_PORTS, or any free port (0) if it is not set.

    Raises ValueError for a range that is not valid.
    """
    text = os.environ.get(PORTS, "")
    if not text:
        return range(1)
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 0 < first <= last < 65536:
        raise ValueError(f"{PORTS}: {text!r} is not valid: expected FIRST-LAST within 1-65535, such as 9400-9499")
    return range(first, last + 1)


def _as_text(page: Any) -> Any:
    """The page in Prometheus' text format alone, whatever a client accepts.

    As OpenMetrics, prometheus-client 0.26 writes the samples of `vllm:x` as `vllm_x`, but only for some clients.
    """

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        return page({**environ, "HTTP_ACCEPT": "text/plain; version=0.0.4"}, start_response)

    return answer


def serve_metrics(host: str) -> int:
    """Serve this process's metrics on a free port of `host`; returns the port.

    Raises OSError if every port of PENSTOCK_METRICS_PORTS is in use, ValueError if that range is not valid.
    """
    for port in metrics_ports():
        try:
            server, _ = start_http_server(port, addr=host)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            server.set_app(_as_text(server.get_app()))
            return int(server.server_port)
    raise OSError(errno.EADDRINUSE, f"{PORTS}: no port of {os.environ.get(PORTS, '')!r} is free at {host}")
