"""Owns the plot of a run's curves: the metrics that the paper monitors, over rollout steps.

Must not open a window.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from penstock_client.models import Evaluation, RolloutStep, reward_metric, reward_names

# Title of the panel; its metrics with their labels.
PANELS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("accuracy", (("accuracy", "accuracy"),)),
    ("reward", (("reward", "reward"),)),
    ("entropy (nats)", (("entropy", "entropy"),)),
    ("response length (tokens)", (("response_length", "response length"),)),
    ("mean token probability", (("mean_token_probability", "mean token probability"),)),
    (
        "groups and staleness",
        (
            ("groups_kept", "kept"),
            ("groups_filtered", "filtered"),
            ("groups_stale", "stale"),
            ("staleness_mean", "mean staleness (rollout steps)"),
        ),
    ),
)
SCORES = "scores"


def panels_of(steps: list[RolloutStep]) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    """PANELS, and one with the mean score and each named reward if they say more than the accuracy."""
    names = reward_names({name for step in steps for name in step.metrics})
    partial = any("score" in step.metrics and step.metrics["score"] != step.metrics["accuracy"] for step in steps)
    if not names and not partial:
        return PANELS
    lines = (("score", "score"), *((reward_metric(name), name) for name in names))
    return (*PANELS, (SCORES, lines))


def draw_curves(title: str, steps: list[RolloutStep], evaluations: list[Evaluation], path: Path) -> Path:
    """Write the curves as PNG.

    avg@k of every set is drawn at the oldest policy version that responded, with its standard error.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = panels_of(steps)
    columns = math.ceil(len(panels) / 2)
    figure, axes = pyplot.subplots(2, columns, figsize=(13 * columns / 3, 7), constrained_layout=True)
    figure.suptitle(title)
    for axis, (name, lines) in zip(axes.flat, panels, strict=False):
        _panel(axis, name, lines, steps)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    _held_out(axes.flat[0], evaluations)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _held_out(axis: Any, evaluations: list[Evaluation]) -> None:
    for name in dict.fromkeys(evaluation.set for evaluation in evaluations):
        records = [evaluation for evaluation in evaluations if evaluation.set == name]
        records.sort(key=lambda record: record.version)
        axis.errorbar(
            [record.version for record in records],
            [record.accuracy for record in records],
            yerr=[record.standard_error for record in records],
            fmt="D--",
            markersize=4,
            linewidth=1,
            capsize=3,
            label=f"{name}, avg@{records[0].samples_per_prompt}",
        )
    if evaluations:
        axis.legend(fontsize="small")


def _panel(axis: Any, title: str, lines: tuple[tuple[str, str], ...], steps: list[RolloutStep]) -> None:
    for metric, label in lines:
        points = [(step.step, step.metrics[metric]) for step in steps if metric in step.metrics]
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
    axis.set_title(title)
    axis.set_xlabel("rollout step")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    if len(lines) > 1 and axis.lines:
        axis.legend(fontsize="small")
