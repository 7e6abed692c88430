"""Owns the commands that print what happened: events of a run, and the logs of its processes.

Must not trust a text of it: all of it is printed as plain text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock_client.cli.commands.arguments import RunArgument
from penstock_client.cli.following.figures import local_time
from penstock_client.cli.terminal import plain, print_json, print_line, print_note, print_table

if TYPE_CHECKING:
    from penstock_client.client import Client
    from penstock_client.models import RunHappening

JsonLinesOption = Annotated[bool, typer.Option("--json", help="Print one JSON line for each.")]


def events(
    client: Client,
    run: RunArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the run has ended.")] = False,
    after: Annotated[str, typer.Option("--after", metavar="CURSOR", help="Only what is behind this `id`.")] = "",
    as_json: JsonLinesOption = False,
) -> None:
    """Print what happened in a run: events, changes of state, rollout steps, evaluations; oldest first."""
    from penstock_client.answers import as_json as document

    for happening in client.follow(run, after) if follow else client.story(run, after or None):
        print_line(json.dumps(document(happening)) if as_json else _line(happening))


def logs(
    client: Client,
    run: RunArgument,
    process: Annotated[
        str | None, typer.Argument(metavar="PROCESS", help="A process of the run; default: list those with a log.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the run has ended.")] = False,
    after: Annotated[str, typer.Option("--after", metavar="CURSOR", help="Only what is behind this `id`.")] = "",
    as_json: JsonLinesOption = False,
) -> None:
    """Print the last lines of a process's log, or list the processes of a run that have one."""
    from penstock_client.answers import as_json as document

    if process is None:
        _list_logs(client, run, as_json)
        return
    lines = client.follow_log(run, process, after) if follow else client.log(run, process, after or None)
    for line in lines:
        shown = f"{local_time(line.at)}  {line.level:<7}  {line.text}"
        print_line(json.dumps(document(line)) if as_json else plain(shown))


def _list_logs(client: Client, run: str, as_json: bool) -> None:
    from penstock_client.answers import as_json as document

    found = client.logs(run)
    if as_json:
        print_json([document(log) for log in found])
        return
    rows = [[log.process, log.service, log.host, "yes" if log.live else "no", local_time(log.last_at)] for log in found]
    print_table(["process", "service", "host", "live", "last line"], rows)
    if not rows:
        print_note(f"{run}: no logs")


def _line(happening: RunHappening) -> str:
    shown = LINES.get(happening.kind, _other)(happening.data)
    return plain(f"{local_time(happening.at)}  {shown}")


def _event(data: dict[str, Any]) -> str:
    return f"{data.get('service')}: {data.get('phase')}: {data.get('text')}"


def _state(data: dict[str, Any]) -> str:
    return f"run is {data.get('state')}: {data.get('reason')}"


def _step(data: dict[str, Any]) -> str:
    metrics = data.get("metrics") or {}
    shown = ", ".join(f"{name} {metrics[name]:.4g}" for name in ("accuracy", "reward", "entropy") if name in metrics)
    return f"step {data.get('step')}: {shown}"


def _evaluation(data: dict[str, Any]) -> str:
    from penstock_client.cli.following.figures import evaluation_line
    from penstock_client.models import Evaluation

    return evaluation_line(Evaluation.model_validate(data))


def _other(data: dict[str, Any]) -> str:
    return json.dumps(data)


LINES: dict[str, Callable[[dict[str, Any]], str]] = {
    "event": _event,
    "state": _state,
    "step": _step,
    "evaluation": _evaluation,
}
"""By kind; a kind that this release does not know is printed as JSON."""
