"""Owns how text reaches the terminal: the console for tables, and the escaping of text from untrusted sources.

Must not know what is printed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

FILE_WIDTH = 160


def console() -> Console:
    """A console on standard output. A pipe or a file has no width, and values must not be cut off there."""
    from rich.console import Console

    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=FILE_WIDTH)


def print_line(text: str) -> None:
    """Print one line on standard output and flush it."""
    print(text, flush=True)


def plain(text: str) -> str:
    """One line without control characters: each one, line breaks included, is replaced by its escape sequence.

    Models, messages and other machines can put anything into the text.
    """
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def cell(text: str) -> Text:
    """`plain` text for a table cell, in which square brackets are not markup."""
    from rich.text import Text

    return Text(plain(text))
