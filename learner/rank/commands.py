"""Owns what rank 0 tells the other ranks.

Must not carry it out.
"""

from __future__ import annotations

from typing import Literal

from services.contracts import Batch, Value


class Command(Value):
    """rank 0 -> all ranks: what to do next, together.

    `train` and `retrain` (from the archive) come with a batch, `save` with a step, `load` with a checkpoint's name.
    """

    do: Literal["idle", "train", "retrain", "snapshot", "save", "load", "stop"]
    batch: Batch | None = None
    step: int | None = None
    name: str | None = None
