"""Owns the live view of a run on a terminal: its curves, its services, what it waits for, its last events.

Must not call the API; the caller passes the API's answers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from penstock_client.cli.following.figures import duration, evaluation_line, hint, number, seconds_left
from penstock_client.cli.following.tables import longest_waits, service_table
from penstock_client.cli.terminal import cell, grid
from penstock_client.models import RolloutStep, Run, reward_metric, reward_names

BARS = "▁▂▃▄▅▆▇█"
POINTS = 32
# Label, metric, format.
CURVES = (
    ("accuracy", "accuracy", "{:.3f}"),
    ("reward", "reward", "{:+.3f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("length", "response_length", "{:.1f}"),
    ("tokens/s", "tokens_per_second", "{:.0f}"),
)
EVENTS = 6
EVALUATIONS = 4
STYLES = {"running": "green", "succeeded": "green", "failed": "bold red", "cancelled": "yellow", "paused": "yellow"}


def sparkline(values: Sequence[float], points: int = POINTS) -> str:
    """The values as bars between their least and greatest, each bar the mean of equally many; at most `points` bars."""
    if not values:
        return ""
    count = min(points, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]
    least, greatest = min(means), max(means)
    if not greatest > least:
        return BARS[len(BARS) // 2] * count
    return "".join(BARS[min(len(BARS) - 1, int((mean - least) / (greatest - least) * len(BARS)))] for mean in means)


class LiveView:
    """Draws a run over its previous drawing, each time it receives the API's answers."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()
        self._view: Run | None = None
        self.steps: list[RolloutStep] = []

    def take(self, view: Run, steps: list[RolloutStep]) -> None:
        """Draw the run's view with the new steps."""
        self._view = view
        self.steps += steps
        self.refresh()

    def refresh(self) -> None:
        """Draw it again: waits and ages are longer now."""
        if self._view is not None:
            self._live.update(draw_run(self._view, self.steps, time.time()), refresh=True)

    def close(self) -> None:
        """Leave the last drawing, and the terminal as it was."""
        self._live.stop()


def draw_run(view: Run, steps: list[RolloutStep], now: float) -> Group:
    """The view of a run at `now` (Unix seconds)."""
    parts = [_head(view, steps, now), Text()]
    if steps:
        parts += [grid(["", "curve", "first", "last"], _curves(steps), right=["first", "last"]), Text()]  # type: ignore[list-item]
    if view.processes:
        parts += [service_table(view, now), Text()]  # type: ignore[list-item]
    parts += [Text.assemble(("waits for ", "bold"), cell(_reason_to_wait(view, now)))]
    parts += [Text.assemble(("alert ", "bold red"), cell(alert)) for alert in view.alerts]
    parts += [cell(evaluation_line(evaluation)) for evaluation in view.evaluations[-EVALUATIONS:]]
    for event in view.events[-EVENTS:]:
        text = f"[{duration(event.at - view.created_at):>6}] {event.service}: {event.phase}: {event.text}"
        line = Text(cell(text).plain, style="dim", no_wrap=True, overflow="ellipsis")
        parts.append(line)
    return Group(*parts)


def _head(view: Run, steps: list[RolloutStep], now: float) -> Text:
    total = view.last_step
    left = seconds_left(steps, total) if total is not None else None
    ends = f", about {duration(left)} left" if left is not None and not view.ended else ""
    progress = f"step {view.rollout_steps}{'' if total is None else f' of {total}'}"
    return Text.assemble(
        (cell(view.id).plain, "bold"),
        "  ",
        (view.state, STYLES.get(view.state, "bold")),
        cell(f"  {view.reason}  {progress}, {duration(now - view.created_at)} old{ends}"),
    )


def _curves(steps: list[RolloutStep]) -> list[list[str]]:
    named = sorted({name for step in steps for name in reward_names(step.metrics)})
    rows = []
    for label, metric, form in (*CURVES, *((name, reward_metric(name), "{:.3f}") for name in named)):
        if values := [step.metrics[metric] for step in steps if metric in step.metrics]:
            rows.append([label, sparkline(values), number(values[0], form), number(values[-1], form)])
    return rows


def _reason_to_wait(view: Run, now: float) -> str:
    if view.ended:
        return f"nothing: it is {view.state}"
    if view.state == "paused":
        return f"{hint('resume', view.id)}"
    if waits := longest_waits(view.processes, now):
        seconds, wait = waits[0]
        return f"{wait.waits_for}, for {duration(seconds)} of at most {duration(wait.deadline_s)}"
    return "nothing" if view.processes else view.waits_for or view.reason
