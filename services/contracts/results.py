"""Owns the results of handling a message, by the service that consumes it; metrics count them.

Must not hold a message.
"""

from __future__ import annotations

from enum import StrEnum


class TaskResult(StrEnum):
    """What a rollout replica did with a task.

    `mixed-version`: at limits.max_staleness = 0 a response had tokens of two policy versions in every attempt, so the
    task is left for redelivery. `lease-lost`: another replica took the task over, or its group was rewound, so the
    generation was stopped.
    """

    DONE = "done"
    DEAD_LETTERED = "dead-lettered"
    REFUSED = "refused"
    MIXED_VERSION = "mixed-version"
    LEASE_LOST = "lease-lost"


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
