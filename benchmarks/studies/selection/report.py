"""Owns the report of the simulation: a table of ratios to `uniform`, and one picture.

Must not simulate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from benchmarks.studies.selection.closed_forms import cost_over, samples_drawn, total_variation
from benchmarks.studies.selection.prompts import POPULATIONS, Rates, Way
from benchmarks.studies.selection.simulate import Result, Scale
from services.sampler.selection.posterior import mixed

BINS = 20
HARD = 0.1
"""A prompt counts as hard up to this pass rate."""
COLUMNS = (
    "prompts",
    "drift",
    "strategy",
    "samples per trained sample",
    "of uniform",
    "closed form",
    "mean abs(p - 1/2)",
    "TV to uniform",
    "hard, %",
    "prompts trained",
    "mixed: believed / true",
)
Runs = Mapping[tuple[str, float, Way], Sequence[Result]]
"""By population, drift and way: one result per seed."""


def cost(result: Result, scale: Scale) -> float:
    """Samples generated per trained sample."""
    return sum(result.samples) / (scale.steps * scale.groups_per_step * scale.group_size)


def spread_of(results: Sequence[Result]) -> Rates:
    """The share of trained groups in each of BINS equal bins of the pass rate, over all seeds."""
    rates = [rate for result in results for rate in result.kept_rates]
    counts, _ = np.histogram(rates, bins=BINS, range=(0.0, 1.0))
    return np.asarray(counts / len(rates), dtype=np.float64)


def closed_form(population: str, way: Way, scale: Scale, seeds: Sequence[int]) -> float:
    """Samples per trained sample according to `cost_over`, for the same prompts without drift."""
    screened = way.screen_samples if way.screens else scale.group_size
    found = []
    for seed in seeds:
        rates = POPULATIONS[population](np.random.default_rng(seed), scale.prompts)
        found.append(cost_over(rates.tolist(), [1.0] * scale.prompts, scale.group_size, screened))
    return fmean(found) / scale.group_size


def table(runs: Runs, scale: Scale, seeds: Sequence[int]) -> str:
    """The Markdown table: mean and standard error over seeds; ratios to `uniform` are taken per seed."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for (population, drift, way), results in runs.items():
        uniform = runs[population, drift, Way("uniform")]
        costs = [cost(result, scale) for result in results]
        ratios = [own / cost(theirs, scale) for own, theirs in zip(costs, uniform, strict=True)]
        rates = np.concatenate([result.kept_rates for result in results])
        formula = "-" if drift or way.strategy == "boundary" else f"{closed_form(population, way, scale, seeds):.3f}"
        cells = (
            population,
            f"{drift:g}",
            way.title,
            _mean(costs),
            _mean(ratios),
            formula,
            f"{np.abs(rates - 0.5).mean():.3f}",
            f"{total_variation(spread_of(results).tolist(), spread_of(uniform).tolist()):.3f}",
            f"{100 * (rates <= HARD).mean():.1f}",
            f"{fmean(len(result.trained) for result in results):.0f}",
            f"{_mean_of(results, 'believed'):.2f} / {_mean_of(results, 'true'):.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(values: Sequence[float]) -> str:
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{fmean(values):.3f} ± {error:.3f}"


def _mean_of(results: Sequence[Result], name: str) -> float:
    return fmean(value for result in results for value in getattr(result, name))


def draw(runs: Runs, scale: Scale, folder: Path) -> Path:
    """Draw selection.png in `folder`: trained groups, cost per rollout step, and the closed forms of the screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drift = max(drift for _, drift, _ in runs)
    ways = list(dict.fromkeys(way for _, _, way in runs if not way.again))
    figure, axes = pyplot.subplots(2, 3, figsize=(16, 8.5), constrained_layout=True)
    for row, population in enumerate(POPULATIONS):
        for place, way in enumerate(ways):
            results = runs[population, drift, way]
            axes[row][0].stairs(spread_of(results), np.linspace(0, 1, BINS + 1), color=f"C{place}", label=way.title)
            by_step = np.mean([result.samples for result in results], axis=0)
            trained = scale.groups_per_step * scale.group_size
            axes[row][1].plot(range(1, scale.steps + 1), by_step / trained, color=f"C{place}", label=way.title)
        _frame(axes[row][0], f"{population}: trained groups", "pass rate p when drawn", "share")
        title = f"{population}: samples per trained sample"
        _frame(axes[row][1], title, f"rollout step (logit drift {drift:g} per step)", "")
        axes[row][1].set_ylim(bottom=0)
    axes[0][0].legend()
    _draw_closed_forms(axes[0][2], axes[1][2], ways, scale.group_size)
    path = folder / "selection.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _draw_closed_forms(chance: Any, cost_drawn: Any, ways: Sequence[Way], size: int) -> None:
    at = np.linspace(0.004, 0.996, 249)
    for place, way in enumerate(ways):
        if way.strategy == "boundary":  # not a function of the pass rate alone
            continue
        screened = way.screen_samples if way.screens else size
        chance.plot(at, [mixed(rate, screened) for rate in at], color=f"C{place}")
        cost_drawn.plot(at, [samples_drawn(rate, size, screened) for rate in at], color=f"C{place}")
    _frame(chance, "P(kept | p)", "pass rate p", "")
    _frame(cost_drawn, "samples per prompt drawn", "pass rate p", "")
    cost_drawn.set_ylim(bottom=0)


def _frame(axis: Any, title: str, across: str, up: str) -> None:
    axis.set_title(title)
    axis.set_xlabel(across)
    axis.set_ylabel(up)
    axis.grid(alpha=0.3)
