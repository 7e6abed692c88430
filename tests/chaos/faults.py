"""Owns the table of faults: victim, moment in which it counts, action, recovery, and how often it is injected.

Must not perform an action.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.chaos import failover, moments, outage, recovery, resumption, strikes
from tests.chaos.ground import EMBEDDED, PROXY, SENTINELS
from tests.chaos.moments import Look
from tests.chaos.recovery import Recovered
from tests.chaos.strikes import Strike

LOCAL, DISK, RANKS, STORE = "local", "disk", "ranks", "store"
"""What a fault needs besides a Redis of one kind (ground.py): the run's files on this machine, or even its checkpoints
on a disk that can be filled; several learner ranks; a store."""


@dataclass(frozen=True)
class Fault:
    """`look` finds a moment in which the fault counts, `strike` injects it, `recovered` detects the recovery.

    `times`: how often the long campaign injects it. `engine`: whether it kills an engine.
    """

    look: Look
    strike: Strike
    recovered: Recovered
    times: int
    needs: str = ""
    engine: bool = False


_REPLACED = {
    service: recovery.all_of(recovery.work_done, recovery.replaced(service))
    for service in ("rollout", "verifier", "sampler", "learner")
}
_BACK = {
    service: recovery.all_of(recovery.work_done, recovery.back(service))
    for service in ("rollout", "verifier", "sampler", "learner")
}
_GATEWAY = recovery.all_of(recovery.answering, recovery.progressing)
_HOSTS = recovery.all_of(recovery.work_done, recovery.answering, recovery.progressing)
_ALL_SERVICES = recovery.all_of(recovery.work_done, recovery.progressing)
_MESSAGES = moments.message_in_flight("tasks", "samples", "verdicts", "batches", "evaluation:tasks")

FAULTS: Mapping[str, Fault] = {
    "kill engine core at work": Fault(
        moments.inside(moments.working("rollout")), strikes.kill, _REPLACED["rollout"], 18, engine=True
    ),
    "kill engine core in a sync": Fault(
        moments.inside(moments.syncing), strikes.kill, _REPLACED["rollout"], 6, engine=True
    ),
    "kill rollout replica at work": Fault(moments.working("rollout"), strikes.kill, _REPLACED["rollout"], 12),
    "kill rollout replica in a sync": Fault(moments.syncing, strikes.kill, _REPLACED["rollout"], 6),
    "kill verifier": Fault(moments.working("verifier"), strikes.kill, _REPLACED["verifier"], 18),
    "kill sampler": Fault(moments.sampling, strikes.kill, _REPLACED["sampler"], 18),
    "kill learner rank with a batch": Fault(moments.learning, strikes.kill, _REPLACED["learner"], 16),
    "kill learner rank in a sync": Fault(moments.publishing, strikes.kill, _REPLACED["learner"], 6),
    "kill gateway": Fault(moments.controlling, strikes.kill, _GATEWAY, 12),
    "kill Ray": Fault(moments.hosting, strikes.kill_ray, _HOSTS, 4),
    "kill Redis": Fault(moments.serving, strikes.kill_redis, _ALL_SERVICES, 12, EMBEDDED),
    "stop engine core": Fault(moments.inside(moments.working("rollout")), strikes.stop, _BACK["rollout"], 6),
    "stop rollout replica": Fault(moments.working("rollout"), strikes.stop, _BACK["rollout"], 8),
    "stop verifier": Fault(moments.working("verifier"), strikes.stop, _BACK["verifier"], 8),
    "stop sampler": Fault(moments.sampling, strikes.stop, _BACK["sampler"], 8),
    "stop learner rank": Fault(moments.learning, strikes.stop, _BACK["learner"], 8),
    "stop gateway": Fault(moments.controlling, strikes.stop, _GATEWAY, 4),
    "stop Redis": Fault(moments.serving, strikes.stop_redis, _ALL_SERVICES, 4, EMBEDDED),
    "drop connections": Fault(moments.connected, strikes.drop_connections, _ALL_SERVICES, 10, PROXY),
    "delay connections": Fault(moments.connected, strikes.delay_connections, _ALL_SERVICES, 6, PROXY),
    "swallow connections": Fault(moments.connected, strikes.swallow_connections, _ALL_SERVICES, 4, PROXY),
    "refuse connections": Fault(moments.connected, strikes.refuse_connections, _ALL_SERVICES, 6, PROXY),
    "full disk": Fault(moments.checkpoint_coming, strikes.fill_disk, recovery.checkpoint_written, 6, DISK),
    "damaged checkpoint": Fault(moments.checkpointed, strikes.damage_checkpoint, _REPLACED["learner"], 6, LOCAL),
    "kill rank 0 of two with a batch": Fault(moments.first_rank, strikes.kill, _REPLACED["learner"], 3, RANKS),
    "kill rank 1 of two with a batch": Fault(moments.later_rank, strikes.kill, _REPLACED["learner"], 4, RANKS),
    "stop rank 1 of two": Fault(moments.later_rank, strikes.stop, _BACK["learner"], 3, RANKS),
    "failover that loses a second": Fault(failover.watched, failover.fail_over, _ALL_SERVICES, 6, SENTINELS),
    "store away": Fault(outage.storing, outage.take_away, outage.stored, 6, STORE),
    "resume from an older step": Fault(resumption.resumable, resumption.resume_earlier, resumption.resumed, 4),
    "kill sampler in a rewind": Fault(
        resumption.resumable, resumption.cut_off(resumption.kill_sampler), resumption.resumed, 3
    ),
    "kill Redis in a rewind": Fault(
        resumption.resumable, resumption.cut_off(resumption.kill_redis), resumption.resumed, 3, EMBEDDED
    ),
    "damaged payload": Fault(moments.payload_waiting, strikes.damage_payload, recovery.group_ended, 8),
    "damaged message": Fault(_MESSAGES, strikes.damage_message, recovery.rejected, 14),
    "duplicated message": Fault(_MESSAGES, strikes.duplicate_message, recovery.entry_dealt_with, 14),
}
"""Every fault by name."""
