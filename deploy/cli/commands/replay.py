"""Owns `penstock replay`: recorded optimizer steps run again, and what they gave then and now side by side.

Must not train; learner.recovery.replay does.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from learner.recovery.replay import Comparison, Plan
    from services.contracts import OptimizerStepRecord

HEADING = ("step", "optimizer step", "recorded loss", "replayed loss", "recorded norm", "replayed norm", "equal")
LINE = "{:>6}  {:>14}  {:>24}  {:>24}  {:>24}  {:>24}  {}"


def replay(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Id of a run.")],
    step: Annotated[int, typer.Argument(metavar="STEP", min=1, help="The rollout step to end with.")],
    runs: Annotated[Path, typer.Option("--runs", envvar="PENSTOCK_RUNS", help="Folder with the run's folder.")] = Path(
        "runs"
    ),
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Longest time it may take, in seconds.")] = 3600.0,
) -> None:
    """Run recorded optimizer steps again, from the nearest checkpoint and the archived batches.

    Works from the run's folder alone, or from what PENSTOCK_STORE holds of the run.
    Exit status 0 only if every loss and gradient norm is equal: bit by bit on one CPU rank, within a stated tolerance
    otherwise. 1 if one differs or was never recorded, 2 for an obstacle.
    """
    from deploy.cli.main import OBSTACLE, RUN_FAILED, say
    from learner.archive import ArchiveError
    from learner.recovery.replay import ReplayError, plan_replay, run_at_hand
    from learner.recovery.replay import replay as run_again
    from services.storage.errors import StoreError

    os.environ["PENSTOCK_RUNS"] = str(runs.absolute())  # where the ranks keep the model too
    try:
        folder, mirror = run_at_hand(runs.absolute(), run)
        plan = plan_replay(folder, step, mirror)
        for line in _opening(plan):
            say(line)
        rows = run_again(folder, plan, timeout, say)
    except (ArchiveError, ReplayError, StoreError) as error:
        print(f"penstock: {error}", file=sys.stderr)
        raise typer.Exit(OBSTACLE) from None
    say(LINE.format(*HEADING))
    for row in rows:
        say(_line(row))
    raise typer.Exit(0 if all(row.equal for row in rows) else RUN_FAILED)


def _opening(plan: Plan) -> list[str]:
    from importlib.metadata import version

    from learner.recovery.replay import SMALLEST_SCALE

    start = f"the checkpoint of step {plan.start.step}" if plan.start else f"the model in {plan.facts.model_path}"
    ranks = f"{plan.facts.ranks} {plan.facts.device} rank{'s' if plan.facts.ranks > 1 else ''}"
    within = f"within {plan.tolerance:g} of the recorded value, or of {SMALLEST_SCALE:g} where that is larger"
    equal = "the same bits" if plan.exact else within
    changed = [
        f"note: the run trained with {name} {recorded}, here is {version(name)}"
        for name, recorded in plan.facts.versions.items()
        if version(name) != recorded
    ]
    damaged = [f"passed over: {line}" for line in plan.passed_over]
    return [*damaged, *changed, f"steps {plan.steps[0]}-{plan.steps[-1]} from {start} on {ranks}; equal means {equal}"]


def _line(row: Comparison) -> str:
    cells = [_number(one, name) for name in ("loss", "gradient_norm") for one in (row.recorded, row.replayed)]
    return LINE.format(row.step, row.index, *cells, "yes" if row.equal else "NO")


def _number(one: OptimizerStepRecord | None, name: str) -> str:
    if one is None:
        return "none"
    value = getattr(one, name)
    return ("" if one.applied else "skipped: ") + ("not finite" if value is None else repr(value))
