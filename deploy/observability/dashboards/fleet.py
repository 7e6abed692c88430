"""Owns the dashboard of processes: their number, states, weights, waits and resources; and of the API.

Must not show learning metrics.
"""

from __future__ import annotations

from deploy.observability.dashboards.engine import ENGINE
from deploy.observability.dashboards.nodes import NODES
from deploy.observability.dashboards.queries import (
    RATE,
    RELEASE,
    events,
    grouped,
    increase,
    most,
    quantile,
    rate,
    setting,
)
from deploy.observability.panels import Board, Panel

_SERVICE = 'service=~"$service"'
_OF = f'{RELEASE}, job="penstock", run=~"$run|", {_SERVICE}'
_API = f"penstock_api_request_seconds_count{{{RELEASE}}}"
_API_ERRORS = f'penstock_api_request_seconds_count{{{RELEASE}, status=~"5.."}}'
_API_BUCKETS = f"penstock_api_request_seconds_bucket{{{RELEASE}}}"
_AT = "{{namespace}}/{{release}}"
_WAIT = "run, service, wait"
_READY = f'{_SERVICE}, state="ready"'
_TASKS = 'stream=~".+-tasks"'
_PROCESS = "{{service}} {{instance}}"

FLEET = Board(
    uid="penstock-fleet",
    title="Penstock / Fleet",
    description="The processes of runs: desired and ready replicas, policy versions, waits and resources.",
    variables={"service": f'label_values(up{{{RELEASE}, job="penstock"}}, service)'},
    rows={
        "Processes": (
            Panel(
                "Ready and desired",
                "Ready processes, and the number that the run should have.",
                {
                    "{{run}} {{service}} ready": most("penstock_processes", "run, service", _READY),
                    "{{run}} {{service}} desired": most("penstock_replicas_desired", "run, service", _SERVICE),
                },
                low=0,
            ),
            Panel(
                "By state",
                "joining: waits for weights; draining: finishes its work and exits; poisoned: has mixed weights; "
                "avoided: holds a bad GPU or node.",
                {"{{run}} {{service}} {{state}}": most("penstock_processes", "run, service, state", _SERVICE)},
                kind="stack",
                low=0,
            ),
            Panel(
                "Scrape status",
                "1 if Prometheus can read the process's metrics page.",
                {_PROCESS: f"min {grouped('service, instance, process')} (up{{{_OF}}})"},
                kind="states",
            ),
            Panel(
                "Runs by state",
                "All runs of a release.",
                {f"{_AT} {{{{state}}}}": f"max {grouped('state')} (penstock_runs{{{RELEASE}}})"},
                low=0,
            ),
            Panel(
                "Restarts",
                "Restarts of learners and samplers in 10 minutes.",
                events("learner-restarted|sampler-restarted"),
                low=0,
            ),
            Panel(
                "Failed cluster requests",
                "Requests to Ray that failed and are retried, in 10 minutes.",
                events("look-failed|restart-failed|scaling-failed"),
                thresholds={1: "orange"},
                low=0,
            ),
        ),
        "Generation": (
            Panel(
                "Tokens by replica",
                "Response tokens per second and replica.",
                {"{{run}} {{instance}}": rate("penstock_response_tokens_total", "run, instance")},
                kind="stack",
                low=0,
            ),
            Panel(
                "Tasks",
                "Tasks per second, by result.",
                {"{{run}} {{stream}} {{result}}": rate("penstock_messages_total", "run, stream, result", _TASKS)},
                low=0,
            ),
            Panel(
                "Tasks waiting",
                "Tasks that no replica has received yet.",
                {"{{run}} {{stream}}": most("penstock_stream_lag_entries", "run, stream", _TASKS)},
                low=0,
            ),
        ),
        "Engine": ENGINE,
        "Weights": (
            Panel(
                "Policy version by process",
                "The policy version of each replica and of the learner.",
                {_PROCESS: most("penstock_policy_version", "run, service, instance", _SERVICE)},
                low=0,
            ),
            Panel(
                "Sync duration, 90th percentile",
                "staging: a replica receives; pause: generation is paused; publish: the whole sync.",
                {
                    "{{run}} {{phase}}": quantile(0.9, "penstock_weight_sync_seconds", "run, phase"),
                    "{{run}} weights.timeout_s": setting("weights_timeout_seconds"),
                },
                "s",
                low=0,
            ),
            Panel(
                "Sync failures",
                "Failed broadcasts (learner) and failed plans (rollout) in 10 minutes.",
                {"{{run}} {{service}}": increase("penstock_weight_sync_failures_total", "run, service")},
                thresholds={1: "orange", 3: "red"},
                low=0,
            ),
        ),
        "Waits": (
            Panel(
                "Longest waits",
                "Duration of current waits. Waits for work are normal.",
                {"{{run}} {{service}} {{wait}}": most("penstock_wait_seconds", _WAIT, _SERVICE)},
                "s",
                span=12,
                low=0,
            ),
            Panel(
                "Stalled waits",
                "1 for a wait past its deadline.",
                {"{{run}} {{service}} {{wait}}": f"{most('penstock_stalled_waits', _WAIT, _SERVICE)} > 0"},
                thresholds={1: "red"},
                span=12,
                low=0,
            ),
        ),
        "Resources": (
            Panel(
                "CPU",
                "Cores used by each process, without the engine processes that a replica starts.",
                {_PROCESS: f"rate(process_cpu_seconds_total{{{_OF}}}[{RATE}])"},
                low=0,
            ),
            Panel(
                "Memory",
                "Resident memory of each process, without its child processes.",
                {_PROCESS: f"process_resident_memory_bytes{{{_OF}}}"},
                "bytes",
                low=0,
            ),
            Panel(
                "Open files",
                "Open file descriptors, relative to the process's limit.",
                {_PROCESS: f"process_open_fds{{{_OF}}} / process_max_fds{{{_OF}}}"},
                "percentunit",
                {0.8: "red"},
                low=0,
            ),
        ),
        "Kubernetes and GPUs": NODES,
        "API": (
            Panel(
                "Requests",
                "Requests per second, by route and status.",
                {"{{method}} {{route}} {{status}}": f"sum {grouped('method, route, status')} (rate({_API}[{RATE}]))"},
                low=0,
            ),
            Panel(
                "Errors",
                "Ratio of requests answered with status 5xx.",
                {_AT: f"sum {grouped('')} (rate({_API_ERRORS}[{RATE}])) / sum {grouped('')} (rate({_API}[{RATE}]))"},
                "percentunit",
                {0.01: "orange", 0.05: "red"},
                low=0,
            ),
            Panel(
                "Latency, 95th percentile",
                "By route.",
                {"{{route}}": f"histogram_quantile(0.95, sum {grouped('route, le')} (rate({_API_BUCKETS}[{RATE}])))"},
                "s",
                {1: "orange", 2: "red"},
                low=0,
            ),
        ),
    },
    since="now-1h",
)
