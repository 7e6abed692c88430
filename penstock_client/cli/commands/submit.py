"""Owns the commands that add runs: submit, which can wait until the run has ended, clone, and the check of a recipe.

Must not start a stack; `penstock up` and the chart do.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from penstock_client.cli.commands.arguments import JsonOption, RecipeArgument, RunArgument, read_settings
from penstock_client.cli.following.follow import exists, follow
from penstock_client.cli.following.notices import POLL_S
from penstock_client.cli.reporting import EXIT_FAILED, warn
from penstock_client.cli.terminal import plain, print_json, print_line

if TYPE_CHECKING:
    from penstock_client.cli.recipe import ReadRecipe, RecipeReader
    from penstock_client.client import Client
    from penstock_client.models import Run

PATIENCE_S = 86400.0

ProjectOption = Annotated[str | None, typer.Option("--project", help="Project of the run.")]
PriorityOption = Annotated[
    int | None, typer.Option("--priority", help="Queued runs with a higher one are placed first; default: 0.")
]
JsonRunOption = Annotated[
    bool, typer.Option("--json", help="Print the run as JSON, as the API answers it, instead of its id.")
]


class RunTimeoutError(RuntimeError):
    """The run has not ended in time."""


def submit_with(read: RecipeReader) -> Callable[..., None]:
    """The command, which reads recipes with `read`."""

    def submit(
        client: Client,
        recipe: RecipeArgument,
        run: Annotated[
            str | None, typer.Option("--id", help="Id of the run; default: derived from the recipe's name.")
        ] = None,
        project: ProjectOption = None,
        priority: PriorityOption = None,
        wait: Annotated[bool, typer.Option("--wait", help="Follow the run; exit status 0 if it succeeds.")] = False,
        timeout: Annotated[
            float, typer.Option(min=1, help="With --wait: seconds after which the run is cancelled; exit status 1.")
        ] = PATIENCE_S,
        as_json: JsonRunOption = False,
    ) -> None:
        """Submit a run and print its id."""
        ends = time.monotonic() + timeout
        submission = _Submission(client, read(recipe, client.url), {"project": project, "priority": priority})
        if wait:
            _submit_and_wait(submission, run, ends, timeout)
        else:
            _print_run(submission.send(run), as_json)

    return submit


@dataclass(frozen=True)
class _Submission:
    """A recipe to submit. `key`: by it the API knows a repetition."""

    client: Client
    given: ReadRecipe
    fields: dict[str, str | int | None]
    key: str = field(default_factory=lambda: secrets.token_hex(16))

    def send(self, run: str | None) -> Run:
        """Submit it, and print its warnings. Raises ApiError."""
        view = self.client.submit(self.given.document, run, self.given.files, key=self.key, **self.fields)
        for text in view.warnings:
            warn(text)
        return view


def clone(
    client: Client,
    run: RunArgument,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Another value of the recipe; may be repeated."),
    ] = None,
    new: Annotated[
        str | None, typer.Option("--id", help="Id of the new run; default: derived from the recipe's name.")
    ] = None,
    project: ProjectOption = None,
    priority: PriorityOption = None,
    as_json: JsonRunOption = False,
) -> None:
    """Submit a copy of a run, with its files, and print its id; --set learner.learning_rate=1e-6 changes a setting."""
    overrides = read_settings(settings or (), "--set")
    view = client.clone(run, overrides, id=new, project=project, priority=priority)
    for text in view.warnings:
        warn(text)
    _print_run(view, as_json)


def check_with(read: RecipeReader) -> Callable[..., None]:
    """The command, which reads recipes with `read`."""

    def check(client: Client, recipe: RecipeArgument, as_json: JsonOption = False) -> None:
        """Let the API check a recipe with its files, as if it were submitted; exit status 1 if it is not valid."""
        given = read(recipe, client.url)
        faults = client.check(given.document, given.files)
        if as_json:
            print_json({"faults": faults})
        else:
            for line in faults or [f"{recipe}: valid for {client.url}"]:
                print_line(plain(line))
        if faults:
            raise typer.Exit(EXIT_FAILED)

    return check


def _print_run(view: Run, as_json: bool) -> None:
    from penstock_client.answers import as_json as document

    if as_json:
        print_json(document(view))
    else:
        print_line(plain(view.id))


def _submit_and_wait(submission: _Submission, run: str | None, ends: float, timeout: float) -> None:
    submitted = run or f"{submission.given.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    _submit_in_time(submission, submitted, ends)
    print_line(plain(submitted))
    try:
        view, _ = follow(submission.client, submitted, lambda: _check_time(ends))
    except RunTimeoutError:
        print_line(f"{submitted}: has not ended within {timeout:g} s; cancelling")
        submission.client.cancel(submitted)
        raise typer.Exit(EXIT_FAILED) from None
    raise typer.Exit(0 if view.state == "succeeded" else EXIT_FAILED)


def _submit_in_time(submission: _Submission, run: str, ends: float) -> None:
    """Submit as soon as the API answers; it may start after this command. Raises ApiError when late."""
    from penstock_client.errors import ApiError
    from penstock_client.transport import is_passing

    unanswered = False
    while True:
        try:
            # The API may have handled a request whose answer was lost; an older one does not know the key.
            if not (unanswered and exists(submission.client, run)):
                submission.send(run)
            return
        except ApiError as error:
            if time.monotonic() > ends or not is_passing(error):
                raise
            print_line(plain(f"no answer yet: {error}"))
            unanswered = True
            time.sleep(POLL_S)


def _check_time(ends: float) -> None:
    if time.monotonic() > ends:
        raise RunTimeoutError
