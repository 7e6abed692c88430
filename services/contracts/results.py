"""Owns the results of handling a message, by the service that consumes it; metrics count them.

Must not hold a message.
"""

from __future__ import annotations

from enum import StrEnum


class TaskResult(StrEnum):
    """What a rollout replica did with a task.

    `mixed-version`: at limits.max_staleness = 0 a response had tokens of two policy versions in every attempt, so the
    task is left for redelivery. `lease-lost`: another replica took the task over, or its group was rewound, so the
    generation was stopped. `returned`: the replica was asked to end, so others go on from what it has drawn.
    """

    DONE = "done"
    DEAD_LETTERED = "dead-lettered"
    REFUSED = "refused"
    MIXED_VERSION = "mixed-version"
    LEASE_LOST = "lease-lost"
    RETURNED = "returned"


class DropReason(StrEnum):
    """Why tokens that were drawn are drawn again.

    `version`: at limits.max_staleness = 0 they are of two policy versions, or of another one than the replica holds.
    `stale`: no batch can use them any more. `damaged`: what was kept of a response cannot be read.
    """

    VERSION = "version"
    STALE = "stale"
    DAMAGED = "damaged"


class SampleResult(StrEnum):
    """What a verifier did with a sample."""

    PUBLISHED = "published"
    DUPLICATE = "duplicate"
    LEASE_LOST = "lease-lost"
    REFUSED = "refused"


class VerdictResult(StrEnum):
    """What the sampler did with a verdict."""

    RECORDED = "recorded"
    REFUSED = "refused"


class SandboxFault(StrEnum):
    """Why the sandbox has no judgement: no answer in time, the judging process died, the verifier raised an error."""

    TIMEOUT = "timeout"
    DIED = "died"
    ERROR = "error"
