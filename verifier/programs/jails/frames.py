"""Owns the frames between the service and a supervisor: four bytes of length, then JSON.

Must not read a frame longer than the most that a supervisor sends.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

HEAD = struct.Struct("!I")
MOST_BYTES = 64 << 20


class FrameError(Exception):
    """The frames ended, or are not frames."""


def packed(content: Mapping[str, object]) -> bytes:
    """One frame."""
    text = json.dumps(content).encode()
    return HEAD.pack(len(text)) + text


def unpacked(received: bytes) -> Iterator[dict[str, Any]]:
    """The frames of a whole answer. Raises FrameError when the last one is not whole, or there is none."""
    if not received:
        raise FrameError("no frame")
    while received:
        length = HEAD.unpack(received[: HEAD.size])[0] if len(received) >= HEAD.size else MOST_BYTES
        text, received = received[HEAD.size :][:length], received[HEAD.size + length :]
        if len(text) < length:
            raise FrameError("a frame is not whole")
        yield _content(text)


async def read_frame(stream: asyncio.StreamReader) -> dict[str, Any]:
    """The next frame. Raises FrameError."""
    try:
        length = HEAD.unpack(await stream.readexactly(HEAD.size))[0]
        if length > MOST_BYTES:
            raise FrameError(f"a frame of {length} bytes")
        return _content(await stream.readexactly(length))
    except asyncio.IncompleteReadError:
        raise FrameError("the frames ended") from None


def _content(text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise FrameError("a frame that is not an object of JSON")
    return content
