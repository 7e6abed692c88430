"""Owns the progress of a command that judges: a count on a terminal, nothing anywhere else.

Must not write to standard output.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def shown_count(done: str, target: TextIO) -> Iterator[Callable[[], None]]:
    """Counts the calls of what it yields, unless the terminal shows `target` itself. `done`: the counted verb."""
    if not sys.stderr.isatty() or target.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn(f"{{task.completed:,}} {done}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(done, total=None)
        yield lambda: progress.advance(task)
