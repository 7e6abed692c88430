"""Owns the bounds of the operation counts: one table with what is counted, its value at present, its bound and why.

Must not measure. A count does not depend on the machine, so a change that exceeds a bound fails on every one.
"""

from __future__ import annotations

from typing import NamedTuple


class Bound(NamedTuple):
    """`present`: what the count is now; `most`: what it may be; `why`: what it consists of."""

    present: float
    most: float
    why: str


ONE_PASS = "prompt and responses of a group share a row: (48 + 8 x 19) tokens for 8 x 20 in the loss"
BOUNDS: dict[str, Bound] = {
    "Redis calls per group: sampler": Bound(
        2.5, 3.0, "the verdicts of a group are recorded in one call, its hash is read for the archive; 8 per step"
    ),
    "Redis calls per group: rollout": Bound(
        4.19,
        4.5,
        "reads the task, what is missing and what was half-drawn, publishes all samples in one call; 3 per step",
    ),
    "Redis calls per group: verifier": Bound(
        1.25, 1.5, "the verdicts of a group are published in one call; 64 samples are read, and their texts, in two"
    ),
    "Redis calls per group: learner": Bound(
        9.375, 10.0, "each of 8 payloads is read by a command, of a group one; 6 per step for batch, version and commit"
    ),
    "Redis calls per turn of the sampler": Bound(
        4.25, 5.0, "edits, pause, starvation and policy, once each; the archive reads the policy for each file"
    ),
    "messages per response": Bound(
        2.16, 2.2, "sample and verdict; a task for 8 of them; batch, record, plan and its ack once per step"
    ),
    "copies per byte published: snapshot": Bound(1.0, 1.01, "each parameter is copied into its bucket"),
    "copies per byte published: sent": Bound(1.0, 1.01, "each bucket once; padding and checksums are below 1 %"),
    "copies per byte published: received": Bound(1.0, 1.01, "as sent"),
    "copies per byte published: staged": Bound(0.0, 0.01, "the buffers that were received are what is applied"),
    "forward tokens per trained token: one optimizer step": Bound(
        1.25, 1.3, f"{ONE_PASS}; the pass that is trained also gives the proximal log-probs"
    ),
    "forward tokens per trained token: two optimizer steps": Bound(
        1.875, 1.95, f"{ONE_PASS}; half of the tokens pass once more, for the proximal log-probs of the second step"
    ),
    "forward tokens per trained token: with a KL reference": Bound(
        2.5, 2.6, f"{ONE_PASS}; all pass through the reference policy too"
    ),
}


class CountExceededError(AssertionError):
    """A count is above its bound; the text names the count, what was found, the bound and why it is that."""


def check(name: str, found: float) -> None:
    """Raise CountExceededError if the count `name` is above its bound."""
    bound = BOUNDS[name]
    if found > bound.most:
        raise CountExceededError(
            f"{name}: {found:.4g} is above the bound of {bound.most:g}; it was {bound.present:g}: {bound.why}"
        )
