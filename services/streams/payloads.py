"""Owns the claim-checked payload of a sample: packed arrays and text under one key.

Must not interpret tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.contracts import VersionSpan
from services.streams.connection import Redis


class PayloadMissingError(LookupError):
    """A claim check whose payload is gone or damaged; names the key."""


@dataclass(frozen=True)
class SamplePayload:
    """One response as the engine wrote it.

    prompt_ids: int32 [P]; response_ids: int32 [T]; behaviour_logprobs: float32 [T], natural logarithm of the
    probability with which each response token was drawn (after temperature and top-p);
    spans: which policy version wrote which response tokens, covering [0, T).
    """

    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    behaviour_logprobs: NDArray[np.float32]
    text: str
    finish_reason: str
    spans: tuple[VersionSpan, ...]


def pack(payload: SamplePayload) -> dict[str, bytes]:
    """The payload as fields of a Redis hash; arrays little-endian. Raises ValueError for unequal lengths."""
    if payload.response_ids.shape != payload.behaviour_logprobs.shape:
        raise ValueError(
            f"response_ids has shape {payload.response_ids.shape} but behaviour_logprobs "
            f"{payload.behaviour_logprobs.shape}; they must be equal"
        )
    return {
        "prompt_ids": payload.prompt_ids.astype("<i4").tobytes(),
        "response_ids": payload.response_ids.astype("<i4").tobytes(),
        "behaviour_logprobs": payload.behaviour_logprobs.astype("<f4").tobytes(),
        "text": payload.text.encode(),
        "finish_reason": payload.finish_reason.encode(),
        "spans": json.dumps([[s.version, s.start, s.end] for s in payload.spans]).encode(),
    }


def unpack(key: str, fields: dict[bytes, bytes]) -> SamplePayload:
    """The reverse of `pack`. Raises PayloadMissingError when a field is absent or damaged."""
    try:
        return SamplePayload(
            prompt_ids=np.frombuffer(fields[b"prompt_ids"], "<i4"),
            response_ids=np.frombuffer(fields[b"response_ids"], "<i4"),
            behaviour_logprobs=np.frombuffer(fields[b"behaviour_logprobs"], "<f4"),
            text=fields[b"text"].decode(),
            finish_reason=fields[b"finish_reason"].decode(),
            spans=tuple(VersionSpan(version=v, start=start, end=end) for v, start, end in json.loads(fields[b"spans"])),
        )
    except (KeyError, ValueError) as error:
        raise PayloadMissingError(f"payload {key} is missing or damaged: {error!r}") from error


async def fetch(redis: Redis, keys: list[str]) -> list[SamplePayload]:
    """Fetch payloads in one round trip, in the order of `keys`. Raises PayloadMissingError."""
    async with redis.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.hgetall(key)
        found = await pipe.execute()
    return [unpack(key, fields) for key, fields in zip(keys, found, strict=True)]


async def fetch_text(redis: Redis, key: str) -> str:
    """Only the response's text: what a verifier needs. Raises PayloadMissingError."""
    text: bytes | None = await redis.hget(key, "text")
    if text is None:
        raise PayloadMissingError(f"payload {key} is missing or damaged: no text")
    return text.decode()
