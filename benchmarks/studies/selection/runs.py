"""Owns short real runs of each strategy: `python -m benchmarks.studies.selection.runs` prints the cost of a token.

Must not simulate. One local stack, one run after the other, about five minutes per run on two cores.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from benchmarks.studies.ablation.variants import BASE
from deploy.cli.common import open_api
from deploy.local.stack import LocalStack
from penstock_client.cli.following.follow import cancelled_on_interrupt, follow
from penstock_client.cli.terminal import print_line
from penstock_client.models import RolloutStep
from services.settings import Recipe, parse_recipe

STRATEGIES: dict[str, dict[str, Any]] = {"uniform": {}, "boundary": {}, "screen": {"screen_samples": 2}}
PROMPTS, STEPS = 24, 12
"""Few prompts, so that each is drawn several times: in the first pass `boundary` has no evidence."""


def recipe(strategy: str, seed: int) -> Recipe:
    """The recipe: the task of the ablation, the preset `dapo` and one strategy."""
    document = yaml.safe_load(BASE.read_text())
    chosen = {"strategy": strategy, **STRATEGIES[strategy]}
    document["algorithm"] |= {"preset": "dapo", "dynamic_sampling": {"selection": chosen}}
    document["data"] |= {"train": PROMPTS, "held_out": 8}
    document["limits"] |= {"rollout_steps": STEPS, "response_tokens": None, "groups_per_step": 4}
    document["learner"] |= {"mini_batch_groups": 2, "checkpoint_every": 0}
    document["evaluation"] = {"samples": 1}
    return parse_recipe(document | {"name": f"selection-{strategy}-{seed}", "seed": seed})


def cost(steps: list[RolloutStep]) -> tuple[float, float, float]:
    """(response tokens judged, response tokens trained, groups that a screen ended) of a run."""
    metrics = [step.metrics for step in steps]
    judged = sum(step["response_tokens"] for step in metrics)
    ratios = [step.get("rollout_tokens_per_trained_token") for step in metrics]
    trained = sum(step["response_tokens"] / ratio for step, ratio in zip(metrics, ratios, strict=True) if ratio)
    return judged, trained, sum(step["groups_screened_out"] for step in metrics)


def main() -> int:
    """Run each strategy once. Exit status 1 if a run failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.selection.runs", description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder for the stack's files")
    parser.add_argument("--port", type=int, default=8481)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    stack = LocalStack(options.runs, port=options.port, report=print_line)
    lines = []
    with stack, open_api(stack.api) as api:
        for strategy in STRATEGIES:
            name = api.submit(recipe(strategy, options.seed).model_dump(mode="json")).id
            with cancelled_on_interrupt(api, name):
                view, steps = follow(api, name, stack.check_alive)
            if view.state != "succeeded":
                print(f"{name} {view.state}: {view.reason}", file=sys.stderr)
                return 1
            judged, trained, screened = cost(steps)
            lines.append(f"| {strategy} | {judged:.0f} | {trained:.0f} | {judged / trained:.2f} | {screened:.0f} |")
    print("| strategy | response tokens judged | trained | rollout tokens per trained token | screened out |")
    print("\n".join(["|---|---|---|---|---|", *lines]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
