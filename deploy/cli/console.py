"""Owns where tables are printed.

Must not know what is printed.
"""

from __future__ import annotations

import sys

from rich.console import Console

WIDTH_OF_A_FILE = 160


def console() -> Console:
    """Standard output. A pipe or a file has no width of its own, and values must not be cut there."""
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=WIDTH_OF_A_FILE)
