"""Owns the options that commands which judge share.

Must not import anything heavy: `penstock --help` answers within a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ProcessesOption = Annotated[
    int | None, typer.Option("--processes", min=1, max=64, help="Texts judged at once; default: one more than cores.")
]
TimeoutOption = Annotated[
    float | None, typer.Option("--timeout", min=0.1, help="CPU seconds of one judgement; default: the recipe's, or 10.")
]
OutputOption = Annotated[
    Path | None, typer.Option("--output", help="Write the JSON lines to this file, whole or not at all.")
]
