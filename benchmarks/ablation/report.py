"""Owns what the ablation's results say: two CSV files, the plots, and the table for the docs page.

Must not run anything; `python -m benchmarks.ablation.report` reads results/.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.ablation.rows import ROWS, Row
from benchmarks.ablation.run import KEPT, RESULTS

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
PANELS = (
    ("accuracy", "accuracy of what was drawn"), ("entropy", "entropy (nats)"),
    ("response_length", "response length (tokens)"), ("truncated_share", "truncated share"),
    ("mean_token_probability", "mean token probability"), ("clip_high_share", "clipped at the upper bound"),
    ("zero_advantage_share", "trained responses without advantage"),
)  # fmt: skip
SCALE = 1000
LATE = 7000
"""Response tokens after which a step counts as late."""
PLACES = 25
MIDWAY = 5000
"""Response tokens at which the second table looks at the curves."""
SAME_STEPS = (6, 7, 8)
"""Rollout steps that every run comes to: where rows are compared by steps, as the paper does, and not by tokens."""


def load() -> dict[str, list[dict[str, Any]]]:
    """The results so far, by row."""
    found: dict[str, list[dict[str, Any]]] = {row.name: [] for row in ROWS}
    for path in sorted(RESULTS.glob("*.json")):
        one = json.loads(path.read_text())
        found[one["row"]].append(one)
    return found


def final(result: dict[str, Any]) -> dict[str, float]:
    """What one run came to, by column of final.csv."""
    after = next(one for one in result["evaluations"] if one["name"] == "after")
    before = next(one for one in result["evaluations"] if one["name"] == "before")
    return {
        "accuracy_before": before["accuracy"], "accuracy_after": after["accuracy"],
        "accuracy_after_standard_error": after["standard_error"],
        "accuracy_late": fmean(value for at, value in _points(result, "accuracy") if at * SCALE > LATE),
        "pass_at_k": after["pass_at"][-1]["value"],
        "majority": after["majority"], "length_after": after["response_length"],
        "truncated_after": after["truncated_share"], "rollout_steps": len(result["steps"]),
        "optimizer_steps": result["summary"]["optimizer_steps"],
        "response_tokens": sum(one["response_tokens"] or 0 for one in result["steps"]),
        "entropy_last": result["steps"][-1]["entropy"], "wall_seconds": result["summary"]["wall_seconds"],
    }  # fmt: skip


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error over seeds (0 for a single one)."""
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def write_tables(results: dict[str, list[dict[str, Any]]]) -> None:
    """final.csv: one line a run; curves.csv: one line a rollout step."""
    with (RESULTS / "final.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        columns = list(final(next(one for runs in results.values() for one in runs)))
        writer.writerow(["row", "seed", *columns])
        for row, runs in results.items():
            writer.writerows([row, one["seed"], *final(one).values()] for one in runs)
    with (RESULTS / "curves.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["row", "seed", "step", *KEPT])
        for row, runs in results.items():
            for one in runs:
                writer.writerows([row, one["seed"], step["step"], *(step[k] for k in KEPT)] for step in one["steps"])


def markdown(results: dict[str, list[dict[str, Any]]]) -> str:
    """The table of the docs page: mean and standard error over seeds."""
    lines = [
        "| row | seeds | held-out avg@4, % | over the row above | pass@4, % | drawn late, % | length | truncated, % | "
        "rollout steps | paper: AIME avg@32, % |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    above: tuple[float, float] | None = None
    for row in ROWS:
        if runs := [final(one) for one in results[row.name]]:
            now = spread([100 * one["accuracy_after"] for one in runs])
            lines.append(_line(row, runs, now, above))
            above = now
    return "\n".join(lines)


def midway(results: dict[str, list[dict[str, Any]]]) -> str:
    """Where the curves are at MIDWAY tokens, and the accuracy at the same rollout steps: mean and standard error."""
    lines = [f"| row | {' | '.join(title for _, title in PANELS[1:])} | accuracy drawn in steps 6 to 8, % |"]
    lines.append("|---" * (len(PANELS) + 1) + "|")
    for row in ROWS:
        if runs := results[row.name]:
            cells = [spread([_at(one, metric, MIDWAY) for one in runs]) for metric, _ in PANELS[1:]]
            same = spread([100 * _accuracy_at_same_steps(one) for one in runs])
            numbers = [
                f"{mean:.3f} ± {error:.3f}" if mean < 1 else f"{mean:.2f} ± {error:.2f}" for mean, error in cells
            ]
            lines.append(f"| {row.title} | {' | '.join(numbers)} | {same[0]:.1f} ± {same[1]:.1f} |")
    return "\n".join(lines)


def _at(result: dict[str, Any], metric: str, tokens: float) -> float:
    from numpy import interp

    return float(interp(tokens / SCALE, *zip(*_points(result, metric), strict=True)))


def _accuracy_at_same_steps(result: dict[str, Any]) -> float:
    found = [step["accuracy"] for step in result["steps"] if step["step"] in SAME_STEPS]
    return fmean(one for one in found if one is not None)


def _line(row: Row, runs: list[dict[str, float]], now: tuple[float, float], above: tuple[float, float] | None) -> str:
    def mean(column: str, scale: float = 1.0) -> str:
        return f"{scale * fmean([one[column] for one in runs]):.1f}"

    late = spread([100 * one["accuracy_late"] for one in runs])
    change = "-" if above is None else f"{now[0] - above[0]:+.1f} ± {math.hypot(now[1], above[1]):.1f}"
    cells = (
        row.title, len(runs), f"{now[0]:.1f} ± {now[1]:.1f}", change, mean("pass_at_k", 100),
        f"{late[0]:.1f} ± {late[1]:.1f}", mean("length_after"), mean("truncated_after", 100), mean("rollout_steps"),
        f"{row.paper:g}",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def draw(results: dict[str, list[dict[str, Any]]]) -> None:
    """ablation.png: final accuracy with error bars; ablation-curves.png: the paper's figures 2 to 7 at this scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in ROWS if results[row.name]]
    figure, axis = pyplot.subplots(figsize=(9, 4.5), constrained_layout=True)
    for place, row in enumerate(rows):
        values = [100 * final(one)["accuracy_after"] for one in results[row.name]]
        mean, error = spread(values)
        axis.bar(place, mean, yerr=error, capsize=5, color=f"C{place}", alpha=0.6)
        axis.plot([place] * len(values), values, "k.", markersize=5)
    axis.set_xticks(range(len(rows)), [row.title for row in rows], rotation=20, ha="right")
    axis.set_ylabel("held-out avg@4 (%)")
    axis.set_title("Table 1 at laptop scale: mean, standard error and every seed")
    axis.grid(axis="y", alpha=0.3)
    figure.savefig(IMAGES / "ablation.png", dpi=120)
    figure, axes = pyplot.subplots(2, 4, figsize=(17, 7.5), constrained_layout=True)
    for axis, (metric, title) in zip(axes.flat, PANELS, strict=False):
        for place, row in enumerate(rows):
            _curve(axis, [_points(one, metric) for one in results[row.name]], f"C{place}", row.title)
        _frame(axis, title)
    axes.flat[-1].axis("off")
    axes.flat[-1].legend(*axes.flat[0].get_legend_handles_labels(), loc="center")
    figure.savefig(IMAGES / "ablation-curves.png", dpi=110)
    pyplot.close("all")


def _points(result: dict[str, Any], metric: str) -> list[tuple[float, float]]:
    """(tokens so far, value) of every rollout step that reports the metric; a window without verdicts does not."""
    tokens = accumulate(step["response_tokens"] or 0 for step in result["steps"])
    points = zip(tokens, result["steps"], strict=True)
    return [(at / SCALE, step[metric]) for at, step in points if step[metric] is not None]


def _curve(axis: Any, runs: list[list[tuple[float, float]]], colour: str, label: str) -> None:
    """The mean over seeds, interpolated to the same tokens where all have a value; a band of one standard error."""
    from numpy import interp, linspace

    at = linspace(max(run[0][0] for run in runs), min(run[-1][0] for run in runs), PLACES)
    values = [interp(at, *zip(*run, strict=True)) for run in runs]
    bands = [spread([float(one[place]) for one in values]) for place in range(PLACES)]
    axis.plot(at, [mean for mean, _ in bands], color=colour, label=label)
    low, high = [mean - error for mean, error in bands], [mean + error for mean, error in bands]
    axis.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)


def _frame(axis: Any, title: str) -> None:
    axis.set_title(title)
    axis.set_xlabel("generated response tokens (thousands)")
    axis.grid(alpha=0.3)


def main() -> int:
    """Write tables and plots from what is there, and print the table; exit status 1 if there is nothing."""
    results = load()
    if not any(results.values()):
        print(f"{RESULTS} holds no result; `python -m benchmarks.ablation.run` makes them", file=sys.stderr)
        return 1
    write_tables(results)
    draw(results)
    print(markdown(results), midway(results), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
