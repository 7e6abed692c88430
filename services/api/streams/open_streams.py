"""Owns the open streams of one gateway: their one reader, and how many there may be.

Must not send anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from services.api.streams.hub import Hub
from services.api.streams.sending import Slots, most_streams
from services.streams.connection.client import Redis


@dataclass(frozen=True)
class OpenStreams:
    """The reader and the slots of one application."""

    hub: Hub
    slots: Slots


def open_streams(redis: Redis) -> OpenStreams:
    """Those of a gateway that starts. Raises ValueError for a setting that is not valid."""
    return OpenStreams(Hub(redis), Slots(most_streams()))


async def _streams(request: Request) -> OpenStreams:
    found: OpenStreams = request.app.state.streams
    return found


StreamsOf = Annotated[OpenStreams, Depends(_streams)]
