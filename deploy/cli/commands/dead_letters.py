"""Owns `penstock dead`: a run's dead letters as a table, and requeueing their groups.

Must not trust the content of a message: all of it is printed as plain text.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.common import DEFAULT_API, ApiOption, RunArgument, open_api, reported_errors
from deploy.cli.terminal import cell, console, plain, print_line

if TYPE_CHECKING:
    from rich.table import Table

    from deploy.cli.client import Api

ALL = "all"
ENTRY = re.compile(r"\d{1,19}-\d{1,19}")
REASON_SHOWN = 300

RedriveOption = Annotated[
    str | None, typer.Option("--redrive", metavar="ENTRY|all", help="Requeue the group of this dead letter, or of all.")
]


def dead(run: RunArgument, redrive: RedriveOption = None, api: ApiOption = DEFAULT_API) -> None:
    """List dead letters, or requeue their groups."""
    with reported_errors(), open_api(api) as client:
        if redrive is not None:
            _redrive(client, run, redrive)
            return
        letters = client.dead(run)
        console().print(dead_table(run, letters) if letters else cell(f"{run}: no dead letters"))


def _redrive(client: Api, run: str, entry: str) -> None:
    from deploy.cli.client import ApiError

    if entry != ALL and not ENTRY.fullmatch(entry):
        raise ApiError(
            f"--redrive: {entry!r} is not valid: expected an entry that `penstock dead {run}` lists, or {ALL}"
        )
    attempts = client.redrive_all(run) if entry == ALL else [client.redrive(run, entry)]
    for attempt in attempts:
        print_line(plain(f"{attempt['entry']}  {attempt['group'] or '-'}  {attempt['reason']}"))
    names = {attempt["redriven"] for attempt in attempts if attempt["redriven"]}
    print_line(f"{run}: requeued {_counted(len(names), 'group')} of {_counted(len(attempts), 'dead letter')}")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def dead_table(run: str, letters: list[dict[str, Any]]) -> Table:
    """One row per dead letter; `letters` as the API returns them."""
    from rich.table import Table

    table = Table(title=cell(f"{run}: dead letters"))
    for title in ("entry", "when", "stream", "cause", "reason", "group", "redriven"):
        table.add_column(title, overflow="fold")
    for letter in letters:
        values = (
            letter["entry"],
            _local_time(letter["at"]),
            letter["stream"].removeprefix(f"penstock:{{{run}}}:"),
            letter["cause"],
            letter["reason"][:REASON_SHOWN],
            letter["group"] or "-",
            letter["redriven"] or "-",
        )
        table.add_row(*map(cell, values))
    return table


def _local_time(at: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):  # the message may hold any number
        return "-"
