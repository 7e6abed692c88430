"""Owns how a run is followed in a terminal: start-up phases, a line a rollout step or evaluation, the closing table.

Must not talk to the API; it is given what the API answered.
"""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.table import Table

from deploy.cli.plain import plain

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
PAUSED = "paused"


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


def step_line(step: dict[str, Any], total: int | None, left: float | None) -> str:
    """One rollout step in one line, under HEADING; `total` is None where a budget decides how many there are."""
    metrics = step["metrics"]
    cells = [f"{_shown(metrics.get(name), form):>8}" for _, name, form in COLUMNS]
    counts = "/".join(_shown(metrics.get(name), "{:.0f}") for name in COUNTS)
    staleness = f"{_shown(metrics.get('staleness_mean'), '{:.2f}')}/{_shown(metrics.get('staleness_max'), '{:.0f}')}"
    speed = _shown(metrics.get("tokens_per_second"), "{:.0f}")
    time_left = "-" if left is None else duration(left)
    return (
        f"{step['step']:>3}{'' if total is None else f'/{total}':<4}  "
        + "  ".join(cells)
        + f"  {counts:>19}  {staleness:>9}  {speed:>8}  {time_left:>6}"
    )


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def versions(evaluation: dict[str, Any]) -> str:
    """The policy versions that answered: `3`, or `3-5` when weights were synced meanwhile."""
    oldest, newest = evaluation["version"], evaluation["newest_version"]
    return str(oldest) if newest in (None, oldest) else f"{oldest}-{newest}"


def evaluation_line(one: dict[str, Any]) -> str:
    """One evaluation of one set in one line; avg@k is pass@1, so of pass@k only the largest k is told."""
    k = one["samples_per_prompt"]
    scores = [f"avg@{k} {_average(one)}"]
    if k > 1:
        scores += [f"pass@{last['k']} {_score(last['value'], last['standard_error'])}" for last in one["pass_at"][-1:]]
        scores.append(f"maj@{k} {_majority(one)}")
    asides = [f"version {versions(one)}", f"{one['prompts']} prompts"]
    asides += [f"{one[name]} {name}" for name in ("unknown", "dropped") if one[name]]
    return f"{one['set']} {one['name']}: {', '.join(scores)} ({', '.join(asides)})"


def _score(value: float | None, error: float | None) -> str:
    return "-" if value is None else f"{value:.3f} ± {error:.3f}"


def _average(one: dict[str, Any]) -> str:
    # Without a known verdict there is no score; the record's 0 would look like one.
    return "-" if one["majority"] is None else _score(one["accuracy"], one["standard_error"])


def _majority(one: dict[str, Any]) -> str:
    return _score(one["majority"], one["majority_standard_error"])


class Follower:
    """Prints what is new about a run, each time it is given the API's answers."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began: float | None = None
        self._state = ""
        self._newest_event = 0.0
        self._evaluations: set[tuple[str, str]] = set()
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
            # A budget of tokens ends the run before its last possible step, nobody knows at which.
            total = None if view["recipe"]["limits"]["response_tokens"] else int(view["rollout_steps_total"])
            self._say(step_line(step, total, None if total is None else seconds_left(self.steps, total)))
        for evaluation in view["evaluations"]:
            self._evaluation(evaluation)
        if view["state"] != self._state:
            self._state = view["state"]
            self._line(time.time(), f"run is {self._state}: {view['reason']}", style="bold")
            if self._state == PAUSED:
                for alert in view["alerts"]:
                    self._line(time.time(), alert, style="bold")
                self._line(time.time(), f"`penstock resume {view['id']}` takes it on")

    def _events(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["at"] > self._newest_event:
                self._line(event["at"], f"{event['service']}: {event['phase']}: {event['text']}")
        self._newest_event = max([self._newest_event, *(event["at"] for event in events)])

    def _evaluation(self, one: dict[str, Any]) -> None:
        if (one["set"], one["name"]) not in self._evaluations:
            self._evaluations.add((one["set"], one["name"]))
            self._say(evaluation_line(one), style="bold")

    def _line(self, at: float, text: str, style: str = "dim") -> None:
        elapsed = at - (self._began or at)
        self._say(f"[{duration(elapsed):>6}] {plain(text)}", style=style)

    def _say(self, text: str, style: str = "") -> None:
        # A pipe or a log file gets each line whole, whatever the width of the terminal.
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def closing_table(view: dict[str, Any]) -> Table:
    """All evaluations of a run, scores with their standard errors over prompts; k is the number of responses each."""
    evaluations = view["evaluations"]
    wanted = sorted({one["k"] for evaluation in evaluations for one in evaluation["pass_at"]} - {1})
    table = Table(title=f"{view['id']}: held-out accuracy")
    for title in (
        "set",
        "evaluation",
        "policy version",
        "prompts",
        "k",
        "avg@k",
        *(f"pass@{k}" for k in wanted),
        "maj@k",
    ):
        table.add_column(title, justify="right")
    for one in sorted(evaluations, key=lambda one: str(one["set"])):
        passes = {score["k"]: _score(score["value"], score["standard_error"]) for score in one["pass_at"]}
        table.add_row(
            one["set"], one["name"], versions(one), str(one["prompts"]), str(one["samples_per_prompt"]),
            _average(one), *(passes.get(k, "-") for k in wanted), _majority(one),
        )  # fmt: skip
    return table
