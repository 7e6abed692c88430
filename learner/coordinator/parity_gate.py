"""Owns the judgement of the differences between the log-probs of the learner and those of the rollout replicas.

Must not act on it: the event is for users and alerts.
"""

from __future__ import annotations

from collections.abc import Mapping

from learner.algorithm.parity import ReplicaDifference

JUDGED_TOKENS = 32
"""Fewer tokens are not judged: at 16 bits, single tokens differ by a nat in a healthy run."""


def differing(differences: Mapping[str, ReplicaDifference], limit: float) -> dict[str, ReplicaDifference]:
    """The replicas whose mean absolute difference is above `limit` (nats), if together they have enough tokens."""
    above = {name: found for name, found in differences.items() if found.mean > limit}
    return above if sum(found.tokens for found in above.values()) >= JUDGED_TOKENS else {}


def explanation(step: int, version: int, found: Mapping[str, ReplicaDifference], limit: float) -> str:
    """The text of the event about the replicas `found` in rollout step `step`, which started from `version`."""
    each = (
        f"{name or 'an unnamed replica'} by {difference.mean:.3g} nats on {difference.tokens} tokens"
        for name, difference in found.items()
    )
    return (
        f"step {step}: log-probs of policy version {version} differ from the learner's: {', '.join(each)}; "
        f"limits.max_logprob_difference is {limit:g}: these replicas may hold other weights than they report"
    )
