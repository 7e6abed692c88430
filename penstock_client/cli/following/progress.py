"""Owns the progress of a run as lines: events, a line per rollout step and evaluation.

Must not call the API; the caller passes the API's answers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock_client.cli.following.figures import duration, evaluation_line, hint, number, seconds_left
from penstock_client.cli.terminal import plain
from penstock_client.models import Evaluation, RolloutStep, Run, RunEvent, reward_metric, reward_names

if TYPE_CHECKING:
    from rich.console import Console

# Heading, metric, format. A metric that a step does not report is shown as "-".
COLUMNS = (
    ("accuracy", "accuracy", "{:.2f}"),
    ("reward", "reward", "{:+.2f}"),
    ("entropy", "entropy", "{:.2f}"),
    ("prob", "mean_token_probability", "{:.2f}"),
    ("length", "response_length", "{:.1f}"),
)
COUNTS = ("groups_kept", "groups_filtered", "groups_stale")
HEADING_EVERY = 20
PAUSED = "paused"
LONG_WAIT = "waiting"
"""The phase of the event that a wait is long, though not past its deadline."""


def heading(rewards: Sequence[str] = ()) -> str:
    """The titles above the lines of steps with these named rewards."""
    return (
        f"{'step':>7}  "
        + "  ".join(f"{title:>8}" for title, _, _ in COLUMNS)
        + f"  {'kept/filtered/stale':>19}  {'staleness':>9}  {'tokens/s':>8}  {'left':>6}"
        + "".join(f"  {name:>8}" for name in rewards)
    )


def step_line(step: RolloutStep, total: int | None, left: float | None) -> str:
    """One rollout step as a line under `heading`; `total` is None where a token budget limits the run.

    The mean of each named reward is at the end, in the order of their names.
    """
    metrics = step.metrics
    cells = [f"{number(metrics.get(name), form):>8}" for _, name, form in COLUMNS]
    counts = "/".join(number(metrics.get(name), "{:.0f}") for name in COUNTS)
    staleness = f"{number(metrics.get('staleness_mean'), '{:.2f}')}/{number(metrics.get('staleness_max'), '{:.0f}')}"
    speed = number(metrics.get("tokens_per_second"), "{:.0f}")
    time_left = "-" if left is None else duration(left)
    return (
        f"{step.step:>3}{'' if total is None else f'/{total}':<4}  "
        + "  ".join(cells)
        + f"  {counts:>19}  {staleness:>9}  {speed:>8}  {time_left:>6}"
        + "".join(f"  {metrics[reward_metric(name)]:>{max(8, len(name))}.2f}" for name in reward_names(metrics))
    )


class Follower:
    """Prints what is new about a run, each time it receives the API's answers."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began: float | None = None
        self._state = ""
        self._newest_event = 0.0
        self._evaluations: set[tuple[str, str]] = set()
        self._rewards: list[str] = []
        self.steps: list[RolloutStep] = []

    def take(self, view: Run, steps: list[RolloutStep]) -> None:
        """Print what is new in the run's view, and the new steps."""
        self._began = view.created_at
        self._events(view)
        for step in steps:
            self._step(view, step)
        for evaluation in view.evaluations:
            self._evaluation(evaluation)
        if view.state != self._state:
            self._state = view.state
            self._line(time.time(), f"run is {self._state}: {view.reason}", style="bold")
            if self._state == PAUSED:
                for alert in view.alerts:
                    self._line(time.time(), alert, style="bold")
                self._line(time.time(), f"{hint('resume', view.id)} resumes it")

    def refresh(self) -> None:
        """Nothing changes between the API's answers."""

    def close(self) -> None:
        """Nothing is left to print."""

    def _step(self, view: Run, step: RolloutStep) -> None:
        rewards = reward_names(step.metrics)
        if len(self.steps) % HEADING_EVERY == 0 or rewards != self._rewards:
            self._rewards = rewards
            self._print(heading([plain(name) for name in rewards]), style="bold")
        self.steps.append(step)
        total = view.last_step
        self._print(step_line(step, total, None if total is None else seconds_left(self.steps, total)))

    def _events(self, view: Run) -> None:
        for event in view.events:
            if event.at > self._newest_event and not self._usual(view, event):
                self._line(event.at, f"{event.service}: {event.phase}: {event.text}")
        self._newest_event = max([self._newest_event, *(event.at for event in view.events)])

    def _usual(self, view: Run, event: RunEvent) -> bool:
        """Whether it is a long wait of a start-up, in which engines load and all others wait for them.

        A wait past its deadline is another event, and is printed.
        """
        return event.phase == LONG_WAIT and not self.steps and not view.evaluations

    def _evaluation(self, evaluation: Evaluation) -> None:
        key = (evaluation.set, evaluation.name)
        if key not in self._evaluations:
            self._evaluations.add(key)
            self._print(plain(evaluation_line(evaluation)), style="bold")

    def _line(self, at: float, text: str, style: str = "dim") -> None:
        elapsed = at - (self._began or at)
        self._print(f"[{duration(elapsed):>6}] {plain(text)}", style=style)

    def _print(self, text: str, style: str = "") -> None:
        # Lines are not wrapped: a pipe or a log file gets each line whole.
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
