"""Owns the report of the ablation: two CSV files, the plots, and the tables of docs/ablation.md.

Must not start runs. `python -m benchmarks.studies.ablation.report` reads results/VARIANT/SEED.json.
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

from benchmarks.studies.ablation.run import KEPT, RESULTS
from benchmarks.studies.ablation.variants import VARIANTS, Variant

IMAGES = Path(__file__).resolve().parents[3] / "docs" / "images"
PANELS = (
    ("accuracy", "accuracy of the samples"),
    ("entropy", "entropy (nats)"),
    ("response_length", "response length (tokens)"),
    ("truncated_share", "truncated share"),
    ("mean_token_probability", "mean token probability"),
    ("clip_high_share", "clipped at the upper bound"),
    ("zero_advantage_share", "trained responses without advantage"),
)
SCALE = 1000
LATE = 7000
"""A rollout step counts as late after this many response tokens."""
PLACES = 25
MIDWAY = 5000
"""The response tokens at which the second table reads the curves."""
SAME_STEPS = (6, 7, 8)
"""Rollout steps that every run reaches. They compare the variants by steps, as the paper does, and not by tokens."""


def load() -> dict[str, list[dict[str, Any]]]:
    """The stored results by variant, in the order of the seeds."""
    return {
        variant.name: [json.loads(path.read_text()) for path in sorted((RESULTS / variant.name).glob("*.json"))]
        for variant in VARIANTS
    }


def final(result: dict[str, Any]) -> dict[str, float]:
    """The final figures of one run, by column of final.csv."""
    evaluations = {evaluation["name"]: evaluation for evaluation in result["evaluations"]}
    before, after = evaluations["before"], evaluations["after"]
    return {
        "accuracy_before": before["accuracy"],
        "accuracy_after": after["accuracy"],
        "accuracy_after_standard_error": after["standard_error"],
        "accuracy_late": fmean(value for at, value in _points(result, "accuracy") if at * SCALE > LATE),
        "pass_at_k": after["pass_at"][-1]["value"],
        "majority": after["majority"],
        "length_after": after["response_length"],
        "truncated_after": after["truncated_share"],
        "rollout_steps": len(result["steps"]),
        "optimizer_steps": result["summary"]["optimizer_steps"],
        "response_tokens": sum(step["response_tokens"] or 0 for step in result["steps"]),
        "entropy_last": result["steps"][-1]["entropy"],
        "wall_seconds": result["summary"]["wall_seconds"],
    }


def spread(values: Sequence[float]) -> tuple[float, float]:
    """(mean, standard error) over seeds. The error is 0 for a single value."""
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def write_tables(results: dict[str, list[dict[str, Any]]]) -> None:
    """Write final.csv with one line per run, and curves.csv with one line per rollout step."""
    with (RESULTS / "final.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        columns = list(final(next(run for runs in results.values() for run in runs)))
        writer.writerow(["variant", "seed", *columns])
        for variant, runs in results.items():
            writer.writerows([variant, run["seed"], *final(run).values()] for run in runs)
    with (RESULTS / "curves.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["variant", "seed", "step", *KEPT])
        for variant, runs in results.items():
            for run in runs:
                start = [variant, run["seed"]]
                writer.writerows([*start, step["step"], *(step[name] for name in KEPT)] for step in run["steps"])


def markdown(results: dict[str, list[dict[str, Any]]]) -> str:
    """The first table of docs/ablation.md: mean and standard error over seeds."""
    lines = [
        "| variant | seeds | held-out avg@4, % | change | pass@4, % | late samples, % | length | truncated, % | "
        "rollout steps | paper: AIME avg@32, % |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    previous: tuple[float, float] | None = None
    for variant in VARIANTS:
        if runs := [final(run) for run in results[variant.name]]:
            accuracy = spread([100 * run["accuracy_after"] for run in runs])
            lines.append(_line(variant, runs, accuracy, previous))
            previous = accuracy
    return "\n".join(lines)


def midway(results: dict[str, list[dict[str, Any]]]) -> str:
    """The second table: the curves at MIDWAY tokens, and the accuracy in SAME_STEPS, with standard errors."""
    lines = [f"| variant | {' | '.join(title for _, title in PANELS[1:])} | accuracy in steps 6 to 8, % |"]
    lines.append("|---" * (len(PANELS) + 1) + "|")
    for variant in VARIANTS:
        if runs := results[variant.name]:
            cells = [spread([_at(run, metric, MIDWAY) for run in runs]) for metric, _ in PANELS[1:]]
            same = spread([100 * _accuracy_at_same_steps(run) for run in runs])
            numbers = [
                f"{mean:.3f} ± {error:.3f}" if mean < 1 else f"{mean:.2f} ± {error:.2f}" for mean, error in cells
            ]
            lines.append(f"| {variant.title} | {' | '.join(numbers)} | {same[0]:.1f} ± {same[1]:.1f} |")
    return "\n".join(lines)


def _at(result: dict[str, Any], metric: str, tokens: float) -> float:
    from numpy import interp

    places, values = zip(*_points(result, metric), strict=True)
    return float(interp(tokens / SCALE, places, values))


def _accuracy_at_same_steps(result: dict[str, Any]) -> float:
    found = [step["accuracy"] for step in result["steps"] if step["step"] in SAME_STEPS]
    return fmean(accuracy for accuracy in found if accuracy is not None)


def _line(
    variant: Variant,
    runs: list[dict[str, float]],
    accuracy: tuple[float, float],
    previous: tuple[float, float] | None,
) -> str:
    def mean(column: str, scale: float = 1.0) -> str:
        return f"{scale * fmean([run[column] for run in runs]):.1f}"

    late = spread([100 * run["accuracy_late"] for run in runs])
    change = "-"
    if previous is not None:
        change = f"{accuracy[0] - previous[0]:+.1f} ± {math.hypot(accuracy[1], previous[1]):.1f}"
    cells = (
        variant.title,
        len(runs),
        f"{accuracy[0]:.1f} ± {accuracy[1]:.1f}",
        change,
        mean("pass_at_k", 100),
        f"{late[0]:.1f} ± {late[1]:.1f}",
        mean("length_after"),
        mean("truncated_after", 100),
        mean("rollout_steps"),
        f"{variant.paper:g}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def draw(results: dict[str, list[dict[str, Any]]]) -> None:
    """Draw ablation.png, the final accuracy with error bars, and ablation-curves.png, figures 2 to 7 of the paper."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    variants = [variant for variant in VARIANTS if results[variant.name]]
    figure, axis = pyplot.subplots(figsize=(9, 4.5), constrained_layout=True)
    for place, variant in enumerate(variants):
        values = [100 * final(run)["accuracy_after"] for run in results[variant.name]]
        mean, error = spread(values)
        axis.bar(place, mean, yerr=error, capsize=5, color=f"C{place}", alpha=0.6)
        axis.plot([place] * len(values), values, "k.", markersize=5)
    axis.set_xticks(range(len(variants)), [variant.title for variant in variants], rotation=20, ha="right")
    axis.set_ylabel("held-out avg@4 (%)")
    axis.set_title("Table 1 at laptop scale: mean, standard error and every seed")
    axis.grid(axis="y", alpha=0.3)
    figure.savefig(IMAGES / "ablation.png", dpi=120)
    figure, axes = pyplot.subplots(2, 4, figsize=(17, 7.5), constrained_layout=True)
    for axis, (metric, title) in zip(axes.flat, PANELS, strict=False):
        for place, variant in enumerate(variants):
            _curve(axis, [_points(run, metric) for run in results[variant.name]], f"C{place}", variant.title)
        _frame(axis, title)
    axes.flat[-1].axis("off")
    axes.flat[-1].legend(*axes.flat[0].get_legend_handles_labels(), loc="center")
    figure.savefig(IMAGES / "ablation-curves.png", dpi=110)
    pyplot.close("all")


