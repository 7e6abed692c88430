"""Owns the Prometheus metrics of every process and the page that serves them.

Must not be a second store: time series of a run are read from its event log.

docs/operations/observability.md explains each. A metric of a run goes with the process that shows it; what the
controller shows of a run goes with `forget`. A counter whose labels are known is shown as 0 from the start (`expose`):
a rate over what appears with its first event would miss that event.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from itertools import product

from prometheus_client import Counter, Gauge, Histogram, start_http_server
from prometheus_client.metrics import MetricWrapperBase

from services.contracts import Lane, Outcome, SampleResult, SandboxFault, TaskResult, VerdictResult

STREAMS = {
    name: tuple(f"{lane.value}-{name}" for lane in Lane) for name in ("tasks", "samples", "verdicts")
}  # fmt: skip
"""What metrics call the streams that consumer groups read, by kind: lane and kind."""
PORTS = "PENSTOCK_METRICS_PORTS"

# Runs, as the controller sees them.
RUNS = Gauge("penstock_runs", "Runs by state.", ["state"])
RUN_STATE = Gauge(
    "penstock_run_state", "1 for the state that a run is in; for an hour after its end.", ["run", "state"]
)
SETTING = Gauge("penstock_setting", "Numbers of a run's recipe that alerts compare with, by path.", ["run", "name"])
PROCESSES = Gauge("penstock_processes", "Live processes of a run.", ["run", "service", "state"])
REPLICAS_WANTED = Gauge("penstock_replicas_wanted", "Processes that a run wants to have ready.", ["run", "service"])

# Every process of a run.
WAIT_SECONDS = Gauge(
    "penstock_wait_seconds", "How long a process has been waiting, by what for.", ["run", "service", "wait"]
)  # fmt: skip
WAIT_DEADLINE_SECONDS = Gauge(
    "penstock_wait_deadline_seconds", "How long a wait that is under way may last.", ["run", "service", "wait"]
)  # fmt: skip
STALLED_WAITS = Gauge(
    "penstock_stalled_waits", "1 for a wait past its deadline, 0 for another.", ["run", "service", "wait"]
)  # fmt: skip
EVENTS = Counter("penstock_events_total", "Events of a run, by their word.", ["run", "service", "phase"])

# The data plane.
GROUPS = Gauge("penstock_groups", "Groups by state; dispatched is the sum of the others.", ["run", "state"])
PROMPTS_DROPPED = Gauge(
    "penstock_prompts_dropped", "Training prompts that are never drawn again, by cause.", ["run", "cause"]
)  # fmt: skip
STARVATION_RUNG = Gauge(
    "penstock_starvation_rung", "Rung of the starvation ladder, 0 (none) to 4 (the run pauses).", ["run"]
)  # fmt: skip
MESSAGES = Counter("penstock_messages_total", "Messages handled, by stream and result.", ["run", "stream", "result"])
REDELIVERED_MESSAGES = Counter(
    "penstock_redelivered_messages_total", "Messages taken over because their lease had lapsed.", ["run", "stream"]
)  # fmt: skip
DEAD_LETTERS = Counter("penstock_dead_letters_total", "Messages that were given up, by cause.", ["run", "cause"])
STREAM_ENTRIES = Gauge("penstock_stream_entries", "Entries that a stream holds, acked ones too.", ["run", "stream"])
STREAM_PENDING = Gauge("penstock_stream_pending", "Entries under lease: delivered, not acked.", ["run", "stream"])
STREAM_LAG = Gauge("penstock_stream_lag", "Entries that nobody was given yet; NaN if not known.", ["run", "stream"])
STREAM_IDLE_SECONDS = Gauge(
    "penstock_stream_oldest_idle_seconds", "The longest that a lease has not been renewed for; 0 without leases.",
    ["run", "stream"],
)  # fmt: skip
DAMAGED_PAYLOADS = Counter(
    "penstock_damaged_payloads_total", "Payloads found missing or damaged, by who found them.", ["run", "service"]
)  # fmt: skip
REDIS_MEMORY = Gauge("penstock_redis_memory_share", "Share of Redis' maxmemory in use; 0 without one.", ["run"])

# Generation and weights.
TOKENS = Counter("penstock_response_tokens_total", "Response tokens generated.", ["run"])
POLICY_VERSION = Gauge("penstock_policy_version", "Policy version that this process holds.", ["run", "service"])
SYNC_SECONDS = Histogram(
    "penstock_weight_sync_seconds", "Weight sync by phase.", ["run", "phase"],
    buckets=(0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60),
)  # fmt: skip
SYNC_FAILURES = Counter(
    "penstock_weight_sync_failures_total", "Broadcasts that failed (learner), plans not followed (rollout).",
    ["run", "service"],
)  # fmt: skip

# Verification.
VERDICT_SECONDS = Histogram(
    "penstock_verdict_seconds", "Time of one judgement, by its outcome.", ["run", "outcome"],
    buckets=(0.005, 0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60),
)  # fmt: skip
FAULTS = Counter("penstock_sandbox_faults_total", "Judgements that the sandbox could not make.", ["run", "fault"])

# Learning and evaluation.
STEP = Gauge("penstock_step_metric", "The last rollout step's metrics, by name.", ["run", "name"])
SKIPPED_OPTIMIZER_STEPS = Counter(
    "penstock_skipped_optimizer_steps_total", "Optimizer steps left out because their gradient was not finite.", ["run"]
)
EVALUATION = Gauge("penstock_evaluation", "The last evaluation's avg@k, pass@k and maj@k.", ["run", "set", "score"])
EVALUATION_PROMPTS = Gauge(
    "penstock_evaluation_prompts", "Prompts of the last evaluation, answered or dropped.", ["run", "set", "result"]
)  # fmt: skip

# The gateway.
API_SECONDS = Histogram(
    "penstock_api_request_seconds", "Time of one request, by route template.", ["route", "method", "status"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)  # fmt: skip

_Labels = tuple[dict[str, str], ...]


def _of(**values: tuple[str, ...]) -> _Labels:
    """Every combination of the labels' values."""
    return tuple(dict(zip(values, one, strict=True)) for one in product(*values.values()))


