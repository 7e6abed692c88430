"""The selection benchmark agrees with the closed forms, and its report is complete."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.studies.selection import report
from benchmarks.studies.selection.__main__ import DRIFTS, WAYS, simulate
from benchmarks.studies.selection.prompts import POPULATIONS, Way, risen
from benchmarks.studies.selection.simulate import Scale, Simulation

SMALL = Scale(prompts=200, steps=12, groups_per_step=32, in_flight=16)


@pytest.mark.parametrize("population", POPULATIONS)
@pytest.mark.parametrize("way", [Way("uniform"), Way("screen", 4)])
def test_without_drift_the_cost_equals_the_closed_form(population: str, way: Way) -> None:
    result = Simulation(population, way, SMALL, seed=3).run()
    expected = report.closed_form(population, way, SMALL, [3])
    assert report.cost(result, SMALL) == pytest.approx(expected, rel=0.1)
    assert len(result.kept_rates) == sum(result.trained.values()) == 12 * 32


def test_boundary_costs_less_if_most_prompts_are_impossible() -> None:
    costs = {
        way.strategy: report.cost(Simulation("mostly impossible", way, replace(SMALL, steps=30), seed=0).run(), SMALL)
        for way in (Way("uniform"), Way("boundary"))
    }
    assert costs["boundary"] < 0.6 * costs["uniform"]


def test_strategies_get_the_same_prompts_and_are_repeatable() -> None:
    first, second = (Simulation("U-shaped", Way("boundary"), SMALL, seed=1).run() for _ in range(2))
    assert first == second
    other = Simulation("U-shaped", Way("uniform", again=True), SMALL, seed=1).run()
    own = Simulation("U-shaped", Way("uniform"), SMALL, seed=1).run()
    assert own.true[: SMALL.in_flight] == other.true[: SMALL.in_flight]
    assert own.kept_rates != other.kept_rates


def test_training_raises_the_logit_but_not_0_and_1() -> None:
    rates = risen(np.array([0.0, 0.5, 0.9, 1.0]), np.log(3.0))
    assert rates == pytest.approx([0.0, 0.75, 27 / 28, 1.0])


def test_the_report_has_every_strategy_and_a_picture(tmp_path: Path) -> None:
    scale, seeds = replace(SMALL, steps=3), (0, 1)
    runs = simulate(scale, seeds)
    lines = report.table(runs, scale, seeds).splitlines()
    assert len(lines) == 2 + len(POPULATIONS) * len(DRIFTS) * len(WAYS)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert tuple(cells[0]) == report.COLUMNS
    for row in cells[2:]:
        assert len(row) == len(report.COLUMNS)
        assert (row[5] == "-") == (row[1] != "0" or row[2] == "boundary")
        if row[2] == "uniform":
            assert row[4] == "1.000 ± 0.000"
            assert float(row[7]) == 0
    assert report.draw(runs, scale, tmp_path) == tmp_path / "selection.png"
    assert (tmp_path / "selection.png").stat().st_size > 20_000
