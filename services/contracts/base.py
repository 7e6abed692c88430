"""Owns what all messages have in common: immutable values, the wire's version, the lanes.

Must not name a stream.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION: Literal[1] = 1

Count = Annotated[int, Field(ge=0, lt=2**31)]
"""A number of things; bounded, because messages may be hostile and Redis counts in 64 bits."""
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Lane(StrEnum):
    """Which flow a group belongs to; each lane has streams, counters and slots of its own."""

    TRAIN = "train"
    EVALUATION = "evaluation"


class Value(BaseModel):
    """An immutable part of a message. Unknown fields are ignored, so that old readers survive new writers."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Message(Value):
    """A stream entry. `kind` names the type on the wire; `schema_version` changes only incompatibly."""

    kind: str
    schema_version: Literal[1] = SCHEMA_VERSION
