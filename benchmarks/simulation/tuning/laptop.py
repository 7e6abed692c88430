"""Owns the comparison on this machine: one run of a tiny model, in blocks that tuning moves and static ones.

Must not compare with other machines, nor across runs: a block's neighbours saw the same load.

`python -m benchmarks.simulation.tuning.laptop` sweeps the static settings twice, lets tuning start from a bad one until
it has converged, and then trains tuned blocks and blocks of the sweep's best setting in turn: the best of several noisy
means looks better than it is, so it is measured again beside what it is compared with. The first rollout steps of a
block are not counted, because the pipeline still holds groups of the previous one. Fifteen minutes on two idle cores;
the result is `results/laptop.json`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
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
SWEEPS, PAIRS, BLOCK, UNCOUNTED, CONVERGING = 2, 6, 64, 4, 150
"""Turns of the static settings; pairs of a tuned block and one of the best setting; rollout steps of a block, and those
of it that are not counted; rollout steps until tuning has converged."""
ASKED = 0.95
"""The least ratio."""
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
    made["tuning"] = {"staleness": TARGET, "cool_down_steps": 8, **BOUNDS}
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
            after = f"?after={self.steps[-1]['id']}" if self.steps else ""
            if steps := self.ask("GET", f"/metrics{after}")["steps"]:
                self.steps += steps
                ends = time.monotonic() + STEP_S
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


def static(observed: Observed, setting: tuple[int, int]) -> dict[str, Any]:
    """A block of one static setting."""
    inflight, staleness = setting
    figures = _block(observed, {INFLIGHT: inflight, STALENESS: staleness, MODE: "off"})
    print(f"static, in flight {inflight:>2}, bound {staleness}: {figures}", flush=True)
    return {"inflight_groups": inflight, "max_staleness": staleness, **figures}


def converge(observed: Observed) -> list[str]:
    """Let tuning start from the bad setting; returns its decisions."""
    begins, began, (inflight, staleness) = len(observed.steps), time.time(), BAD
    observed.edit({INFLIGHT: inflight, STALENESS: staleness, MODE: "on"})
    observed.until(begins + CONVERGING)
    return _decisions(observed, began)


def tuned(observed: Observed, limits: Mapping[str, Any]) -> dict[str, Any]:
    """A block that tuning goes on with, from the limits that it had at the end of its previous one."""
    began = time.time()
    edit = {INFLIGHT: limits["max_inflight_groups"], STALENESS: limits["max_staleness"], MODE: "on"}
    figures = _block(observed, edit)
    print(f"tuned, from {edit[INFLIGHT]:>2} in flight, bound {edit[STALENESS]}: {figures}", flush=True)
    return {**figures, "decisions": _decisions(observed, began)}


def _block(observed: Observed, edit: Mapping[str, Any]) -> dict[str, float]:
    begins = len(observed.steps)
    observed.edit(edit)
    observed.until(begins + BLOCK)
    return observed.figures(begins + UNCOUNTED + 1, begins + BLOCK)


def _decisions(observed: Observed, began: float) -> list[str]:
    events = observed.view()["events"]
    texts = [event["text"] for event in events if event["phase"] == "tuning" and event["at"] >= began]
    for text in texts:
        print(f"  {text}", flush=True)
    return texts


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


def compare(observed: Observed) -> dict[str, Any]:
    """The whole comparison: the sweep, its best setting, the pairs, and the ratio of their rates with its error."""
    observed.until(UNCOUNTED)
    blocks = [static(observed, setting) for turn in range(SWEEPS) for setting in STATIC[:: -1 if turn % 2 else 1]]
    rows = averaged(blocks)
    for row in rows:
        print(row, flush=True)
    best = max((row for row in rows if row["staleness"] <= TARGET), key=lambda row: row["tokens_per_s"])
    decisions, pairs = converge(observed), []
    limits = observed.view()["recipe"]["limits"]
    for _ in range(PAIRS):
        moved = tuned(observed, limits)
        limits = observed.view()["recipe"]["limits"]
        pairs.append((moved, static(observed, tuple(best["setting"]))))
    ratios = [moved["tokens_per_s"] / still["tokens_per_s"] for moved, still in pairs]
    return {
        "sweep": rows,
        "best": best["setting"],
        "decisions": decisions,
        "pairs": pairs,
        "ratio": round(rate([moved for moved, _ in pairs]) / rate([still for _, still in pairs]), 3),
        "error": round(stdev(ratios) / math.sqrt(PAIRS), 3),
    }


def main() -> int:
    """Measure and print; exit status 1 if tuning is more than 5 % below the best static setting."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation.tuning.laptop", description=main.__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    steps = UNCOUNTED + (SWEEPS * len(STATIC) + 2 * PAIRS) * BLOCK + CONVERGING + 50
    with (
        tempfile.TemporaryDirectory() as folder,
        Stack(Path(folder) / "runs", None, {"PENSTOCK_ROOTS": folder}) as stack,
    ):
        observed = Observed(stack, stack.submit(document(Path(folder), steps), "tuning"))
        result = compare(observed)
        observed.ask("POST", "/cancel")
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(json.dumps(result, indent=1) + "\n")
    print(f"tuned / best static {result['best']}: {result['ratio']:.3f} ± {result['error']:.3f}")
    return int(result["ratio"] < ASKED)


if __name__ == "__main__":
    sys.exit(main())
