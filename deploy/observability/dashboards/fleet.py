"""Owns the dashboard of processes: which there are, what they hold, wait for and use; the API.

Must not judge learning.
"""

from __future__ import annotations

from deploy.observability.dashboards.queries import RATE, events, grown, most, quantile, rate
from deploy.observability.panels import Board, Panel

_SERVICE = 'service=~"$service"'
_OF = f'job="penstock", run=~"$run|", {_SERVICE}'
_API = "penstock_api_request_seconds"
_WAIT = "run, service, wait"
_READY = f'{_SERVICE}, state="ready"'
_TASKS = 'stream=~".+-tasks"'
_PROCESS = "{{service}} {{instance}}"

FLEET = Board(
    uid="penstock-fleet",
    title="Penstock / Fleet",
    tells="The processes of runs: how many are wanted and ready, their weights, what they wait for and use.",
    variables={"service": 'label_values(up{job="penstock"}, service)'},
    rows={
        "Processes": (
            Panel(
                "Ready and wanted", "Processes that are ready, and that the run wants.",
                {
                    "{{run}} {{service}} ready": most("penstock_processes", "run, service", _READY),
                    "{{run}} {{service}} wanted": most("penstock_replicas_wanted", "run, service", _SERVICE),
                },
                low=0,
            ),
            Panel(
                "By state", "joining: waits for weights; draining: finishes and leaves; poisoned: weights are mixed.",
                {"{{run}} {{service}} {{state}}": most("penstock_processes", "run, service, state", _SERVICE)},
                kind="stack", low=0,
            ),
            Panel(
                "Scraped", "1 for a process whose metrics page answers.",
                {_PROCESS: f"min by (service, instance, process) (up{{{_OF}}})"}, kind="states",
            ),
            Panel("Runs by state", "All runs of this Redis.", {"{{state}}": "max by (state) (penstock_runs)"}, low=0),
            Panel(
                "Restarts", "Learners and samplers that began anew, in 10 minutes.",
                events("learner-restarted|sampler-restarted"), low=0,
            ),
            Panel(
                "Asked of the cluster in vain", "Requests to Ray that failed and are made again, in 10 minutes.",
                events("look-failed|restart-failed|scaling-failed"), thresholds={1: "orange"}, low=0,
            ),
        ),
        "Generation": (
            Panel(
                "Tokens by replica", "Response tokens a second of each replica.",
                {"{{run}} {{instance}}": rate("penstock_response_tokens_total", "run, instance")}, kind="stack", low=0,
            ),
            Panel(
                "Tasks", "Groups a second by what came of the task.",
                {"{{run}} {{stream}} {{result}}": rate("penstock_messages_total", "run, stream, result", _TASKS)},
                low=0,
            ),
            Panel(
                "Tasks waiting", "Groups that no replica has taken yet.",
                {"{{run}} {{stream}}": most("penstock_stream_lag", "run, stream", _TASKS)}, low=0,
            ),
        ),
        "Weights": (
            Panel(
                "Policy version by process", "What each replica, and the learner, holds.",
                {_PROCESS: most("penstock_policy_version", "run, service, instance", _SERVICE)}, low=0,
            ),
            Panel(
                "Sync, slowest tenth", "staging: a replica receives; pause: generation rests; publish: all of it.",
                {"{{run}} {{phase}}": quantile(0.9, "penstock_weight_sync_seconds", "run, phase")}, "s", low=0,
            ),
            Panel(
                "Failures", "Broadcasts that failed (learner), plans not followed (rollout), in 10 minutes.",
                {"{{run}} {{service}}": grown("penstock_weight_sync_failures_total", "run, service")},
                thresholds={1: "orange", 3: "red"}, low=0,
            ),
        ),
        "Waits": (
            Panel(
                "Longest waits", "Seconds that something has been waited for. Waits for work are normal.",
                {"{{run}} {{service}} {{wait}}": most("penstock_wait_seconds", _WAIT, _SERVICE)}, "s", span=12, low=0,
            ),
            Panel(
                "Past their deadline", "1 for a wait that is stalled.",
                {"{{run}} {{service}} {{wait}}": f"{most('penstock_stalled_waits', _WAIT, _SERVICE)} > 0"},
                thresholds={1: "red"}, span=12, low=0,
            ),
        ),
        "Resources": (
            Panel(
                "CPU", "Cores used by each process itself; engine processes below a replica are not in it.",
                {_PROCESS: f"rate(process_cpu_seconds_total{{{_OF}}}[{RATE}])"}, low=0,
            ),
            Panel(
                "Memory", "Resident memory of each process itself.",
                {_PROCESS: f"process_resident_memory_bytes{{{_OF}}}"}, "bytes", low=0,
            ),
            Panel(
                "Open files", "Share of the file descriptors that a process may open.",
                {_PROCESS: f"process_open_fds{{{_OF}}} / process_max_fds{{{_OF}}}"}, "percentunit", {0.8: "red"}, low=0,
            ),
        ),
        "API": (
            Panel(
                "Requests", "Requests a second by route and status.",
                {"{{method}} {{route}} {{status}}": f"sum by (method, route, status) (rate({_API}_count[{RATE}]))"},
                low=0,
            ),
            Panel(
                "Errors", "Share of the requests that were answered with 5xx.",
                {"5xx": f'sum(rate({_API}_count{{status=~"5.."}}[{RATE}])) / sum(rate({_API}_count[{RATE}]))'},
                "percentunit", {0.01: "orange", 0.05: "red"}, low=0,
            ),
            Panel(
                "Latency, slowest twentieth", "By route.",
                {"{{route}}": f"histogram_quantile(0.95, sum by (route, le) (rate({_API}_bucket[{RATE}])))"}, "s",
                {1: "orange", 2: "red"}, low=0,
            ),
        ),
    },
    since="now-1h",
)  # fmt: skip
