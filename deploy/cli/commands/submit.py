"""Owns `penstock submit`: it submits a recipe as a run, and can wait until the run has ended.

Must not start a stack; `penstock up` and the chart do.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.common import (
    DEFAULT_API,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    ApiOption,
    RecipeArgument,
    follow,
    open_api,
    print_warnings,
    reported_errors,
)
from deploy.cli.terminal import print_line

if TYPE_CHECKING:
    from deploy.cli.client import Api

POLL_S = 1.0


class RunTimeoutError(RuntimeError):
    """The run has not ended in time."""


def submit(
    recipe: RecipeArgument,
    api: ApiOption = DEFAULT_API,
    run: Annotated[
        str | None, typer.Option("--id", help="Id of the run; default: derived from the recipe's name.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run; exit status 0 if it succeeds.")] = False,
    timeout: Annotated[
        float, typer.Option(min=1, help="With --wait: seconds after which the run is cancelled; exit status 1.")
    ] = 86400.0,
) -> None:
    """Submit a run and print its id."""
    from deploy.cli.recipe_files import load_with_files

    ends = time.monotonic() + timeout
    with reported_errors(), open_api(api) as client:
        loaded, files = load_with_files(recipe)
        document = loaded.model_dump(mode="json")
        if not wait:
            view = client.submit(document, run, files)
            print_warnings(view)
            print_line(view["id"])
            return
        submitted = run or f"{loaded.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        _submit_in_time(lambda: client.submit(document, submitted, files), client, submitted, ends)
        print_line(submitted)
        try:
            view, _ = follow(client, submitted, lambda: _check_time(ends))
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except RunTimeoutError:
            print_line(f"{submitted}: has not ended within {timeout:g} s; cancelling")
            client.cancel(submitted)
            raise typer.Exit(EXIT_FAILED) from None
    raise typer.Exit(0 if view["state"] == "succeeded" else EXIT_FAILED)


def _submit_in_time(submit: Callable[[], dict[str, Any]], client: Api, run: str, ends: float) -> None:
    """Submit as soon as the API answers; it may start after this command. Raises ApiUnreachableError when late."""
    from deploy.cli.client import ApiUnreachableError

    unanswered = False
    while True:
        try:
            # The API may have handled a request whose answer was lost.
            if not (unanswered and any(view["id"] == run for view in client.runs())):
                print_warnings(submit())
            return
        except ApiUnreachableError as error:
            if time.monotonic() > ends:
                raise
            print_line(f"no answer yet: {error}")
            unanswered = True
            time.sleep(POLL_S)


def _check_time(ends: float) -> None:
    if time.monotonic() > ends:
        raise RunTimeoutError
