"""Owns the command `penstock` of an installation that has only the client.

Must not contain a command.
"""

from __future__ import annotations

from penstock_client.cli.app import build_app
from penstock_client.cli.recipe import read_recipe
from penstock_client.cli.reporting import run_command_line
from penstock_client.cli.table import absent_commands, client_commands

app = build_app((*client_commands(read_recipe), *absent_commands()))


def main() -> None:
    """The entry point of the command `penstock`."""
    run_command_line(app)


if __name__ == "__main__":
    main()
