"""Owns the learner process: one rank, from joining the other ranks to leaving them.

Rank 0 runs the coordinator (learner.coordinator), which alone reads batches, publishes and commits. The other ranks
follow its commands. When a rank dies, the others notice through the process group and fail too. The controller then
restarts all of them, and they resume the run from its newest checkpoint and the archived batches after it. No group is
trained twice.

Drain order, of all ranks as soon as one is asked to stop: interrupt the rollout step before its first optimizer step,
else after half of the time that is given -> write the checkpoint of the last committed step, if that is still the state
-> send `stop` to the other ranks -> stop serving joining replicas -> destroy the engine and the process group.

Must not touch the policy; the rank's worker does, and only the trainer imports DeepSpeed.
"""

from __future__ import annotations

import logging

from learner.coordinator.coordinator import Coordinator
from learner.rank.commands import Command
from learner.rank.worker import RankWorker
from services.contracts import Batch
from services.process.hosting import Context

log = logging.getLogger(__name__)


class LearnerService:
    """One rank of a run's learner. Ranks above 0 need the address of rank 0, and `master_port` must be free there."""

    name = "learner"

    def __init__(self, rank: int = 0, world: int = 1, master_host: str = "127.0.0.1", master_port: int = 0) -> None:
        self._rank = rank
        self._world = world
        self._master = (master_host, master_port)

    async def run(self, context: Context) -> None:
        """Train until the run's rollout steps are done, then serve joining replicas until `stopping`, and drain."""
        await context.heartbeat.update(state="starting")
        if await context.model() is None:
            return
        self._context = context
        self._worker = RankWorker(context, self._rank, self._world, self._master)
        try:
            await context.event_log.write("starting", f"rank {self._rank} of {self._world} loads the policy")
            deadline_s = context.record.recipe.limits.startup_timeout_s
            with context.waits.on("ranks", f"{self._world} learner ranks to meet and load the policy", deadline_s):
                await self._worker.open()
            if self._rank == 0:
                await Coordinator(context, self._worker, self._world).run()
            else:
                await self._follow()
        finally:
            await self._worker.close()

    async def _follow(self) -> None:
        """Carry out the commands of rank 0 until it sends `stop`. Raises RuntimeError when rank 0 is gone."""
        await self._context.heartbeat.update(state="ready")
        patience_s = self._context.record.recipe.limits.stall_timeout_s
        while True:
            with self._context.waits.on("command", "rank 0's next command", patience_s, idle=True):
                command = await self._worker.receive()
            if command.do == "stop":
                return
            await self._carry_out(command)

    async def _carry_out(self, command: Command) -> None:
        if command.do in ("train", "retrain") and command.batch is not None:
            await self._train(command, command.batch)
        elif command.do == "snapshot":
            await self._worker.snapshot()
        elif command.do == "save" and command.step is not None:
            await self._worker.checkpoint_writer.save(command.step, command.fence)
        elif command.do == "load" and command.name is not None:
            await self._worker.resume.restore(command.name)

    async def _train(self, command: Command, batch: Batch) -> None:
        archived, rate = command.do == "retrain", command.learning_rate
        patience_s = self._context.record.recipe.limits.stall_timeout_s
        with self._context.waits.on("training", f"the optimizer steps of rollout step {batch.step}", patience_s):
            trained = await self._worker.training.train(
                batch, command.fence, command.version, learning_rate=rate, archived=archived
            )
        if trained is not None and not archived:
            self._worker.training.check_gradients(batch.step, command.fence)
