"""Owns the options and arguments that several commands share.

Must not import anything heavy: `penstock --help` answers within a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HOST = "127.0.0.1"
PORT = 8470
DEFAULT_API = f"http://{HOST}:{PORT}"

ApiOption = Annotated[str, typer.Option("--api", envvar="PENSTOCK_API", help="Address of the REST API.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Id of a run.")]
RecipeArgument = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML or JSON file.")]
RedisOption = Annotated[
    str | None,
    typer.Option(
        "--redis", envvar="PENSTOCK_REDIS", metavar="URL",
        help="Redis to use, redis://host:port/db or as docs/operations/redis.md says; default: an embedded one.",
    ),
]  # fmt: skip
PortOption = Annotated[int, typer.Option("--port", min=1, max=65535, help="Port of the REST API.")]
RunsOption = Annotated[Path, typer.Option("--runs", envvar="PENSTOCK_RUNS", help="Folder for runs, models and data.")]
HostOption = Annotated[str, typer.Option("--host", help="IPv4 address on which the REST API listens.")]
