"""Owns `penstock replay`: it runs recorded optimizer steps again and prints recorded and replayed values side by side.

Must not train; learner.recovery.replay does.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.common import DEFAULT_RUNS, RunsOption
from penstock_client.cli.commands.arguments import OwnJsonOption, RunArgument
from penstock_client.cli.reporting import EXIT_FAILED, fail
from penstock_client.cli.terminal import print_json, print_line, print_note

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
    as_json: OwnJsonOption = False,
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
        report = print_note if as_json else print_line
        for line in _opening(plan):
            report(line)
        rows = list(run_again(folder, plan, timeout, report))
    except (ArchiveError, ReplayError, StoreError) as error:
        fail(str(error))
    if as_json:
        print_json([_document(row) for row in rows])
    else:
        for line in (LINE.format(*HEADING), *map(_line, rows)):
            print_line(line)
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


def _document(row: Comparison) -> dict[str, Any]:
    records = {"recorded": row.recorded, "replayed": row.replayed}
    shown = {name: record and record.model_dump(mode="json") for name, record in records.items()}
    return {"step": row.step, "optimizer_step": row.index, **shown, "equal": row.equal}


def _line(row: Comparison) -> str:
    cells = [_number(record, name) for name in ("loss", "gradient_norm") for record in (row.recorded, row.replayed)]
    return LINE.format(row.step, row.index, *cells, "yes" if row.equal else "NO")


def _number(record: OptimizerStepRecord | None, name: str) -> str:
    if record is None:
        return "none"
    value = getattr(record, name)
    return ("" if record.applied else "skipped: ") + ("not finite" if value is None else repr(value))
