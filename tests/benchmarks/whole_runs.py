"""Owns runs as the benchmarks of whole runs see them, made by hand: regular steps, scores, CPU time.

Must not start anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.loop.cpu_seconds import CpuSeries
from benchmarks.loop.measured_run import MeasuredRun, MeasuredStep
from penstock_client.models import Evaluation, LedgerOfRun, RolloutStep, Run


def record(step: int, ended: float, generation: float = 4.0, learning: float = 5.0, **metrics: float) -> RolloutStep:
    """A step as the API gives it: its optimizer steps end at `ended` and take `learning` seconds."""
    more: dict[str, Any] = {
        "generation_started_at": ended - learning - generation,
        "generation_finished_at": ended - learning,
        "learning_started_at": ended - learning,
    }
    own = {"publish_seconds": 1.0, "batch_wait_seconds": 2.0, "commit_wait_seconds": 0.25, "accuracy": 0.5}
    own |= {"input_tokens": 60.0, "trained_tokens": 50.0, **metrics}
    return RolloutStep(id=f"{step}-0", step=step, metrics=own, learning_finished_at=ended, **more)


def at(moment: float) -> dict[str, Any]:
    """A field that the client's model does not name."""
    return {"at": moment}


def measured_run(
    every: float = 10.0, steps: int = 5, gained: float = 0.25, stale: int = 0, evaluated: float = 25.0
) -> MeasuredRun:
    """A run from moment 0 on: ready at 10, submitted at 11, its first step ends at 30, one step `every` seconds.

    The evaluation before training ends at `evaluated`. The engine uses half a core, the learner a whole one.
    """
    records = [record(number, 30.0 + every * (number - 1)) for number in range(1, steps + 1)]
    ended = records[-1].learning_finished_at + 20.0
    scores = [
        Evaluation(name="before", accuracy=0.25, **at(evaluated)),
        Evaluation(name="after", accuracy=0.25 + gained, **at(ended)),
    ]
    tokens = {"generated": 1100, "evaluated": 100, "trained": 800, "stale": stale}
    engine, learner = (1, 0.0), (2, 0.0)
    cpu = CpuSeries([0.0, ended], [{}, {engine: ended / 2, learner: ended}], {engine: "engine", learner: "learner"})
    return MeasuredRun(
        run="r-1",
        folder=Path("r-1"),
        started=0.0,
        ready=10.0,
        submitted=11.0,
        ended=ended,
        view=Run(id="r-1", state="succeeded", evaluations=scores),
        steps=tuple(map(MeasuredStep.of, records)),
        ledger=LedgerOfRun(run="r-1", tokens=tokens),
        cpu=cpu,
    )
