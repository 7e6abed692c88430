"""Owns `python -m benchmarks.studies.selection FOLDER`: it prints the table and writes selection.png there.

Must not contain logic of its own. Takes up to a minute on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.studies.selection.prompts import POPULATIONS, Way
from benchmarks.studies.selection.report import Runs, draw, table
from benchmarks.studies.selection.simulate import Scale, Simulation

WAYS = (
    Way("uniform"),
    Way("uniform", again=True),
    Way("boundary"),
    Way("screen", 2),
    Way("screen", 4),
    Way("screen", 8),
)
DRIFTS = (0.0, 0.03)


def simulate(scale: Scale, seeds: Sequence[int]) -> Runs:
    """Simulate every way of selection on all populations, without and with drift."""
    return {
        (population, drift, way): [
            Simulation(population, way, replace(scale, drift=drift), seed).run() for seed in seeds
        ]
        for population in POPULATIONS
        for drift in DRIFTS
        for way in WAYS
    }


def main() -> None:
    """Simulate, print the table and draw the picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.selection", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder for selection.png")
    parser.add_argument("--seeds", type=int, default=4, help="simulations of each way, each with its own prompts")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    scale, seeds = Scale(), range(options.seeds)
    runs = simulate(scale, seeds)
    print(table(runs, scale, seeds))
    print(f"\n{draw(runs, scale, options.folder)}")


if __name__ == "__main__":
    main()
