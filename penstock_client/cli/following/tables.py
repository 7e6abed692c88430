"""Owns the tables of a run: its summary, its services, its evaluations.

Must not print.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from penstock_client.cli.following.figures import average, duration, local_time, majority, score, versions
from penstock_client.cli.terminal import cell, grid, plain
from penstock_client.models import Evaluation, GroupFigures, LiveProcess, OpenWait, Run

CLOCK = "%H:%M:%S"
EVENTS_SHOWN = 5


def closing_table(view: Run) -> Table:
    """All evaluations of a run, scores with their standard errors over prompts; k is the responses per prompt."""
    sizes = sorted({rate.k for evaluation in view.evaluations for rate in evaluation.pass_at} - {1})
    passes = [f"pass@{k}" for k in sizes]
    table = Table(title=cell(f"{view.id}: held-out accuracy"))
    for title in ("set", "evaluation", "policy version", "prompts", "k", "avg@k", *passes, "maj@k"):
        table.add_column(title, justify="right")
    for evaluation in sorted(view.evaluations, key=lambda record: record.set):
        table.add_row(*map(cell, _cells(evaluation, sizes)))
    return table


def _cells(evaluation: Evaluation, sizes: Sequence[int]) -> list[str]:
    scores = {rate.k: score(rate.value, rate.standard_error) for rate in evaluation.pass_at}
    return [
        evaluation.set,
        evaluation.name,
        versions(evaluation),
        str(evaluation.prompts),
        str(evaluation.samples_per_prompt),
        average(evaluation),
        *(scores.get(k, "-") for k in sizes),
        majority(evaluation),
    ]


def summary_rows(view: Run) -> list[tuple[str, str]]:
    """A run in pairs of a name and a text, for people."""
    total = "" if view.last_step is None else f" of {view.last_step}"
    version = "" if view.policy_version is None else f", policy version {view.policy_version}"
    closing = f" ({view.closing})" if view.closing else ""
    unknown = [("unknown", f"{verdict.prompt or verdict.group}: {verdict.reason}") for verdict in view.unknown_verdicts]
    events = [(f"event {local_time(event.at, CLOCK)}", f"{event.service}: {event.text}") for event in view.events]
    rows = [
        ("run", view.id),
        ("project", view.project or ""),
        ("state", f"{view.state}: {view.reason}{closing}"),
        ("created", local_time(view.created_at)),
        ("rollout steps", f"{view.rollout_steps}{total}{version}"),
        ("groups", _counts(view.groups)),
        ("place in queue", "" if view.queue_position is None else f"{view.queue_position}: waits for {view.waits_for}"),
        ("replicas", str(view.rollout_replicas)),
        ("resumptions", str(view.resumptions or "")),
        ("files", ", ".join(view.files)),
        ("export", view.export_path or ""),
        *(("alert", alert) for alert in view.alerts),
        *unknown,
        *events[-EVENTS_SHOWN:],
    ]
    return [(name, plain(text)) for name, text in rows if text]


def _counts(groups: GroupFigures) -> str:
    ends = {
        "trained": groups.trained,
        "filtered": groups.filtered,
        "stale": groups.stale,
        "dead": groups.dead,
        "pending": groups.pending,
    }
    return f"{groups.dispatched} dispatched: " + ", ".join(f"{count} {name}" for name, count in ends.items())


def service_table(view: Run, now: float) -> Table:
    """The services of a run: their processes by state, and the longest wait that is not for work."""
    rows = []
    for service in sorted({process.service for process in view.processes}):
        processes = [process for process in view.processes if process.service == service]
        waits = longest_waits(processes, now)
        shown = f"{duration(waits[0][0])} for {waits[0][1].waits_for}" if waits else ""
        rows.append([service, _states(processes), shown])
    return grid(["service", "processes", "waits"], rows)


def longest_waits(processes: Sequence[LiveProcess], now: float) -> list[tuple[float, OpenWait]]:
    """How long these processes have waited for what, longest first; without waits for work."""
    waits = [(now - wait.since, wait) for process in processes for wait in process.waits if not wait.idle]
    return sorted(waits, key=lambda found: -found[0])


def _states(processes: Sequence[LiveProcess]) -> str:
    states = [process.state for process in processes]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
