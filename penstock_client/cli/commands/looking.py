"""Owns the commands that look into a run: waits, dead and unknown, as tables.

Must not trust the content of a message: all of it is printed as plain text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock_client.cli.commands.arguments import JsonOption, RunArgument
from penstock_client.cli.following.figures import duration, local_time
from penstock_client.cli.terminal import plain, print_json, print_line, print_table

if TYPE_CHECKING:
    from penstock_client.client import Client
    from penstock_client.models import WaitEntry

REASON_SHOWN = 300


def waits(client: Client, run: RunArgument, as_json: JsonOption = False) -> None:
    """Print what a run's processes wait for and for how long, longest wait first."""
    from penstock_client.answers import as_json as document

    found = client.waits(run)
    if as_json:
        print_json([document(wait) for wait in found])
        return
    rows = [
        [duration(wait.seconds), duration(wait.deadline_s), _mark(wait), wait.process, wait.name, wait.waits_for]
        for wait in found
    ]
    headings = ["duration", "deadline", "kind", "process", "wait", "waits for"]
    print_table(headings, rows, right=["duration", "deadline"])
    if not rows:
        print_line(f"{run}: nothing waits")


def _mark(wait: WaitEntry) -> str:
    return "stalled" if wait.stalled else "idle" if wait.idle else "-"


def dead(client: Client, run: RunArgument, as_json: JsonOption = False) -> None:
    """List dead letters and their reasons."""
    from penstock_client.answers import as_json as document

    letters = list(client.dead(run))
    if as_json:
        print_json([document(letter) for letter in letters])
        return
    rows = [
        [
            letter.entry,
            local_time(letter.at),
            letter.stream.removeprefix(f"penstock:{{{run}}}:"),
            letter.cause,
            letter.group or "-",
            letter.reason[:REASON_SHOWN],
        ]
        for letter in letters
    ]
    print_table(["entry", "when", "stream", "cause", "group", "reason"], rows)
    if not rows:
        print_line(f"{run}: no dead letters")


def unknown(client: Client, run: RunArgument, as_json: JsonOption = False) -> None:
    """List the last unknown verdicts: why, and how the response ended."""
    from penstock_client.answers import as_json as document

    verdicts = list(client.unknown(run))
    if as_json:
        print_json([document(verdict) for verdict in verdicts])
        return
    for verdict in verdicts:
        where = f"{verdict.prompt or verdict.group} [{verdict.index}]"
        print_line(plain(f"{local_time(verdict.at)}  {where}  {verdict.reason}"))
        print_line(plain(f"    ...{verdict.excerpt}"))
    if not verdicts:
        print_line(f"{run}: no unknown verdicts")
