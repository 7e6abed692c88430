"""Owns `penstock doctor`: one line per check of this machine.

Must not check anything itself; deploy.cli.machine_checks does.
"""

from __future__ import annotations

import typer

from deploy.cli.common import PortOption
from penstock_client.cli.commands.arguments import OwnJsonOption
from penstock_client.cli.connection import PORT
from penstock_client.cli.reporting import EXIT_FAILED
from penstock_client.cli.terminal import print_json, print_line


def doctor(port: PortOption = PORT, as_json: OwnJsonOption = False) -> None:
    """Check that this machine can run the stack; exit status 1 if a check fails."""
    from deploy.cli.machine_checks import run_checks

    results = run_checks(port)
    if as_json:
        print_json([{"passed": passed, "check": line} for passed, line in results])
    for passed, line in results if not as_json else ():
        print_line(f"{'ok  ' if passed else 'FAIL'}  {line}")
    raise typer.Exit(0 if all(passed for passed, _ in results) else EXIT_FAILED)
