"""Owns how a run is followed in a terminal: start-up phases, one line a rollout step, the closing table.

Must not talk to the API; it is given what the API answered.
"""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.table import Table

# Heading, metric, format. What a step does not report is shown as "-".
COLUMNS = (
    ("accuracy", "accuracy", "{:.2f}"),
    ("reward", "reward", "{:+.2f}"),
    ("entropy", "entropy", "{:.2f}"),
    ("prob", "mean_token_probability", "{:.2f}"),
    ("length", "response_length", "{:.1f}"),
)
COUNTS = ("groups_kept", "groups_filtered", "groups_stale")
HEADING = (
    f"{'step':>7}  "
    + "  ".join(f"{title:>8}" for title, _, _ in COLUMNS)
    + f"  {'kept/filtered/stale':>19}  {'staleness':>9}  {'tokens/s':>8}  {'left':>6}"
)
HEADING_EVERY = 20


def duration(seconds: float) -> str:
    """Seconds as `4s`, `2m05s` or `1h03m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def seconds_left(steps: list[dict[str, Any]], total: int) -> float | None:
    """Time to the last rollout step at the pace so far; None before the second step."""
    if len(steps) < 2:
        return None
    pace = (steps[-1]["learning_finished_at"] - steps[0]["learning_finished_at"]) / (len(steps) - 1)
    return float(pace * max(0, total - steps[-1]["step"]))


def step_line(step: dict[str, Any], total: int, left: float | None) -> str:
    """One rollout step in one line, under HEADING."""
    metrics = step["metrics"]
    cells = [f"{_shown(metrics.get(name), form):>8}" for _, name, form in COLUMNS]
    counts = "/".join(_shown(metrics.get(name), "{:.0f}") for name in COUNTS)
    staleness = f"{_shown(metrics.get('staleness_mean'), '{:.2f}')}/{_shown(metrics.get('staleness_max'), '{:.0f}')}"
    speed = _shown(metrics.get("tokens_per_second"), "{:.0f}")
    time_left = "-" if left is None else duration(left)
    return (
        f"{step['step']:>3}/{total:<3}  "
        + "  ".join(cells)
        + f"  {counts:>19}  {staleness:>9}  {speed:>8}  {time_left:>6}"
    )


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


class Follower:
    """Prints what is new about a run, each time it is given the API's answers."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began: float | None = None
        self._state = ""
        self._newest_event = 0.0
        self._evaluations: set[str] = set()
        self.steps: list[dict[str, Any]] = []

    @property
    def cursor(self) -> str:
        """The id of the last step seen, to ask for what is behind it."""
        return str(self.steps[-1]["id"]) if self.steps else "0-0"

    def take(self, view: dict[str, Any], steps: list[dict[str, Any]]) -> None:
        """Print what the run's view and its new steps tell."""
        self._began = view["created_at"]
        self._events(view["events"])
        for step in steps:
            if len(self.steps) % HEADING_EVERY == 0:
                self._say(HEADING, style="bold")
            self.steps.append(step)
            total = int(view["rollout_steps_total"])
            self._say(step_line(step, total, seconds_left(self.steps, total)))
        for evaluation in view["evaluations"]:
            self._evaluation(evaluation)
        if view["state"] != self._state:
            self._state = view["state"]
            self._line(time.time(), f"run is {self._state}: {view['reason']}", style="bold")

    def _events(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["at"] > self._newest_event:
                self._line(event["at"], f"{event['service']}: {event['phase']}: {event['text']}")
        self._newest_event = max([self._newest_event, *(event["at"] for event in events)])

    def _evaluation(self, one: dict[str, Any]) -> None:
        if one["name"] in self._evaluations:
            return
        self._evaluations.add(one["name"])
        self._say(
            f"held-out {one['name']}: avg@{one['samples_per_prompt']} {one['accuracy']:.3f} "
            f"± {one['standard_error']:.3f} (version {one['version']}, {one['prompts']} prompts)",
            style="bold",
        )

    def _line(self, at: float, text: str, style: str = "dim") -> None:
        elapsed = at - (self._began or at)
        self._say(f"[{duration(elapsed):>6}] {text}", style=style)

    def _say(self, text: str, style: str = "") -> None:
        # A pipe or a log file gets each line whole, whatever the width of the terminal.
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def closing_table(view: dict[str, Any]) -> Table:
    """The held-out evaluations, before and after."""
    table = Table(title=f"{view['id']}: held-out accuracy")
    for title in ("evaluation", "policy version", "avg@k", "accuracy", "standard error"):
        table.add_column(title, justify="right")
    for one in view["evaluations"]:
        table.add_row(
            one["name"], str(one["version"]), f"avg@{one['samples_per_prompt']}", f"{one['accuracy']:.3f}",
            f"{one['standard_error']:.3f}",
        )  # fmt: skip
    return table