AT_ZERO: dict[str, tuple[tuple[MetricWrapperBase, _Labels], ...]] = {
    "sampler": (
        (REDELIVERED_MESSAGES, _of(stream=STREAMS["verdicts"])),
        (MESSAGES, _of(stream=STREAMS["verdicts"], result=tuple(VerdictResult))),
    ),
    "rollout": (
        (TOKENS, _of()),
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
"""By service: what its processes count, and under which labels beside the run's."""


def expose(run: str, service: str) -> None:
    """Show as 0 what a process of this service may come to count."""
    for family, labels in AT_ZERO.get(service, ()):
        for one in labels:
            family.labels(run=run, **one)


def families() -> Iterator[MetricWrapperBase]:
    """Every metric of this module, in its order."""
    return (one for one in list(globals().values()) if isinstance(one, MetricWrapperBase))


def forget(run: str) -> None:
    """Show nothing of this run any more: its process has ended, or the controller has done with it."""
    for one in families():
        if "run" in one._labelnames and one is not RUN_STATE:
            one.remove_by_labels({"run": run})


def metrics_ports() -> range:
    """The ports that a metrics page may take, PENSTOCK_METRICS_PORTS; any free one where it is not set.

    Raises ValueError for one that is not accepted.
    """
    text = os.environ.get(PORTS, "")
    if not text:
        return range(1)
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 0 < first <= last < 65536:
        raise ValueError(f"{PORTS}: {text!r} is not accepted; FIRST-LAST within 1-65535 is, such as 9400-9499")
    return range(first, last + 1)


def serve_metrics(host: str) -> int:
    """Serve this process's metrics on a free port of `host`; the port.

    Raises OSError when every port of PENSTOCK_METRICS_PORTS is taken, ValueError for one that is not accepted.
    """
    for port in metrics_ports():
        try:
            server, _ = start_http_server(port, addr=host)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return int(server.server_port)
    raise OSError(errno.EADDRINUSE, f"{PORTS}: no port of {os.environ.get(PORTS, '')!r} is free at {host}")
