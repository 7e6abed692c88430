"""Owns the runs of the comparison and its picture. `python -m benchmarks.studies.ppo` skips runs that have a result.

Must not change what both algorithms share: model, tasks, lengths, the policy's learning rate, the budget of tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from benchmarks.studies.ablation.variants import BASE
from deploy.cli.common import open_api
from deploy.local.stack import LocalStack
from penstock_client.answers import as_json
from penstock_client.cli.following.follow import cancel_unfinished, cancelled_on_interrupt, follow
from penstock_client.cli.terminal import print_line
from penstock_client.client import Client
from services.settings import Recipe, parse_recipe

RESULTS = Path(__file__).with_name("results")
PICTURE = Path(__file__).resolve().parents[3] / "docs" / "images" / "ppo.png"
ALGORITHMS: dict[str, dict[str, Any]] = {
    "dapo": {"algorithm": {"preset": "dapo", "overlong": {"cache": 8}}},
    # As many responses per rollout step and per optimizer step as DAPO's 8 and 4 groups of 8. The head's learning rate
    # is ten times the policy's, as in the preset.
    "ppo": {
        "algorithm": {"preset": "ppo", "group_size": 1, "value": {"learning_rate": 2.0e-4}},
        "learner": {"mini_batch_groups": 32},
        "limits": {"groups_per_step": 64, "max_inflight_groups": 128},
    },
}
KEPT = ("accuracy", "entropy", "response_length", "response_tokens", "value_loss", "value_explained_variance")
"""The metrics of a rollout step that a result stores."""
COLOURS = {"dapo": "tab:blue", "ppo": "tab:orange"}


def recipe(algorithm: str, seed: int) -> Recipe:
    """The recipe of one run. The seed changes the sampling, not the tasks."""
    document = yaml.safe_load(BASE.read_text())
    for section, changes in ALGORITHMS[algorithm].items():
        document[section] = document[section] | changes
    document["evaluation"] = document["evaluation"] | {"every": 4}
    return parse_recipe(document | {"name": f"{algorithm}-{seed}", "seed": seed})


def runs(seeds: int) -> Iterator[tuple[str, int, Path]]:
    """Every run, with the file of its result."""
    for seed in range(seeds):
        for algorithm in ALGORITHMS:
            yield algorithm, seed, RESULTS / f"{algorithm}-{seed}.json"


def run(stack: LocalStack, api: Client, algorithm: str, seed: int, path: Path) -> None:
    """Run one recipe to its end and store its result. Raises SystemExit if it does not succeed."""
    name = api.submit(recipe(algorithm, seed).model_dump(mode="json")).id
    with cancelled_on_interrupt(api, name):
        view, steps = follow(api, name, stack.check_alive)
    if view.state != "succeeded":
        sys.exit(f"{name} {view.state}: {view.reason}")
    result = {
        "evaluations": [as_json(evaluation) for evaluation in view.evaluations],
        "steps": [{"step": step.step, **{name: step.metrics.get(name) for name in KEPT}} for step in steps],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(partial, path)


def curve(result: dict[str, Any], metric: str) -> list[tuple[float, float]]:
    """(response tokens generated so far, the metric) of each rollout step that has the metric."""
    spent = accumulate(step["response_tokens"] for step in result["steps"])
    points = zip(spent, (step[metric] for step in result["steps"]), strict=True)
    return [(tokens, value) for tokens, value in points if value is not None]


def draw(results: dict[tuple[str, int], dict[str, Any]]) -> None:
    """Draw accuracy, response length and explained variance of every run over the tokens generated."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {
        "accuracy": "accuracy of the samples",
        "response_length": "response length (tokens)",
        "value_explained_variance": "PPO: explained variance of the values",
    }
    figure, axes = pyplot.subplots(1, len(panels), figsize=(12, 3.4))
    for axis, (metric, title) in zip(axes, panels.items(), strict=True):
        for (algorithm, seed), result in results.items():
            points = curve(result, metric)
            if points:
                label = algorithm.upper() if seed == 0 else None
                axis.plot(*zip(*points, strict=True), color=COLOURS[algorithm], label=label, marker=".")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("response tokens generated")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


def main() -> int:
    """Run what has no result yet, draw the picture and print the accuracies on the held-out questions."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.ppo", description=main.__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder for the stack's files")
    parser.add_argument("--port", type=int, default=8471)
    arguments = parser.parse_args()
    missing = [wanted for wanted in runs(arguments.seeds) if not wanted[2].exists()]
    if missing:
        stack = LocalStack(arguments.runs, port=arguments.port, report=print_line)
        stack.check(recipe(*missing[0][:2]))
        with stack, open_api(stack.api) as api:
            cancel_unfinished(api, "dapo")
            cancel_unfinished(api, "ppo")
            for algorithm, seed, path in missing:
                run(stack, api, algorithm, seed, path)
    results = {(algorithm, seed): json.loads(path.read_text()) for algorithm, seed, path in runs(arguments.seeds)}
    draw(results)
    for (algorithm, seed), result in results.items():
        found = {evaluation["name"]: evaluation["accuracy"] for evaluation in result["evaluations"]}
        tokens = curve(result, "accuracy")[-1][0]
        print(f"{algorithm} seed {seed}: avg@4 {found['before']:.3f} -> {found['after']:.3f} in {tokens:,.0f} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
