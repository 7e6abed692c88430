"""Owns the comparison on this machine: a run of a tiny model, in blocks of static settings and one that tuning moves.

Must not compare with other machines, nor across runs: a block's neighbours saw the same load.

`python -m benchmarks.tuning.laptop` trains the static settings in turn, three times in alternating order, and between
two turns lets tuning start from a bad one, for long enough that it has converged before its steps are counted. The
first rollout steps of a static block are not counted, because the pipeline still holds groups of the previous one. Ten
minutes on two idle cores; the result is `results/laptop.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.harness.stack import Stack
from tests.harness.workload import recipe, write_model, write_questions

RESULTS = Path(__file__).with_name("results") / "laptop.json"
INFLIGHT, STALENESS, MODE = "limits.max_inflight_groups", "limits.max_staleness", "tuning.mode"
STATIC = ((8, 1), (16, 1), (12, 2), (24, 2), (16, 3), (32, 3))
"""Limits of groups in flight, and staleness bounds."""
BAD = (8, 1)
"""Where tuning begins."""
BOUNDS = {"inflight_groups": [8, 32], "max_staleness": [1, 3]}
TARGET = 2.0
"""Of the mean staleness: a setting above it is no candidate."""
ROUNDS, STATIC_STEPS, TUNED_STEPS, UNCOUNTED, WARM_UP = 3, 20, 80, 3, 40
"""Turns of the static settings; rollout steps of a static block and of a tuned one; those of each not counted."""
STEP_S, BUSY_S, LOOK_S, UNAVAILABLE = 120.0, 120.0, 0.5, 503
"""The longest time for a rollout step, and for Redis to answer; between two looks; the status if it does not."""


def document(folder: Path, steps: int) -> dict[str, Any]:
    """The recipe: responses long enough that generation matters beside the weight syncs."""
    made = recipe(
        write_model(folder / "model"),
        write_questions(folder / "questions.jsonl"),
        steps=steps,
        replicas=1,
        ranks=1,
        staleness=1,
    )
    made["name"] = "tuning"
    made["verifier"]["replicas"] = 1
    made["rollout"] |= {"max_new_tokens": 64, "cpus": 0.6}
    made["learner"] |= {"cpus": 0.6, "checkpoint_every": 0}
    made["limits"] |= {"lease_s": 30.0, "max_inflight_groups": BAD[0]}
    made["evaluation"] = {"samples": 1, "every": 0}
    made["tuning"] = {"staleness": TARGET, "cool_down_steps": 3, **BOUNDS}
    return made


class Observed:
    """The run, as its API shows it."""

    def __init__(self, stack: Stack, run: str) -> None:
        self._stack, self._route = stack, f"/v1/runs/{run}"
        self.steps: list[dict[str, Any]] = []

    def ask(self, method: str, route: str = "", changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The API's answer about the run; repeated for BUSY_S while Redis is too busy to answer in time."""
        ends = time.monotonic() + BUSY_S
        while True:
            answer = self._stack.api.request(method, self._route + route, json=changes)
            if answer.status_code != UNAVAILABLE or time.monotonic() > ends:
                found: dict[str, Any] = answer.raise_for_status().json()
                return found
            print(f"Redis is busy: {answer.text[:100]}", flush=True)
            time.sleep(LOOK_S)

    def edit(self, changes: Mapping[str, Any]) -> None:
        """Change settings in flight."""
        self.ask("PATCH", changes=changes)

    def until(self, step: int) -> None:
        """Wait until a rollout step is committed. Raises TimeoutError when none is for STEP_S."""
        ends = time.monotonic() + 5 * STEP_S
        while len(self.steps) < step:
            if len(steps := self.ask("GET", "/metrics")["steps"]) > len(self.steps):
                self.steps, ends = steps, time.monotonic() + STEP_S
            if time.monotonic() > ends:
                raise TimeoutError(f"no rollout step after {len(self.steps)} within {STEP_S:g} s")
            time.sleep(LOOK_S)

    def view(self) -> dict[str, Any]:
        """The run."""
        return self.ask("GET")

    def figures(self, first: int, last: int) -> dict[str, float]:
        """Of the rollout steps from `first` to `last`: trained tokens per second, idle share, mean staleness."""
        found = self.steps[first - 1 : last]
        begins = self.steps[first - 2]["learning_finished_at"]
        seconds = found[-1]["learning_finished_at"] - begins
        metrics = [step["metrics"] for step in found]
        return {
            "steps": len(found),
            "seconds": round(seconds, 2),
            "tokens_per_s": round(sum(each["trained_tokens"] for each in metrics) / seconds, 2),
            "groups_per_s": round(4 * len(found) / seconds, 4),
            "idle": round(sum(each["batch_wait_seconds"] for each in metrics) / seconds, 3),
            "staleness": round(fmean(each["staleness_mean"] for each in metrics), 3),
            "load": round(os.getloadavg()[0], 1),
        }


