"""Owns the dashboard of verification: verdicts, their duration, and faults of the sandbox.

Must not show learning metrics.
"""

from __future__ import annotations

from deploy.observability.dashboards.queries import (
    RATE,
    chosen,
    events,
    increase,
    most,
    quantile,
    rate,
    setting,
)
from deploy.observability.panels import Board, Panel

_SECONDS = "penstock_verdict_seconds"
_OF = 'job="penstock", service="verifier"'
_SAMPLES = 'stream=~".+-samples"'


def _ratio(of: str, among: str) -> str:
    """The ratio of verdicts whose outcome matches `of` to those that match `among`."""
    part, whole = (rate(f"{_SECONDS}_count", "run", f'outcome=~"{outcomes}"') for outcomes in (of, among))
    return f"{part} / {whole}"


VERIFIER = Board(
    uid="penstock-verifier",
    title="Penstock / Verifier",
    description="Verdicts by outcome, their duration, and the sandbox.",
    rows={
        "Verdicts": (
            Panel(
                "Verdicts",
                "Per second, by outcome.",
                {"{{run}} {{outcome}}": rate(f"{_SECONDS}_count", "run, outcome")},
                kind="stack",
                low=0,
            ),
            Panel(
                "Correct responses",
                "Ratio of correct verdicts among the known ones, training and evaluation together.",
                {"{{run}}": _ratio("correct", "correct|wrong")},
                "percentunit",
                low=0,
                high=1,
            ),
            Panel(
                "Unknown verdicts",
                "Ratio of unknown verdicts. Their responses are not used for training. The run pauses when more than "
                "verifier.max_unknown_share of the last batch's verdicts are unknown.",
                {
                    "{{run}}": _ratio("unknown", "correct|wrong|unknown"),
                    "{{run}} last batch": most("penstock_unknown_verdicts_ratio", "run"),
                    "{{run}} limit": setting("verifier_max_unknown_ratio"),
                },
                "percentunit",
                {0.05: "orange", 0.1: "red"},
                low=0,
            ),
        ),
        "Time": (
            Panel(
                "Judgement duration, median",
                "By outcome.",
                {"{{run}} {{outcome}}": quantile(0.5, _SECONDS, "run, outcome")},
                "s",
                low=0,
            ),
            Panel(
                "Judgement duration, 99th percentile",
                "By outcome; a text that takes too long has an unknown one.",
                {"{{run}} {{outcome}}": quantile(0.99, _SECONDS, "run, outcome")},
                "s",
                low=0,
            ),
            Panel(
                "Waiting responses",
                "Samples that no verifier has received yet, and samples that a verifier is judging.",
                {
                    "{{run}} {{stream}} waiting": most("penstock_stream_lag_entries", "run, stream", _SAMPLES),
                    "{{run}} {{stream}} leased": most("penstock_stream_pending_entries", "run, stream", _SAMPLES),
                },
                low=0,
            ),
        ),
        "Sandbox": (
            Panel(
                "Sandbox faults",
                "In 10 minutes: killed after verifier.timeout_s, process died, verifier raised an error.",
                {"{{run}} {{fault}}": increase("penstock_sandbox_faults_total", "run, fault")},
                thresholds={10: "orange"},
                low=0,
                span=6,
            ),
            Panel(
                "Damaged payloads",
                "Missing or damaged payloads that a verifier found, in 10 minutes.",
                {"{{run}}": increase("penstock_damaged_payloads_total", "run", 'service="verifier"')},
                thresholds={1: "red"},
                low=0,
                span=6,
            ),
            Panel(
                "Messages",
                "Samples per second, by result; duplicate: another verdict was recorded first.",
                {"{{run}} {{result}}": rate("penstock_messages_total", "run, result", _SAMPLES)},
                low=0,
                span=6,
            ),
            Panel(
                "Unconfined starts",
                "Verifier starts on a node without Landlock or seccomp, in an hour.",
                events("unconfined", within="1h"),
                thresholds={1: "orange"},
                low=0,
                span=6,
            ),
        ),
        "Replicas": (
            Panel(
                "Ready and desired",
                "Verifier replicas.",
                {
                    "{{run}} ready": most("penstock_processes", "run", 'service="verifier", state="ready"'),
                    "{{run}} desired": most("penstock_replicas_desired", "run", 'service="verifier"'),
                },
                low=0,
            ),
            Panel(
                "CPU",
                "Cores used by each replica, without its judging process.",
                {"{{instance}}": f"rate({chosen('process_cpu_seconds_total', _OF)}[{RATE}])"},
                low=0,
            ),
            Panel(
                "Memory",
                "Resident memory of each replica, without its judging process.",
                {"{{instance}}": chosen("process_resident_memory_bytes", _OF)},
                "bytes",
                low=0,
            ),
        ),
    },
    since="now-1h",
)
