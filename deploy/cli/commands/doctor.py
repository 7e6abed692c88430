"""Owns `penstock doctor`: one line per check of this machine.

Must not check anything itself; deploy.cli.machine_checks does.
"""

from __future__ import annotations

import typer

from deploy.cli.common import EXIT_FAILED, PORT, PortOption
from deploy.cli.terminal import print_line


def doctor(port: PortOption = PORT) -> None:
    """Check that this machine can run the stack; exit status 1 if a check fails."""
    from deploy.cli.machine_checks import run_checks

    results = run_checks(port)
    for passed, line in results:
        print_line(f"{'ok  ' if passed else 'FAIL'}  {line}")
    raise typer.Exit(0 if all(passed for passed, _ in results) else EXIT_FAILED)