def _points(result: dict[str, Any], metric: str) -> list[tuple[float, float]]:
    """(tokens so far, value) of each rollout step that reports the metric. A step without verdicts does not."""
    tokens = accumulate(step["response_tokens"] or 0 for step in result["steps"])
    points = zip(tokens, result["steps"], strict=True)
    return [(at / SCALE, step[metric]) for at, step in points if step[metric] is not None]


def _curve(axis: Any, runs: list[list[tuple[float, float]]], colour: str, label: str) -> None:
    """Draw the mean over seeds, interpolated where all have a value, with a band of one standard error."""
    from numpy import interp, linspace

    at = linspace(max(run[0][0] for run in runs), min(run[-1][0] for run in runs), PLACES)
    values = [interp(at, [place for place, _ in run], [value for _, value in run]) for run in runs]
    bands = [spread([float(value[place]) for value in values]) for place in range(PLACES)]
    axis.plot(at, [mean for mean, _ in bands], color=colour, label=label)
    low, high = [mean - error for mean, error in bands], [mean + error for mean, error in bands]
    axis.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)


def _frame(axis: Any, title: str) -> None:
    axis.set_title(title)
    axis.set_xlabel("generated response tokens (thousands)")
    axis.grid(alpha=0.3)


def main() -> int:
    """Write CSV files and plots from the stored results and print the tables. Exit status 1 without results."""
    results = load()
    if not any(results.values()):
        print(f"{RESULTS} has no results; `python -m benchmarks.studies.ablation.run` creates them", file=sys.stderr)
        return 1
    write_tables(results)
    draw(results)
    print(markdown(results), midway(results), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