def measure(observed: Observed, settings: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """One block per static setting."""
    found = []
    for inflight, staleness in settings:
        begins = len(observed.steps)
        observed.edit({INFLIGHT: inflight, STALENESS: staleness, MODE: "off"})
        observed.until(begins + STATIC_STEPS)
        figures = observed.figures(begins + UNCOUNTED + 1, begins + STATIC_STEPS)
        print(f"static, in flight {inflight:>2}, bound {staleness}: {figures}", flush=True)
        found.append({"inflight_groups": inflight, "max_staleness": staleness, **figures})
    return found


def tuned(observed: Observed) -> dict[str, Any]:
    """A block that tuning moves from the bad setting: the figures after its warm-up, its decisions and its edits."""
    begins, began, (inflight, staleness) = len(observed.steps), time.time(), BAD
    observed.edit({INFLIGHT: inflight, STALENESS: staleness, MODE: "on"})
    observed.until(begins + TUNED_STEPS)
    view = observed.view()
    texts = [event["text"] for event in view["events"] if event["phase"] == "tuning" and event["at"] >= began]
    edits = [edit["changes"] for edit in view["edits"] if edit["by"] == "controller" and edit["at"] >= began]
    figures = observed.figures(begins + WARM_UP + 1, begins + TUNED_STEPS)
    print("\n".join(f"  {text}" for text in texts) + f"\ntuned: {figures}", flush=True)
    return {**figures, "decisions": texts, "edits": edits}


def averaged(blocks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each static setting: its rates, their mean over the time, and its mean staleness and idle share."""
    rows = []
    for setting in STATIC:
        own = [each for each in blocks if (each["inflight_groups"], each["max_staleness"]) == setting]
        means = {name: round(fmean(each[name] for each in own), 3) for name in ("staleness", "idle")}
        rates = [each["tokens_per_s"] for each in own]
        rows.append({"setting": list(setting), "tokens_per_s": round(rate(own), 1), "rates": rates, **means})
    return rows


def rate(blocks: Sequence[Mapping[str, Any]]) -> float:
    """Trained tokens per second over several blocks."""
    tokens = sum(each["tokens_per_s"] * each["seconds"] for each in blocks)
    return float(tokens / sum(each["seconds"] for each in blocks))


def main() -> int:
    """Measure and print; exit status 1 if tuning is more than 5 % below the best static setting."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuning.laptop", description=main.__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    steps = ROUNDS * (len(STATIC) * STATIC_STEPS + TUNED_STEPS) + 20
    with (
        tempfile.TemporaryDirectory() as folder,
        Stack(Path(folder) / "runs", None, {"PENSTOCK_ROOTS": folder}) as stack,
    ):
        run = stack.submit(document(Path(folder), steps), "tuning")
        observed = Observed(stack, run)
        observed.until(UNCOUNTED)
        blocks, moved = measure(observed, STATIC), []
        for turn in range(1, ROUNDS):
            moved.append(tuned(observed))
            blocks += measure(observed, STATIC[:: -1 if turn % 2 else 1])
        observed.ask("POST", "/cancel")
    rows = averaged(blocks)
    best = max((row for row in rows if row["staleness"] <= TARGET), key=lambda row: row["tokens_per_s"])
    ratio = round(rate(moved) / best["tokens_per_s"], 3)
    result = {"blocks": blocks, "tuned": moved, "static": rows, "best": best, "ratio": ratio}
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(row)
    print(f"tuned {rate(moved):.0f} tokens/s / best static {best['tokens_per_s']:.0f}: {ratio:.3f}")
    return int(ratio < 0.95)


if __name__ == "__main__":
    sys.exit(main())
