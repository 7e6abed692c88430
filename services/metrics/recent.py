"""Owns the gauges over a run's last rollout steps, which alerts on learning compare.

Must not read a clock: a window is a number of steps, so that it means the same for steps of 3 s and of 20 min.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import Gauge

from services.metrics.tables import FAMILY_OF_STEP_METRIC, show_step

LONGEST = 50
"""Steps of the longer window."""
FEWEST = 20
"""Values that its median needs before it is shown."""

_STATISTICS: Mapping[int, tuple[int, Mapping[str, Callable[[Sequence[float]], float]]]] = {
    10: (10, {"mean": statistics.fmean}),
    LONGEST: (FEWEST, {"median": statistics.median}),
}
"""By steps of the window: how many it needs before it is shown, and its statistics."""
COUNTED = ("logprob_off_replicas", "skipped_optimizer_steps")
"""The step metrics of which one alone is enough for an alert: their sum of the last 10 steps, from the first one on."""
_SUMMED = 10
EXTREMES: Mapping[str, tuple[str, Callable[[float, float], float]]] = {
    "entropy": ("highest_median", max),
    "response_length": ("lowest_median", min),
    "reward": ("highest_median", max),
}
"""The step metrics whose medians are remembered over all steps, because no window of steps shows a slow decline."""

WINDOWED = (
    *("accuracy", "effective_sample_size", "entropy"),
    *("groups_dead", "groups_filtered", "groups_kept", "groups_screened_out", "groups_stale"),
    *("logprob_difference_mean", "mismatch_kl", "publish_seconds", "response_length", "reward", "staleness_mean"),
    *("truncated_share", "zero_advantage_share"),
)
"""The step metrics that have windows: those that alerts read, because each costs two series of a run."""

RECENT = {
    name: Gauge(
        f"penstock_recent_{FAMILY_OF_STEP_METRIC[name]}",
        f"The step metric {name} over the last rollout steps that have it, or over all.",
        ["run", "steps", "statistic"],
    )
    for name in (*WINDOWED, *COUNTED)
}

_last: dict[str, dict[str, deque[float]]] = {}
"""By run and step metric: its values in the last LONGEST steps that have it, the newest one last."""
_extremes: dict[str, dict[str, float]] = {}
"""By run and step metric of EXTREMES: the highest or lowest median of LONGEST steps so far."""


def recent_families() -> Iterator[Gauge]:
    """Every family of this module."""
    yield from RECENT.values()


def show_history(run: str, steps: Iterable[Mapping[str, float]]) -> None:
    """Show the last of these steps, oldest first, and windows over them alone: the run continues after it.

    `steps`: all that the run has, because the extremes are of its whole history.
    """
    forget_recent(run)
    last: Mapping[str, float] | None = None
    for last in steps:
        _add(run, last)
    if last is not None:
        show_step(run, last)
        _show(run)


def show_committed(run: str, metrics: Mapping[str, float]) -> None:
    """Show a committed rollout step, and the windows that end with it."""
    show_step(run, metrics)
    _add(run, metrics)
    _show(run)


def forget_recent(run: str) -> None:
    """Forget the steps of `run` and remove its windows."""
    _last.pop(run, None)
    _extremes.pop(run, None)
    for family in recent_families():
        family.remove_by_labels({"run": run})


def _add(run: str, metrics: Mapping[str, float]) -> None:
    of_run = _last.setdefault(run, {})
    for name in (*WINDOWED, *COUNTED):
        if name in metrics:
            of_run.setdefault(name, deque(maxlen=LONGEST)).append(metrics[name])
            if name in EXTREMES and len(of_run[name]) >= FEWEST:
                median, (_, further) = statistics.median(of_run[name]), EXTREMES[name]
                extremes = _extremes.setdefault(run, {})
                extremes[name] = further(extremes.get(name, median), median)


def _show(run: str) -> None:
    for name, kept in _last[run].items():
        if name in COUNTED:
            RECENT[name].labels(run, str(_SUMMED), "sum").set(sum(list(kept)[-_SUMMED:]))
            continue
        for steps, (fewest, computed) in _STATISTICS.items():
            values = list(kept)[-steps:]
            if len(values) >= fewest:
                for statistic, compute in computed.items():
                    RECENT[name].labels(run, str(steps), statistic).set(compute(values))
    for name, value in _extremes.get(run, {}).items():
        RECENT[name].labels(run, "all", EXTREMES[name][0]).set(value)
