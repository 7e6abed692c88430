"""Owns the progress output of a run: start-up events, a line per rollout step and evaluation, the closing table.

Must not call the API; the caller passes the API's answers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from deploy.cli.terminal import plain
from services.contracts import reward_metric, reward_names

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
SAME_SCORE = 1e-9
PAUSED = "paused"


def heading(rewards: Sequence[str] = ()) -> str:
    """The titles above the lines of steps with these named rewards."""
    return (
        f"{'step':>7}  "
        + "  ".join(f"{title:>8}" for title, _, _ in COLUMNS)
        + f"  {'kept/filtered/stale':>19}  {'staleness':>9}  {'tokens/s':>8}  {'left':>6}"
        + "".join(f"  {name:>8}" for name in rewards)
    )


def duration(seconds: float) -> str:
    """Seconds as `4s`, `2m05s` or `1h03m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def seconds_left(steps: list[dict[str, Any]], total: int) -> float | None:
    """Time until the last rollout step at the mean pace so far; None before the second step."""
    if len(steps) < 2:
        return None
    pace = (steps[-1]["learning_finished_at"] - steps[0]["learning_finished_at"]) / (len(steps) - 1)
    return float(pace * max(0, total - steps[-1]["step"]))


def step_line(step: dict[str, Any], total: int | None, left: float | None) -> str:
    """One rollout step as a line under `heading`; `total` is None where a token budget limits the run.

    The mean of each named reward is at the end, in the order of their names.
    """
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
        + "".join(f"  {metrics[reward_metric(name)]:>{max(8, len(name))}.2f}" for name in reward_names(metrics))
    )


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def versions(evaluation: dict[str, Any]) -> str:
    """The policy versions that responded: `3`, or `3-5` if weights were synced during the evaluation."""
    oldest, newest = evaluation["version"], evaluation["newest_version"]
    return str(oldest) if newest in (None, oldest) else f"{oldest}-{newest}"


def evaluation_line(evaluation: dict[str, Any]) -> str:
    """One evaluation of one set in one line. Of pass@k only the largest k is shown: pass@1 equals avg@k."""
    k = evaluation["samples_per_prompt"]
    scores = [f"avg@{k} {_average(evaluation)}"]
    if k > 1:
        largest = evaluation["pass_at"][-1:]
        scores += [f"pass@{score['k']} {_score(score['value'], score['standard_error'])}" for score in largest]
        scores.append(f"maj@{k} {_majority(evaluation)}")
    scores += _scores(evaluation)
    notes = [f"version {versions(evaluation)}", f"{evaluation['prompts']} prompts"]
    notes += [f"{evaluation[name]} {name}" for name in ("unknown", "dropped") if evaluation[name]]
    return f"{evaluation['set']} {evaluation['name']}: {', '.join(scores)} ({', '.join(notes)})"


def _scores(evaluation: dict[str, Any]) -> list[str]:
    """The mean score where it is not the accuracy, and the mean of each named reward."""
    found = []
    if evaluation["score"] is not None and abs(evaluation["score"] - evaluation["accuracy"]) > SAME_SCORE:
        found.append(f"score {_score(evaluation['score'], evaluation['score_standard_error'])}")
    return found + [f"{plain(name)} {score:.3f}" for name, score in sorted(evaluation["rewards"].items())]


def _score(value: float | None, error: float | None) -> str:
    return "-" if value is None else f"{value:.3f} ± {error:.3f}"


def _average(evaluation: dict[str, Any]) -> str:
    # Without a known verdict there is no score, although the record's accuracy is 0.
    known = evaluation["majority"] is not None
    return _score(evaluation["accuracy"], evaluation["standard_error"]) if known else "-"


def _majority(evaluation: dict[str, Any]) -> str:
    return _score(evaluation["majority"], evaluation["majority_standard_error"])


class Follower:
    """Prints what is new about a run, each time it receives the API's answers."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began: float | None = None
        self._state = ""
        self._newest_event = 0.0
        self._evaluations: set[tuple[str, str]] = set()
        self._rewards: list[str] = []
        self.steps: list[dict[str, Any]] = []

    @property
    def cursor(self) -> str:
        """The id of the last step printed, for asking for those after it."""
        return str(self.steps[-1]["id"]) if self.steps else "0-0"

    def take(self, view: dict[str, Any], steps: list[dict[str, Any]]) -> None:
        """Print what is new in the run's view, and the new steps."""
        self._began = view["created_at"]
        self._events(view["events"])
        for step in steps:
            rewards = reward_names(step["metrics"])
            if len(self.steps) % HEADING_EVERY == 0 or rewards != self._rewards:
                self._rewards = rewards
                self._print(heading([plain(name) for name in rewards]), style="bold")
            self.steps.append(step)
            # With a token budget, the run ends before its last possible step; the last step is not known in advance.
            total = None if view["recipe"]["limits"]["response_tokens"] else int(view["rollout_steps_total"])
            self._print(step_line(step, total, None if total is None else seconds_left(self.steps, total)))
        for evaluation in view["evaluations"]:
            self._evaluation(evaluation)
        if view["state"] != self._state:
            self._state = view["state"]
            self._line(time.time(), f"run is {self._state}: {view['reason']}", style="bold")
            if self._state == PAUSED:
                for alert in view["alerts"]:
                    self._line(time.time(), alert, style="bold")
                self._line(time.time(), f"`penstock resume {view['id']}` resumes it")

    def _events(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["at"] > self._newest_event:
                self._line(event["at"], f"{event['service']}: {event['phase']}: {event['text']}")
        self._newest_event = max([self._newest_event, *(event["at"] for event in events)])

    def _evaluation(self, evaluation: dict[str, Any]) -> None:
        key = (evaluation["set"], evaluation["name"])
        if key not in self._evaluations:
            self._evaluations.add(key)
            self._print(evaluation_line(evaluation), style="bold")

    def _line(self, at: float, text: str, style: str = "dim") -> None:
        elapsed = at - (self._began or at)
        self._print(f"[{duration(elapsed):>6}] {plain(text)}", style=style)

    def _print(self, text: str, style: str = "") -> None:
        # Lines are not wrapped: a pipe or a log file gets each line whole.
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def closing_table(view: dict[str, Any]) -> Table:
    """All evaluations of a run, scores with their standard errors over prompts; k is the responses per prompt."""
    evaluations = view["evaluations"]
    sizes = sorted({score["k"] for evaluation in evaluations for score in evaluation["pass_at"]} - {1})
    passes = [f"pass@{k}" for k in sizes]
    table = Table(title=f"{view['id']}: held-out accuracy")
    for title in ("set", "evaluation", "policy version", "prompts", "k", "avg@k", *passes, "maj@k"):
        table.add_column(title, justify="right")
    for evaluation in sorted(evaluations, key=lambda record: str(record["set"])):
        scores = {score["k"]: _score(score["value"], score["standard_error"]) for score in evaluation["pass_at"]}
        table.add_row(
            evaluation["set"],
            evaluation["name"],
            versions(evaluation),
            str(evaluation["prompts"]),
            str(evaluation["samples_per_prompt"]),
            _average(evaluation),
            *(scores.get(k, "-") for k in sizes),
            _majority(evaluation),
        )
    return table
