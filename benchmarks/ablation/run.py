"""Owns the ablation's runs: a local stack, one run after the other, each result kept as soon as it is there.

Must not draw conclusions; the report does. `python -m benchmarks.ablation.run` goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.ablation.rows import ROWS, SEEDS, Row, recipe
from deploy.cli.client import Api
from deploy.cli.common import EXIT_INTERRUPTED, cancel_unfinished, cancelled_on_interrupt, follow
from deploy.cli.terminal import print_line
from deploy.local.stack import LocalStack

RESULTS = Path(__file__).with_name("results")
KEPT = (
    "accuracy", "reward", "entropy", "response_length", "response_tokens", "truncated_share", "mean_token_probability",
    "clip_low_share", "clip_high_share", "gradient_norm", "groups_kept", "groups_filtered", "groups_stale",
    "mismatch_kl", "zero_advantage_share",
)  # fmt: skip
"""Which metrics of a rollout step are written down."""


def main() -> int:
    """Run what is missing; exit status 1 if a run failed, 130 if it was stopped."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ablation.run", description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after this many minutes")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder for the stack's files")
    parser.add_argument("--port", type=int, default=8471)
    arguments = parser.parse_args()
    missing = [(row, seed) for seed in SEEDS for row in ROWS if not result_file(row, seed).exists()]
    print_line(f"{len(missing)} of {len(ROWS) * len(SEEDS)} runs are missing")
    if not missing:
        return 0
    stack = LocalStack(arguments.runs, port=arguments.port, report=print_line)
    stack.check(recipe(*missing[0]))
    try:
        with stack, Api(stack.api) as api:
            cancel_unfinished(api, "ablation")
            return int(not run_all(stack, api, missing, time.monotonic() + arguments.minutes * 60))
    except KeyboardInterrupt as signal:
        print_line(f"stopped by {signal or 'SIGINT'}; the rest goes on from here")
        return EXIT_INTERRUPTED


def run_all(stack: LocalStack, api: Api, missing: list[tuple[Row, int]], ends: float) -> bool:
    """Run one after the other, beginning none after `ends` (monotonic clock); whether all that began succeeded."""
    succeeded = True
    for row, seed in missing:
        if time.monotonic() > ends:
            print_line("the time is over; the rest goes on from here")
            break
        succeeded &= run(stack, api, row, seed)
    return succeeded


def result_file(row: Row, seed: int) -> Path:
    """Where a finished run's figures are."""
    return RESULTS / f"{row.name}-{seed}.json"


def run(stack: LocalStack, api: Api, row: Row, seed: int) -> bool:
    """One run to its end; whether it succeeded. Only then is there a result."""
    wanted = recipe(row, seed)
    name = str(api.submit(wanted.model_dump(mode="json"))["id"])
    with cancelled_on_interrupt(api, name):
        view, steps = follow(api, name, stack.check_alive)
    if view["state"] != "succeeded":
        print(f"{name} {view['state']}: {view['reason']}; it will be tried again", file=sys.stderr, flush=True)
        return False
    write_result(row, seed, view, steps)
    return True


def write_result(row: Row, seed: int, view: dict[str, Any], steps: list[dict[str, Any]]) -> None:
    """Keep what the report needs, whole or not at all."""
    result = {
        "row": row.name, "seed": seed, "summary": view["summary"], "evaluations": view["evaluations"],
        "steps": [{"step": one["step"], **{name: one["metrics"].get(name) for name in KEPT}} for one in steps],
    }  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    partial = result_file(row, seed).with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(partial, result_file(row, seed))


if __name__ == "__main__":
    sys.exit(main())
