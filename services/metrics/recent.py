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


def _p90(values: Sequence[float]) -> float:
    """The 90th percentile, by linear interpolation; `values`: at least two."""
    return statistics.quantiles(values, n=10, method="inclusive")[-1]


_STATISTICS: Mapping[int, tuple[int, Mapping[str, Callable[[Sequence[float]], float]]]] = {
    10: (10, {"mean": statistics.fmean}),
    LONGEST: (20, {"median": statistics.median, "p90": _p90}),
}
"""By steps of the window: how many it needs before it is shown, and its statistics."""

WINDOWED = (
    *("accuracy", "effective_sample_size", "entropy"),
    *("groups_dead", "groups_filtered", "groups_kept", "groups_screened_out", "groups_stale"),
    *("logprob_difference_mean", "mismatch_kl", "publish_seconds", "response_length", "reward", "staleness_mean"),
    *("truncated_share", "zero_advantage_share"),
)
"""The step metrics that have windows: those that alerts read, because each costs three series of a run."""

RECENT = {
    name: Gauge(
        f"penstock_recent_{FAMILY_OF_STEP_METRIC[name]}",
        f"The step metric {name} over the last rollout steps that have it.",
        ["run", "steps", "statistic"],
    )
    for name in WINDOWED
}

_last: dict[str, dict[str, deque[float]]] = {}
"""By run and step metric: its values in the last LONGEST steps that have it, the newest one last."""


def recent_families() -> Iterator[Gauge]:
    """Every family of this module."""
    yield from RECENT.values()


def show_history(run: str, steps: Iterable[Mapping[str, float]]) -> None:
    """Show the last of these steps, oldest first, and windows over them alone: the run continues after it."""
    forget_recent(run)
    newest = list(steps)[-LONGEST:]
    for metrics in newest:
        _add(run, metrics)
    if newest:
        show_step(run, newest[-1])
        _show(run)


def show_committed(run: str, metrics: Mapping[str, float]) -> None:
    """Show a committed rollout step, and the windows that end with it."""
    show_step(run, metrics)
    _add(run, metrics)
    _show(run)


def forget_recent(run: str) -> None:
    """Forget the steps of `run` and remove its windows."""
    _last.pop(run, None)
    for family in recent_families():
        family.remove_by_labels({"run": run})


def _add(run: str, metrics: Mapping[str, float]) -> None:
    of_run = _last.setdefault(run, {})
    for name in WINDOWED:
        if name in metrics:
            of_run.setdefault(name, deque(maxlen=LONGEST)).append(metrics[name])


def _show(run: str) -> None:
    for name, kept in _last[run].items():
        for steps, (fewest, computed) in _STATISTICS.items():
            values = list(kept)[-steps:]
            if len(values) >= fewest:
                for statistic, compute in computed.items():
                    RECENT[name].labels(run, str(steps), statistic).set(compute(values))
