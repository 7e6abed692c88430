"""Owns the learner's process: one rank's life, from joining the others to leaving them.

Rank 0 leads (learner.coordinator): it alone reads the batches, publishes and commits; the others follow its commands.
When a rank dies, the others notice by the process group and fail too. The controller then restarts all of them, and
they resume the run from its newest checkpoint and the archived batches after it: no group is trained twice.

Drain order: finish or abandon the micro-batch under way -> tell the other ranks to stop -> stop serving joiners ->
give up the checkpoint that is being written -> destroy the engine and the process group.

Must not touch the policy; a rank's work does, and only the trainer imports DeepSpeed.
"""

from __future__ import annotations

import logging

from learner.coordinator.coordinator import Lead
from learner.rank.commands import Command
from learner.rank.worker import RankWork
from services.contracts import Batch
from services.process import Context

log = logging.getLogger(__name__)


class LearnerService:
    """One rank of a run's learner. Ranks above 0 need rank 0's address, and `master_port` free there."""

    name = "learner"

    def __init__(self, rank: int = 0, world: int = 1, master_host: str = "127.0.0.1", master_port: int = 0) -> None:
        self._rank = rank
        self._world = world
        self._master = (master_host, master_port)

    async def run(self, context: Context) -> None:
        """Train until the run's rollout steps are done, then serve joiners until `stopping`. See the drain order."""
        self._context = context
        self._work = RankWork(context, self._rank, self._world, self._master)
        await context.heartbeat.update(state="starting")
        try:
            await context.event_log.write("starting", f"rank {self._rank} of {self._world} loads the policy")
            deadline_s = context.record.recipe.limits.startup_timeout_s
            with context.waits.on("ranks", f"{self._world} learner ranks to meet and load the policy", deadline_s):
                await self._work.open()
            await (Lead(context, self._work, self._world).run() if self._rank == 0 else self._follow())
        finally:
            await self._work.close()

    async def _follow(self) -> None:
        """Do what rank 0 says until it says stop. Raises RuntimeError when rank 0 is gone."""
        await self._context.heartbeat.update(state="ready")
        patience = self._context.record.recipe.limits.stall_timeout_s
        while True:
            with self._context.waits.on("command", "rank 0's next command", patience, idle=True):
                command = await self._work.receive()
            if command.do == "stop":
                return
            await self._obey(command)

    async def _obey(self, command: Command) -> None:
        if command.do in ("train", "retrain") and command.batch is not None:
            await self._train(command.batch, archived=command.do == "retrain")
        elif command.do == "snapshot":
            await self._work.snapshot()
        elif command.do == "save" and command.step is not None:
            await self._work.save(command.step)
        elif command.do == "load" and command.name is not None:
            await self._work.restore(command.name)

    async def _train(self, batch: Batch, *, archived: bool) -> None:
        patience = self._context.record.recipe.limits.stall_timeout_s
        with self._context.waits.on("training", f"the optimizer steps of rollout step {batch.step}", patience):
            trained = await self._work.train(batch, archived=archived)
        if trained is not None and not archived:
            self._work.check_gradients(batch.step)
