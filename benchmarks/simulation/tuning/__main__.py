"""Owns the comparison on the simulated pipeline: `python -m benchmarks.simulation.tuning [--scenario WORDS]`.

It takes five minutes.

Must not decide what is good: it prints the best static setting of a sweep beside what tuning reached from a bad one.
"""

from __future__ import annotations

import argparse
import sys
import time

from benchmarks.simulation.tuning.pipeline import Pipeline, Score
from benchmarks.simulation.tuning.scenarios import SCENARIOS, Scenario
from benchmarks.simulation.tuning.sweep import best_static
from services.controller.tuning.policy import Policy

ASKED = 0.95
"""The share of the best static setting's trained tokens per second that tuning has to reach."""


def tuned(scenario: Scenario, seed: int = 0) -> Score:
    """What tuning reaches from the scenario's start."""
    return Pipeline(scenario, scenario.start, Policy(scenario.rules), seed).run()


def row(name: str, score: Score) -> str:
    """One line about a run."""
    values = score.values
    knobs = f"{values.max_inflight_groups:>4} {values.max_staleness:>2} {values.replicas:>3}"
    return (
        f"  {name:<12} {knobs}  {score.tokens_per_s:>8.0f} tokens/s {score.groups_per_s:>7.3f} groups/s  "
        f"idle {score.idle:>4.0%}  staleness {score.staleness:.2f}  {score.gpu_s:>6.1f} GPU-s per group"
    )


def main() -> int:
    """Print, per scenario, the best static setting and tuning from two seeds; exit status 1 below the share asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation.tuning", description=main.__doc__)
    parser.add_argument("--scenario", default="", help="only scenarios whose name contains these words")
    parser.add_argument("--moves", action="store_true", help="print every decision")
    arguments = parser.parse_args()
    missed = False
    print("values: limits.max_inflight_groups, limits.max_staleness, rollout.replicas; of tuned runs, those at the end")
    for scenario in (each for each in SCENARIOS if arguments.scenario in each.name):
        begins = time.monotonic()
        best = best_static(scenario)
        print(f"{scenario.name} (staleness at most {scenario.staleness:g})\n{row('best static', best)}", flush=True)
        for seed in (0, 1):
            found = tuned(scenario, seed)
            ratio, groups = found.tokens_per_s / best.tokens_per_s, found.groups_per_s / best.groups_per_s
            missed |= ratio < ASKED
            print(f"{row(f'tuned {seed}', found)}  ratio {ratio:.3f} (groups {groups:.3f}), {len(found.moves)} moves")
            for step, move in found.moves if arguments.moves else ():
                print(f"    {step:>4} {move.text}")
        print(f"  {time.monotonic() - begins:.0f} s", flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
