"""Owns what all messages have in common: immutable values, the schema version, the lanes.

Must not name a stream.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION: Literal[1] = 1

Count = Annotated[int, Field(ge=0, lt=2**31)]
"""A count; limited, because messages may be hostile and Redis counts in 64 bits."""
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Lane(StrEnum):
    """The lane of a group; each lane has its own streams, counters and slots."""

    TRAIN = "train"
    EVALUATION = "evaluation"


class Value(BaseModel):
    """An immutable part of a message. Unknown fields are ignored, so that old readers can read new messages."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Message(Value):
    """A stream entry. `kind` names its type; `schema_version` changes only with incompatible changes."""

    kind: str
    schema_version: Literal[1] = SCHEMA_VERSION
