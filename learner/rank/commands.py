"""Owns the commands that rank 0 sends to the other ranks.

Must not carry them out.
"""

from __future__ import annotations

from typing import Literal

from services.contracts import UNOWNED, Batch, Fence, Value


class Command(Value):
    """What all ranks do next, together. Rank 0 sends it to the others.

    `train` and `retrain` (from the archive) have a batch, the learner under whose name it is archived, and the step's
    learning rate; `train` also the policy version from which it starts. `save` has a step and the learner that saves,
    `load` the name of a checkpoint.
    """

    do: Literal["idle", "train", "retrain", "snapshot", "save", "load", "stop"]
    batch: Batch | None = None
    version: int | None = None
    learning_rate: float | None = None
    fence: Fence = UNOWNED
    step: int | None = None
    name: str | None = None
