"""Owns `penstock ledger`: what a run, or each project, has used, by what for.

Must not compute a share or a price; the API does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from penstock_client.cli.commands.arguments import JsonOption, checked_run
from penstock_client.cli.following.figures import local_time, number
from penstock_client.cli.reporting import fail
from penstock_client.cli.terminal import plain, print_json, print_line, print_note, print_table

if TYPE_CHECKING:
    from penstock_client.client import Client
    from penstock_client.models import LedgerLine, LedgerOfRun, LedgerSum

HOUR_S = 3600.0


def ledger(
    client: Client,
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="Id of the run; default: all projects.")] = None,
    project: Annotated[str | None, typer.Option("--project", help="Without RUN: only this project.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a run, or each project, has used: tokens, hours of GPUs and CPUs, money, by what for."""
    if run is None:
        _print_projects(client, project, as_json)
    elif project is not None:
        fail("RUN, --project: give at most one of them")
    else:
        _print_run(client, checked_run(run), as_json)


def _print_run(client: Client, run: str, as_json: bool) -> None:
    from penstock_client.answers import as_json as document

    found = client.ledger(run)
    if as_json:
        print_json(document(found))
        return
    for line in _head(found):
        print_line(plain(line))
    print_line("")
    _print_rows(found, found.currency)


def _head(found: LedgerOfRun) -> Sequence[str]:
    generated = found.tokens.get("generated", 0)
    closes = "each is in one row" if found.closes else "the rows do not add up to them"
    since = "nothing is accounted yet" if found.since is None else f"accounted since {local_time(found.since)}"
    lines = [f"{found.run}, project {found.project}, {since}", f"{generated:,} tokens generated: {closes}"]
    if found.budget is not None:
        lines.append(f"budget: {money(found.cost, found.currency)} of {money(found.budget, found.currency)} is spent")
    if found.gpu_hours_limit is not None:
        lines.append(f"GPU hours: {_hours(found.gpu_seconds)} of {found.gpu_hours_limit:g} are used")
    if found.prices is None:
        lines.append("the platform has no prices")
    return lines


def _print_rows(found: LedgerSum, currency: str | None) -> None:
    rows = [_row(line.use, line, currency) for line in found.rows]
    rows.append(
        [
            "total",
            f"{sum(line.tokens for line in found.rows):,}",
            "100.0 %" if any(line.share for line in found.rows) else "-",
            _hours(found.gpu_seconds),
            _hours(found.cpu_seconds),
            money(found.cost, currency),
        ]
    )
    headings = ["use", "tokens", "share", "gpu hours", "cpu hours", "cost"]
    print_table(headings, rows, right=headings[1:])


def _row(use: str, line: LedgerLine, currency: str | None) -> list[str]:
    return [
        use,
        f"{line.tokens:,}",
        f"{100 * line.share:.1f} %",
        _hours(line.gpu_seconds),
        _hours(line.cpu_seconds),
        money(line.cost, currency),
    ]


def _print_projects(client: Client, project: str | None, as_json: bool) -> None:
    from penstock_client.answers import as_json as document

    found = client.project_ledgers(project)
    if as_json:
        print_json(document(found))
        return
    rows = [
        [
            entry.project,
            number(entry.runs, "{}"),
            f"{entry.tokens.get('generated', 0):,}",
            f"{entry.tokens.get('trained', 0):,}",
            _hours(entry.gpu_seconds),
            _hours(entry.cpu_seconds),
            money(entry.cost, found.currency),
        ]
        for entry in found.projects
    ]
    headings = ["project", "runs", "generated", "trained", "gpu hours", "cpu hours", "cost"]
    print_table(headings, rows, right=headings[1:])
    if not rows:
        print_note("no projects")


def _hours(seconds: float) -> str:
    return _figure(seconds / HOUR_S)


def _figure(amount: float) -> str:
    """Two decimals, or four of a small amount, which a run on a laptop has."""
    return f"{amount:,.2f}" if amount >= 1 or amount == 0 else f"{amount:.4f}"


def money(amount: float | None, currency: str | None) -> str:
    """An amount in its currency; `-` without prices."""
    return "-" if amount is None else f"{_figure(amount)} {currency or ''}".rstrip()
