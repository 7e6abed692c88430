"""Owns `penstock replay`: it runs recorded optimizer steps again and prints recorded and replayed values side by side.

Must not train; learner.recovery.replay does.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.common import DEFAULT_RUNS, EXIT_FAILED, RunArgument, RunsOption, fail
from deploy.cli.terminal import print_line

if TYPE_CHECKING:
    from learner.recovery.replay import Comparison, Plan
    from services.contracts import OptimizerStepRecord

HEADING = ("step", "optimizer step", "recorded loss", "replayed loss", "recorded norm", "replayed norm", "equal")
LINE = "{:>6}  {:>14}  {:>24}  {:>24}  {:>24}  {:>24}  {}"


def replay(
    run: RunArgument,
    step: Annotated[int, typer.Argument(metavar="STEP", min=1, help="The last rollout step to replay.")],
    runs: RunsOption = DEFAULT_RUNS,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Time limit in seconds.")] = 3600.0,
) -> None:
    """Replay recorded optimizer steps from the nearest checkpoint and the archived batches.

    Needs only the run's folder, or its copy in PENSTOCK_STORE.
    Exit status 0 if every loss and gradient norm is equal: bit by bit on one CPU rank, within a stated tolerance
    otherwise. 1 if one differs or was never recorded, 2 for any other error.
    """
    from learner.archive import ArchiveError
    from learner.recovery.replay import ReplayError, open_run, plan_replay
    from learner.recovery.replay import replay as run_again
    from services.storage.errors import StoreError

    os.environ["PENSTOCK_RUNS"] = str(runs.absolute())  # the ranks keep the model there as well
    try:
        folder, mirror = open_run(runs.absolute(), run)
        plan = plan_replay(folder, step, mirror)
        for line in _opening(plan):
            print_line(line)
        rows = run_again(folder, plan, timeout, print_line)
    except (ArchiveError, ReplayError, StoreError) as error:
        fail(str(error))
    print_line(LINE.format(*HEADING))
    for row in rows:
        print_line(_line(row))
    raise typer.Exit(0 if all(row.equal for row in rows) else EXIT_FAILED)


def _opening(plan: Plan) -> list[str]:
    from importlib.metadata import version

    from learner.recovery.replay import SMALLEST_SCALE

    start = f"the checkpoint of step {plan.start.step}" if plan.start else f"the model in {plan.facts.model_path}"
    ranks = f"{plan.facts.ranks} {plan.facts.device} rank{'s' if plan.facts.ranks > 1 else ''}"
    within = f"within {plan.tolerance:g} of the recorded value, or of {SMALLEST_SCALE:g} where that is larger"
    equal = "the same bits" if plan.exact else within
    changed = [
        f"note: the run trained with {name} {recorded}, this machine has {version(name)}"
        for name, recorded in plan.facts.versions.items()
        if version(name) != recorded
    ]
    damaged = [f"skipped: {line}" for line in plan.skipped]
    return [*damaged, *changed, f"steps {plan.steps[0]}-{plan.steps[-1]} from {start} on {ranks}; equal means {equal}"]


def _line(row: Comparison) -> str:
    cells = [_number(record, name) for name in ("loss", "gradient_norm") for record in (row.recorded, row.replayed)]
    return LINE.format(row.step, row.index, *cells, "yes" if row.equal else "NO")


def _number(record: OptimizerStepRecord | None, name: str) -> str:
    if record is None:
        return "none"
    value = getattr(record, name)
    return ("" if record.applied else "skipped: ") + ("not finite" if value is None else repr(value))
