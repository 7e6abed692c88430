"""Owns how tests call the command `penstock` in their own process, for its exit status and output.

Must not start a server.
"""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from deploy.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
NOWHERE = "http://127.0.0.1:1"


def penstock(*arguments: str) -> tuple[int, str]:
    """Run the command in this process; returns exit status and all output."""
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output
