"""Owns rank 0 of a run's learner: start, train, end. It alone reads batches, publishes and commits.

Must not touch the policy; the rank's worker does. Each phase, the name of its wait, and what ends the wait:

    start       rewind       <- sampler: rewinds the run in Redis (only if resumed from an older step)
      v
    +-> read    batches      <- sampler: appends the next batch to the stream
    |   train   training     <- all ranks: they wait (command) for a command of rank 0, an idle one at least every 4 s;
    |           commit       <- the first optimizer step waits for the commit of the step before
    |   publish weight-sync  <- replicas: apply the broadcast and show the version in their heartbeats, or time out
    |   commit               -> sampler: one Redis call frees the slots of the batch; both in the background, while the
    |                           next batch is read and trained
    |   save    checkpoint   <- all ranks: write their files in the background; the next save and the end wait for them
    +-- (done after the last rollout step)
      v
    end         evaluations  <- sampler: appends the final evaluation of every set; then export, and wait for `stopping`
"""

from __future__ import annotations

import logging

from learner.coordinator.publication import Publication
from learner.coordinator.run_end import RunEnd
from learner.coordinator.run_start import RunStart, StartedRun
from learner.coordinator.training_loop import TrainingLoop
from learner.coordinator.waiting import LearnerStoppingError, idle_during
from learner.rank.commands import Command
from learner.rank.worker import RankWorker
from learner.weight_sync.publisher import Publisher
from services.process.hosting import Context
from services.streams.state.policy_history import History

log = logging.getLogger(__name__)


class Coordinator:
    """Rank 0 of `world` ranks. The other ranks carry out its commands."""

    def __init__(self, context: Context, worker: RankWorker, world: int) -> None:
        self._context = context
        self._worker = worker
        self._world = world

    async def run(self) -> None:
        """Start the run or resume it, train its rollout steps, export, then serve joining replicas until `stopping`."""
        context, worker = self._context, self._worker
        above = await idle_during(worker, worker.resume.newest_epoch())
        history = await History.fenced(context.redis, context.keys, "learner", context.heartbeat.info.id, above)
        resumed = await history.policy() is not None
        await idle_during(worker, worker.resume.open_archive(history.fence, resumed=resumed))
        weights = context.record.recipe.weights
        publisher = Publisher(
            context.redis, context.keys, context.event_log, weights, context.host, history, worker.device
        )
        # The first write under the fence comes after this epoch is in the archive, and before anything is read from
        # Redis by which files are deleted: a learner that started meanwhile makes it fail, a later one is above it.
        await publisher.open(worker.manifest)
        publication = Publication(context, worker, history, publisher)
        started: StartedRun | None = None
        try:
            started = await RunStart(context, worker, publication).run()
            loop = TrainingLoop(context, worker, publication, started.schedule, done=started.done, world=self._world)
            await loop.run()
            await idle_during(worker, started.schedule.settle())
            await RunEnd(context, worker, publication, loop.save_last).run()
        except LearnerStoppingError:
            log.info("stopping: the steps that are not committed are left to the next learner")
        finally:
            await publication.close()
            await publisher.close()
            if started:
                await started.schedule.close()
        # After a failure no command is sent: another rank may be in a different collective. It notices that rank 0
        # leaves the group.
        await worker.send(Command(do="stop"))
