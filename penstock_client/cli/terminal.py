"""Owns how text reaches the terminal: the console, tables, and the escaping of text from untrusted sources.

Must not know what is printed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

FILE_WIDTH = 160
GAP = "  "
LONGEST_WHOLE = 48
"""Characters of a first column that is not folded."""


def console() -> Console:
    """A console on standard output. A pipe or a file has no width, and values must not be cut off there."""
    from rich.console import Console

    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=FILE_WIDTH)


def print_line(text: str) -> None:
    """Print one line on standard output and flush it."""
    print(text, flush=True)


def print_note(text: str) -> None:
    """Print one line on standard error, where it is no part of the data."""
    print(plain(text), file=sys.stderr, flush=True)


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Show on standard error that this is being done, if a person looks at it there; nothing stays."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(plain(what)):
        yield


@contextmanager
def bar(what: str, size: int) -> Iterator[Callable[[int], None]]:
    """A bar of `size` bytes on standard error, if a person looks at it there; what it yields moves it by some bytes."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(plain(what), total=size)
        yield lambda more: progress.advance(task, more)


def print_json(document: Any) -> None:
    """Print a document as indented JSON, which is ASCII: no character of it controls a terminal."""
    print_line(json.dumps(document, indent=2))


def plain(text: str) -> str:
    """One line without control characters: each one, line breaks included, is replaced by its escape sequence.

    Models, messages and other machines can put anything into the text.
    """
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def cell(text: str) -> Text:
    """`plain` text for a table cell, in which square brackets are not markup."""
    from rich.text import Text

    return Text(plain(text))


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Print rows under headings, with the columns named in `right` aligned there. No row: nothing is printed.

    On a terminal long cells are folded to its width; elsewhere each row is one line, whatever its length.
    """
    if not rows:
        return
    if sys.stdout.isatty():
        console().print(grid(headings, rows, right))
        return
    table = [[plain(text) for text in row] for row in (headings, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [
            text.rjust(width) if heading in right else text.ljust(width)
            for heading, text, width in zip(headings, row, widths, strict=True)
        ]
        print_line(GAP.join(cells).rstrip())


def grid(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> Table:
    """The table of `print_table` for a terminal."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    # The first column has what is copied, such as an id: other columns are folded before it.
    whole = max((len(plain(row[0])) for row in rows), default=0) <= LONGEST_WHOLE
    for number, heading in enumerate(headings):
        justify: Literal["left", "right"] = "right" if heading in right else "left"
        table.add_column(cell(heading), justify=justify, overflow="fold", no_wrap=number == 0 and whole)
    for row in rows:
        table.add_row(*map(cell, row))
    return table
