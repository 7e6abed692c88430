"""Owns `penstock dead`: the messages that were given up, as a table, and drawing their groups again.

Must not trust what a message holds; all of it is printed as plain text.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.options import DEFAULT_API, ApiOption, RunArgument
from deploy.cli.plain import cell, plain

if TYPE_CHECKING:
    from rich.table import Table

    from deploy.cli.client import Api

ALL = "all"
ENTRY = re.compile(r"\d{1,19}-\d{1,19}")
REASON_SHOWN = 300


def dead(
    run: RunArgument,
    redrive: Annotated[
        str | None, typer.Option("--redrive", metavar="ENTRY|all", help="Draw the group of this letter again, or all.")
    ] = None,
    api: ApiOption = DEFAULT_API,
) -> None:
    """List the messages of a run that were given up, or draw their groups again."""
    from deploy.cli.console import console
    from deploy.cli.main import obstacles, open_api

    with obstacles(), open_api(api) as client:
        if redrive is not None:
            _redrive(client, run, redrive)
            return
        letters = client.dead(run)
        console().print(dead_table(run, letters) if letters else cell(f"{run}: no dead letters"))


def _redrive(client: Api, run: str, entry: str) -> None:
    from deploy.cli.client import ApiError
    from deploy.cli.main import say

    if entry != ALL and not ENTRY.fullmatch(entry):
        raise ApiError(f"--redrive: value {entry!r} is not accepted; an entry that `penstock dead {run}` lists, or all")
    attempts = client.redrive_all(run) if entry == ALL else [client.redrive(run, entry)]
    for one in attempts:
        say(plain(f"{one['entry']}  {one['group'] or '-'}  {one['reason']}"))
    names = {one["redriven"] for one in attempts if one["redriven"]}
    say(f"{run}: {len(names)} groups are drawn again, for {len(attempts)} letters")


def dead_table(run: str, letters: list[dict[str, Any]]) -> Table:
    """A row a letter; `letters` as the API gives them."""
    from rich.table import Table

    table = Table(title=cell(f"{run}: dead letters"))
    for title in ("entry", "when", "stream", "cause", "reason", "group", "redriven"):
        table.add_column(title, overflow="fold")
    for one in letters:
        table.add_row(*map(cell, (
            one["entry"], _moment(one["at"]), one["stream"].removeprefix(f"penstock:{{{run}}}:"), one["cause"],
            one["reason"][:REASON_SHOWN], one["group"] or "-", one["redriven"] or "-",
        )))  # fmt: skip
    return table


def _moment(at: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):  # a time that somebody made up
        return "-"
