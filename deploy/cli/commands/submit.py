"""Owns `penstock submit`: a recipe becomes a run, which may be waited for.

Must not start a stack; `penstock up` and the chart do.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.options import DEFAULT_API, ApiOption, RecipeArgument

if TYPE_CHECKING:
    from deploy.cli.client import Api

POLL_S = 1.0


class TooLateError(RuntimeError):
    """The run has not ended in time."""


def submit(
    recipe: RecipeArgument,
    api: ApiOption = DEFAULT_API,
    run: Annotated[str | None, typer.Option("--id", help="Id of the run; default: from the recipe's name.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run; exit status 0 if it succeeds.")] = False,
    timeout: Annotated[
        float, typer.Option(min=1, help="With --wait: seconds after which the run is cancelled; exit status 1.")
    ] = 86400.0,
) -> None:
    """Submit a run and print its id."""
    from deploy.cli.main import INTERRUPTED, RUN_FAILED, follow, obstacles, open_api, say
    from services.settings import load_recipe

    ends = time.monotonic() + timeout
    with obstacles(), open_api(api) as client:
        loaded = load_recipe(recipe)
        document = loaded.model_dump(mode="json")
        if not wait:
            say(client.submit(document, run)["id"])
            return
        submitted = run or f"{loaded.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        _submit_in_time(client, document, submitted, ends)
        say(submitted)
        try:
            view, _ = follow(client, submitted, lambda: _check(ends))
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except TooLateError:
            say(f"{submitted}: not ended within {timeout:g} s; cancelling")
            client.cancel(submitted)
            raise typer.Exit(RUN_FAILED) from None
    raise typer.Exit(0 if view["state"] == "succeeded" else RUN_FAILED)


def _submit_in_time(client: Api, document: dict[str, Any], run: str, ends: float) -> None:
    """Submit as soon as the API answers: who waits for a run may be there before it. Raises ApiError when late."""
    from deploy.cli.client import ApiUnreachableError
    from deploy.cli.main import say

    unheard = False
    while True:
        try:
            # A request whose answer was lost may have come through.
            if not (unheard and any(one["id"] == run for one in client.runs())):
                client.submit(document, run)
            return
        except ApiUnreachableError as error:
            if time.monotonic() > ends:
                raise
            say(f"no answer yet: {error}")
            unheard = True
            time.sleep(POLL_S)


def _check(ends: float) -> None:
    if time.monotonic() > ends:
        raise TooLateError
