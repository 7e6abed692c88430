"""Owns the arguments and options that several commands share.

Must not hold a command.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock_client.cli.reporting import fail

RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,95}")


def checked_run(run: str) -> str:
    """The id of a run; `fail` for anything else, which could name another route or folder."""
    if not RUN_ID.fullmatch(run):
        fail(
            f"run id: {run!r} is not valid: expected lower-case letters, digits and dashes, "
            "at most 96, the first of them not a dash"
        )
    return run


def read_settings(given: Iterable[str], argument: str) -> dict[str, Any]:
    """Values by name of NAME=VALUE; a value is JSON, or else a text. `fail` for another form."""
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals:
            fail(f"{argument}: {text!r} is not valid: expected NAME=VALUE, such as learner.learning_rate=1e-6")
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError):
            found[name] = value
    return found


RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run.", callback=checked_run)]
RecipeArgument = Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe file, YAML or JSON.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, as the API answers it.")]
OwnJsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
"""Of commands that do not call the API."""
