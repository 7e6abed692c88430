"""Owns the messages of weight syncs: manifests, plans and acks.

Must not carry weights.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from services.contracts.base import Message, Value

EPOCH_SHIFT = 20
"""A learner forms fewer than 2^20 broadcast groups."""


class TensorEntry(Value):
    """One tensor of a policy: Hugging Face name, shape, and torch dtype name ('float32')."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class WeightManifest(Value):
    """The order in which a policy's tensors are sent, in buckets of whole tensors."""

    buckets: tuple[tuple[TensorEntry, ...], ...]


@lru_cache(maxsize=1)
def parse_manifest(text: str) -> WeightManifest:
    """The manifest in JSON. Raises ValidationError.

    Kept for the next call: every version of a run has the same, and 40,000 tensors take 0.2 s in which no other thread
    runs.
    """
    return WeightManifest.model_validate_json(text)


class WeightPlan(Message):
    """learner -> fleet: join broadcast group `generation` at host:port and receive `version`.

    `members` maps a replica's process id to the rank of its first worker; rank 0 is the learner. Generations of the
    learner of epoch e start at e << EPOCH_SHIFT.
    """

    kind: Literal["weight-plan"] = "weight-plan"
    generation: int
    version: int
    host: str
    port: int
    world: int
    members: dict[str, int]
    timeout_s: float


class WeightAck(Message):
    """fleet -> learner: the result of one plan on one replica.

    The seconds also distinguish the ack of a repeated plan from the previous one: equal messages are appended once.
    """

    kind: Literal["weight-ack"] = "weight-ack"
    member: str
    generation: int
    version: int
    phase: Literal["applied", "failed"]
    detail: str = ""
    staging_s: float = 0.0
    pause_s: float = 0.0
