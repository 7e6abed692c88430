"""Owns the commands for runs that have ended: archive and delete one or many, adopt one whose record is lost.

Must not delete anything; the platform's controller does.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from penstock_client.cli.commands.arguments import RunArgument, checked_run
from penstock_client.cli.following.figures import hint, local_time
from penstock_client.cli.following.follow import exists
from penstock_client.cli.following.notices import POLL_S
from penstock_client.cli.reporting import EXIT_FAILED, fail
from penstock_client.cli.terminal import plain, print_json, print_line, print_note, print_table

if TYPE_CHECKING:
    from penstock_client.client import Client
    from penstock_client.models import ClosedEntries, RunEntry, UnclosedRun

DELETION_S = 600.0
"""How long `delete` waits for the controller."""
AGE = re.compile(r"(\d{1,6})([smhd])")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MOST_REQUESTS = 1000

OneRun = Annotated[str | None, typer.Argument(metavar="RUN", help="Id of the run; none with --older-than.")]
OlderOption = Annotated[
    str | None,
    typer.Option("--older-than", metavar="AGE", help="Instead: all runs that ended so long ago, such as 30d or 12h."),
]
StateOption = Annotated[
    list[str] | None, typer.Option("--state", help="With --older-than: only runs in this state; may be repeated.")
]
ProjectOption = Annotated[str | None, typer.Option("--project", help="With --older-than: only runs of this project.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON: the runs, and those refused; where it would ask, --yes is needed.")
]
DryOption = Annotated[bool, typer.Option("--dry-run", help="With --older-than: only list these runs.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


def archive(
    client: Client,
    run: OneRun = None,
    older_than: OlderOption = None,
    state: StateOption = None,
    project: ProjectOption = None,
    dry_run: DryOption = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Free the memory of a run that has ended, or of many; it can no longer be resumed, and stays readable."""
    named = _one_or_many(run, older_than)
    if named is not None:
        entry = client.archive(named)
        if as_json:
            _print_closed([entry], [])
        else:
            print_line(f"{named}: archiving")
        return
    age = _seconds(older_than)

    def close(dry: bool) -> ClosedEntries:
        return client.archive_older(age, dry_run=dry, state=state, project=project)

    _close_many(close, "archive", dry_run, yes, as_json)


def adopt(
    client: Client,
    run: RunArgument,
    project: Annotated[str | None, typer.Option("--project", help="Project of the run.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the run as JSON, as the API answers it.")] = False,
) -> None:
    """Take over a run whose record is lost, from its files; it is failed then, and can be resumed."""
    from penstock_client.answers import as_json as document

    view = client.adopt(run, project)
    if as_json:
        print_json(document(view))
        return
    print_line(plain(f"{view.id}: {view.state}, {view.reason}; {hint('resume', view.id)} resumes it"))


def delete(
    client: Client,
    run: OneRun = None,
    files: Annotated[bool, typer.Option("--files", help="Also delete its folder, and what the store has.")] = False,
    older_than: OlderOption = None,
    state: StateOption = None,
    project: ProjectOption = None,
    dry_run: DryOption = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete a run that has ended, or many: all that Redis holds of it, and with --files its files."""
    named = _one_or_many(run, older_than)
    what = " and all of its files" if files else "; its files stay"
    if named is not None:
        _ask(f"Delete run {named} from Redis{what}?", yes, as_json)
        entry = _delete_one(client, named, files)
        if as_json:
            _print_closed([entry], [])
        else:
            print_line(f"{entry.id}: deleted")
        return
    age = _seconds(older_than)

    def close(dry: bool) -> ClosedEntries:
        return client.delete_older(age, files=files, dry_run=dry, state=state, project=project)

    _close_many(close, "delete", dry_run, yes, as_json)


def _one_or_many(run: str | None, older_than: str | None) -> str | None:
    if (run is None) == (older_than is None):
        fail("RUN, --older-than: give exactly one of them")
    return None if run is None else checked_run(run)


def _seconds(age: str | None) -> float:
    found = AGE.fullmatch(age or "")
    if not found:
        fail(f"--older-than: {age!r} is not valid: expected a number with s, m, h or d, such as 30d")
    return int(found[1]) * SECONDS[found[2]]


def _ask(question: str, yes: bool, as_json: bool) -> None:
    if not yes and as_json:
        fail("--json: it asks no question: give --yes with it")
    if not yes and not typer.confirm(question):
        raise typer.Exit(EXIT_FAILED)


def _delete_one(client: Client, run: str, files: bool) -> RunEntry:
    entry = client.delete(run, files)
    ends = time.monotonic() + DELETION_S
    while exists(client, entry.id):
        if time.monotonic() > ends:
            shown = hint("show", run)
            fail(f"{run}: not deleted within {DELETION_S:g} s; the controller continues, see {shown}")
        time.sleep(POLL_S)
    return entry


def _print_closed(runs: Sequence[RunEntry], refused: Sequence[UnclosedRun]) -> None:
    from penstock_client.answers import as_json as document

    print_json({"runs": [document(entry) for entry in runs], "refused": [document(entry) for entry in refused]})


def _close_many(close: Callable[[bool], ClosedEntries], verb: str, dry_run: bool, yes: bool, as_json: bool) -> None:
    """List the runs, ask, and close them, as many requests as that takes."""
    found = close(True)
    if not as_json:
        rows = [[entry.id, entry.project or "-", entry.state, local_time(entry.created_at)] for entry in found.runs]
        print_table(["run", "project", "state", "created"], rows)
    if not found.runs or dry_run:
        if as_json:
            _print_closed(found.runs, found.refused)
        elif not found.runs:
            print_note("no such runs")
        return
    _ask(f"{verb.capitalize()} {'these and more' if found.more else f'these {len(found.runs)}'} runs?", yes, as_json)
    closed: list[RunEntry] = []
    refused: list[UnclosedRun] = []
    for _ in range(MOST_REQUESTS):
        done = close(False)
        closed += done.runs
        refused += done.refused
        if not done.more or not done.runs:
            break
    if as_json:
        _print_closed(closed, refused)
        return
    for unclosed in refused:
        print_note(f"{unclosed.id}: not {verb}d: {unclosed.reason}")
    print_line(plain(f"{len(closed)} runs: {verb[:-1]}ing; the controller continues"))
