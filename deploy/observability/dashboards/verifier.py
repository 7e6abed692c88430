"""Owns the dashboard of verification: what is judged, how, how fast, and what the sandbox could not judge.

Must not judge the policy by it.
"""

from __future__ import annotations

from deploy.observability.dashboards.queries import RATE, chosen, events, grown, most, quantile, rate
from deploy.observability.panels import Board, Panel

_SECONDS = "penstock_verdict_seconds"
_OF = 'job="penstock", service="verifier"'
_SAMPLES = 'stream=~".+-samples"'


def _share(of: str, among: str) -> str:
    """The share of the verdicts whose outcome matches `of`, among those that match `among`."""
    one, all_of_them = (rate(f"{_SECONDS}_count", "run", f'outcome=~"{outcomes}"') for outcomes in (of, among))
    return f"{one} / {all_of_them}"


VERIFIER = Board(
    uid="penstock-verifier",
    title="Penstock / Verifier",
    tells="Verdicts: how many, how sure, how fast; and the sandbox that judges.",
    rows={
        "Verdicts": (
            Panel(
                "Verdicts", "A second, by outcome.",
                {"{{run}} {{outcome}}": rate(f"{_SECONDS}_count", "run, outcome")}, kind="stack", low=0,
            ),
            Panel(
                "Right answers", "Share of the verdicts that are known, training and evaluation together.",
                {"{{run}}": _share("correct", "correct|wrong")}, "percentunit", low=0, high=1,
            ),
            Panel(
                "Unknown", "Share of the verdicts that are neither right nor wrong. They are not trained on.",
                {"{{run}}": _share("unknown", "correct|wrong|unknown")}, "percentunit", {0.05: "orange", 0.1: "red"},
                low=0,
            ),
        ),
        "Time": (
            Panel(
                "Judgement, half of them", "Seconds, by outcome.",
                {"{{run}} {{outcome}}": quantile(0.5, _SECONDS, "run, outcome")}, "s", low=0,
            ),
            Panel(
                "Judgement, slowest hundredth", "Seconds, by outcome; an unknown one was tried twice.",
                {"{{run}} {{outcome}}": quantile(0.99, _SECONDS, "run, outcome")}, "s", low=0,
            ),
            Panel(
                "Responses that wait", "Not yet delivered to a verifier, and under lease.",
                {
                    "{{run}} {{stream}} waiting": most("penstock_stream_lag", "run, stream", _SAMPLES),
                    "{{run}} {{stream}} under lease": most("penstock_stream_pending", "run, stream", _SAMPLES),
                },
                low=0,
            ),
        ),
        "Sandbox": (
            Panel(
                "Faults", "In 10 minutes: killed at verifier.timeout_s, the process died, the verifier raised.",
                {"{{run}} {{fault}}": grown("penstock_sandbox_faults_total", "run, fault")},
                thresholds={10: "orange"}, low=0, span=6,
            ),
            Panel(
                "Payloads without a text", "Missing or damaged payloads that a verifier met, in 10 minutes.",
                {"{{run}}": grown("penstock_damaged_payloads_total", "run", 'service="verifier"')},
                thresholds={1: "red"}, low=0, span=6,
            ),
            Panel(
                "Messages", "Samples a second by what came of them; duplicate: another verdict was first.",
                {"{{run}} {{result}}": rate("penstock_messages_total", "run, result", _SAMPLES)}, low=0, span=6,
            ),
            Panel(
                "Not confined", "Starts of a verifier that found Landlock or seccomp missing, in an hour.",
                events("unconfined", within="1h"), thresholds={1: "orange"}, low=0, span=6,
            ),
        ),
        "Replicas": (
            Panel(
                "Ready and wanted", "Verifier replicas.",
                {
                    "{{run}} ready": most("penstock_processes", "run", 'service="verifier", state="ready"'),
                    "{{run}} wanted": most("penstock_replicas_wanted", "run", 'service="verifier"'),
                },
                low=0,
            ),
            Panel(
                "CPU", "Cores used by each replica itself; its judging process is not in it.",
                {"{{instance}}": f"rate({chosen('process_cpu_seconds_total', _OF)}[{RATE}])"}, low=0,
            ),
            Panel(
                "Memory", "Resident memory of each replica itself.",
                {"{{instance}}": chosen("process_resident_memory_bytes", _OF)}, "bytes", low=0,
            ),
        ),
    },
    since="now-1h",
)  # fmt: skip
