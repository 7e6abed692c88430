"""Owns `penstock bench`: it runs a benchmark of the checkout by its name.

Must not measure; the package `benchmarks` does, which is in a checkout but not in an installed wheel.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock_client.cli.reporting import fail

ROOT = Path(__file__).resolve().parents[3]


NameArgument = Annotated[str | None, typer.Argument(metavar="[NAME]", help="A benchmark; all are listed without one.")]


def bench(context: typer.Context, name: NameArgument = None) -> None:
    """Measure Penstock with a benchmark of the checkout, or list the benchmarks.

    What follows the name goes to the benchmark: `--help` says how it measures. Exit status 1: a target was missed.
    """
    if not (ROOT / "benchmarks" / "__main__.py").is_file():
        fail(f"bench: {ROOT / 'benchmarks'} is missing; the benchmarks run from a checkout of the repository")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    arguments = [] if name is None else [name, *context.args]
    # In place of this process, so that signals and the exit status are the benchmark's own.
    os.execve(sys.executable, [sys.executable, "-m", "benchmarks", *arguments], environment)
