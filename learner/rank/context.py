"""Owns what the parts of one rank share: its place among the ranks, its training thread, its files, its waits.

Must not train or know any command.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TypeVar

from learner.archive import RunArchive, run_folder
from learner.checkpoint.manager import Checkpoints
from learner.storage_retry import retry_storage
from learner.training.process_group import Ranks
from learner.training.trainer import Trainer
from services.process.hosting import Context
from services.storage.mirror import run_mirror

R = TypeVar("R")

LEAST_TIMEOUT_S = 600.0


class RankContext:
    """Rank `rank` of `world`. Collectives and gradients run on one thread, so that all ranks run them in one order.

    `ranks` and `trainer` are set when the rank opens.
    """

    ranks: Ranks
    trainer: Trainer

    def __init__(self, service: Context, rank: int, world: int) -> None:
        recipe = service.record.recipe
        self.service = service
        self.settings = recipe.learner
        self.rank = rank
        self.world = world
        self.timeout_s = max(LEAST_TIMEOUT_S, 4 * recipe.weights.timeout_s)
        """The longest time, in seconds, that one collective may take."""
        self.stall_timeout_s = recipe.limits.stall_timeout_s
        self.archive = RunArchive(run_folder(service.record.id), run_mirror(service.record.id))
        self.checkpoints = Checkpoints(self.archive)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learning")

    async def in_order(self, task: Callable[[], R]) -> R:
        """Run blocking `task` on the training thread, between two collectives."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, task)

    def waiting(self, name: str, what: str) -> AbstractContextManager[None]:
        """List the body as a wait for `what`, of at most limits.stall_timeout_s seconds."""
        return self.service.waits.on(name, what, self.stall_timeout_s)

    async def retry_storage(self, operation: Callable[[], R], what: str) -> R:
        """See learner.storage_retry. The retries end before a collective of the other ranks times out."""
        patience_s = min(self.stall_timeout_s, self.timeout_s / 2)
        return await retry_storage(operation, what, self.service.waits, patience_s)

    def close(self) -> None:
        """End the training thread."""
        self._thread.shutdown()
