"""Owns the runs of the ablation: one after the other on a local stack, each result stored when its run finishes.

Must not evaluate the results; report.py does. `python -m benchmarks.studies.ablation.run` skips the runs that have a
result.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from benchmarks.studies.ablation.variants import SEEDS, VARIANTS, Variant, recipe
from deploy.cli.common import open_api
from deploy.local.stack import LocalStack
from penstock_client.answers import as_json
from penstock_client.cli.following.follow import cancel_unfinished, cancelled_on_interrupt, follow
from penstock_client.cli.reporting import EXIT_INTERRUPTED
from penstock_client.cli.terminal import print_line
from penstock_client.client import Client
from penstock_client.models import RolloutStep, Run

RESULTS = Path(__file__).with_name("results")
KEPT = (
    "accuracy",
    "reward",
    "entropy",
    "response_length",
    "response_tokens",
    "truncated_share",
    "mean_token_probability",
    "clip_low_share",
    "clip_high_share",
    "gradient_norm",
    "groups_kept",
    "groups_filtered",
    "groups_stale",
    "mismatch_kl",
    "zero_advantage_share",
)
"""The metrics of a rollout step that a result stores."""


def main() -> int:
    """Run the missing runs. Exit status 1 if a run failed, 130 if interrupted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.ablation.run", description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after this many minutes")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder for the stack's files")
    parser.add_argument("--port", type=int, default=8471)
    arguments = parser.parse_args()
    missing = [(variant, seed) for seed in SEEDS for variant in VARIANTS if not result_file(variant, seed).exists()]
    print_line(f"{len(missing)} of {len(VARIANTS) * len(SEEDS)} runs are missing")
    if not missing:
        return 0
    stack = LocalStack(arguments.runs, port=arguments.port, report=print_line)
    stack.check(recipe(*missing[0]))
    try:
        with stack, open_api(stack.api) as api:
            cancel_unfinished(api, "ablation")
            return int(not run_all(stack, api, missing, time.monotonic() + arguments.minutes * 60))
    except KeyboardInterrupt as signal:
        print_line(f"stopped by {signal or 'SIGINT'}; start the command again for the remaining runs")
        return EXIT_INTERRUPTED


def run_all(stack: LocalStack, api: Client, missing: list[tuple[Variant, int]], ends: float) -> bool:
    """Run one after the other, starting none after `ends` (monotonic clock). Returns whether all that ran succeeded."""
    succeeded = True
    for variant, seed in missing:
        if time.monotonic() > ends:
            print_line("the time limit is reached; start the command again for the remaining runs")
            break
        succeeded &= run(stack, api, variant, seed)
    return succeeded


def result_file(variant: Variant, seed: int) -> Path:
    """The file with the result of a finished run."""
    return RESULTS / variant.name / f"{seed}.json"


def run(stack: LocalStack, api: Client, variant: Variant, seed: int) -> bool:
    """Run one variant and seed to its end. Returns whether it succeeded; a result is written only then."""
    wanted = recipe(variant, seed)
    name = api.submit(wanted.model_dump(mode="json")).id
    with cancelled_on_interrupt(api, name):
        view, steps = follow(api, name, stack.check_alive)
    if view.state != "succeeded":
        print(f"{name} {view.state}: {view.reason}; the next start retries it", file=sys.stderr, flush=True)
        return False
    write_result(variant, seed, view, steps)
    return True


def write_result(variant: Variant, seed: int, view: Run, steps: list[RolloutStep]) -> None:
    """Store what the report needs, completely or not at all."""
    result = {
        "variant": variant.name,
        "seed": seed,
        "summary": view.summary,
        "evaluations": [as_json(evaluation) for evaluation in view.evaluations],
        "steps": [{"step": step.step, **{name: step.metrics.get(name) for name in KEPT}} for step in steps],
    }
    path = result_file(variant, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(partial, path)


if __name__ == "__main__":
    sys.exit(main())
