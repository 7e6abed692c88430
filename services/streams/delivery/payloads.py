"""Owns the claim-checked payload of a sample: packed arrays and text under one key.

Must not interpret tokens, or need Redis' client to be imported: the learner alone runs where only torch is.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from services.contracts import VersionSpan
from services.streams.delivery.nucleus import Nuclei

if TYPE_CHECKING:
    from services.streams.connection.client import Redis

WHOLE = ("prompt_ids", "response_ids", "behaviour_logprobs", "text", "finish_reason", "spans")
"""The fields that the payload's checksum covers, in this order; then those of `NUCLEI`, if there are any."""
NUCLEI = ("nucleus_ids", "nucleus_offsets")
"""The fields of a response that was sampled with top-k."""
FETCHED_AT_ONCE = 8
_WHOLE, _NUCLEI = (tuple(name.encode() for name in names) for names in (WHOLE, NUCLEI))
_INT, _FLOAT = np.dtype("<i4"), np.dtype("<f4")


class PayloadMissingError(LookupError):
    """The payload of a claim check is gone or damaged; the text names the key."""


@dataclass(frozen=True)
class SamplePayload:
    """One response as the engine wrote it.

    prompt_ids: int32 [P]; response_ids: int32 [T]; behaviour_logprobs: float32 [T], natural logarithm of the
    probability with which each response token was drawn (after temperature and top-p);
    spans: which policy version generated which response tokens, covering [0, T);
    nuclei: what each token was drawn from, over which its log-prob is normalised; None: the whole vocabulary.
    """

    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    behaviour_logprobs: NDArray[np.float32]
    text: str
    finish_reason: str
    spans: tuple[VersionSpan, ...]
    nuclei: Nuclei | None = None


def pack(payload: SamplePayload) -> dict[str, bytes]:
    """The payload as fields of a Redis hash; arrays little-endian. Raises ValueError for unequal lengths.

    Those of `NUCLEI` are there only if the response has them.
    """
    if payload.response_ids.shape != payload.behaviour_logprobs.shape:
        raise ValueError(
            f"behaviour_logprobs: shape {payload.behaviour_logprobs.shape} is not valid: "
            f"expected that of response_ids, {payload.response_ids.shape}"
        )
    fields = {
        "prompt_ids": np.asarray(payload.prompt_ids, _INT).tobytes(),
        "response_ids": np.asarray(payload.response_ids, _INT).tobytes(),
        "behaviour_logprobs": np.asarray(payload.behaviour_logprobs, _FLOAT).tobytes(),
        "text": payload.text.encode(),
        "finish_reason": payload.finish_reason.encode(),
        "spans": f"[{', '.join(f'[{span.version}, {span.start}, {span.end}]' for span in payload.spans)}]".encode(),
    }
    if payload.nuclei is not None:
        payload.nuclei.check(payload.response_ids)
        arrays = (payload.nuclei.ids, payload.nuclei.offsets)
        fields |= {name: np.asarray(array, _INT).tobytes() for name, array in zip(NUCLEI, arrays, strict=True)}
    sums = {"text_crc": _crc(fields["text"]), "crc": _crc(*(fields[name] for name in WHOLE + NUCLEI if name in fields))}
    return fields | {name: str(value).encode() for name, value in sums.items()}


def _crc(*parts: bytes) -> int:
    """CRC-32 (zlib's) of the parts and their lengths."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, zlib.crc32(len(part).to_bytes(8, "little"), crc))
    return crc


@lru_cache(maxsize=4096)
def _spans(text: bytes) -> tuple[VersionSpan, ...]:
    """The spans of a payload's field. Responses of one length and version have the same."""
    return tuple(VersionSpan(version=v, start=start, end=end) for v, start, end in json.loads(text))


def unpack(key: str, fields: dict[bytes, bytes]) -> SamplePayload:
    """The reverse of `pack`. Raises PayloadMissingError if a field is missing or was changed."""
    try:
        covered = _WHOLE + _NUCLEI if any(name in fields for name in _NUCLEI) else _WHOLE
        if int(fields[b"crc"]) != _crc(*[fields[name] for name in covered]):
            raise ValueError("its checksum does not match")
        response_ids, nuclei = np.frombuffer(fields[b"response_ids"], _INT), None
        if covered is not _WHOLE:
            nuclei = Nuclei(*(np.frombuffer(fields[name], _INT) for name in _NUCLEI))
            nuclei.check(response_ids)
        return SamplePayload(
            prompt_ids=np.frombuffer(fields[b"prompt_ids"], _INT),
            response_ids=response_ids,
            behaviour_logprobs=np.frombuffer(fields[b"behaviour_logprobs"], _FLOAT),
            text=fields[b"text"].decode(),
            finish_reason=fields[b"finish_reason"].decode(),
            spans=_spans(fields[b"spans"]),
            nuclei=nuclei,
        )
    except (KeyError, ValueError) as error:
        raise PayloadMissingError(f"{_damage(key)}{error!r}") from error


def unpack_without_nuclei(key: str, fields: dict[bytes, bytes]) -> SamplePayload:
    """A payload of which only the fields WHOLE and `text_crc` were read. Raises PayloadMissingError.

    Its checksum covers the nuclei too, so that only the text and the lengths of the arrays can be checked.
    """
    known = {name: fields[name.encode()] for name in WHOLE if name.encode() in fields}
    text = fields.get(b"text", b"")
    if len(known) < len(WHOLE) or fields.get(b"text_crc") != str(_crc(text)).encode():
        raise PayloadMissingError(f"{_damage(key)}no valid text")
    crc = str(_crc(*(known[name] for name in WHOLE))).encode()
    payload = unpack(key, {**{name.encode(): value for name, value in known.items()}, b"crc": crc})
    if payload.response_ids.shape != payload.behaviour_logprobs.shape:
        raise PayloadMissingError(f"{_damage(key)}its arrays have different lengths")
    return payload


def _damage(key: str) -> str:
    return f"payload {key} is missing or damaged: "


def is_damage(key: str, reason: str) -> bool:
    """Whether `reason`, that of an unknown verdict, is one of `fetch_texts` for the payload under `key`."""
    return reason.startswith(_damage(key))


async def fetch(redis: Redis, keys: list[str]) -> tuple[dict[str, SamplePayload], dict[str, str]]:
    """Fetch payloads: the valid ones by key, and the errors of the others by key.

    A few at once: all ranks of a learner do so at the same time, and Redis holds each reply until it is read.
    """
    whole, damaged = {}, {}
    for start in range(0, len(keys), FETCHED_AT_ONCE):
        chunk = keys[start : start + FETCHED_AT_ONCE]
        async with redis.pipeline(transaction=False) as pipe:
            for key in chunk:
                pipe.hgetall(key)
            found = await pipe.execute()
        for key, fields in zip(chunk, found, strict=True):
            try:
                whole[key] = unpack(key, fields)
            except PayloadMissingError as error:
                damaged[key] = str(error)
    return whole, damaged


async def read_fields(redis: Redis, keys: Sequence[str], fields: Sequence[str]) -> list[list[bytes | None]]:
    """These fields of each payload, in one call; None where a field or the payload is gone."""
    from services.streams.connection.functions import call_for_each

    found = await call_for_each(redis, "read_payloads", payload_keys=list(keys), field_list=list(fields))
    return [found[start : start + len(fields)] for start in range(0, len(found), len(fields))]


async def fetch_texts(redis: Redis, keys: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """The texts of responses, which a verifier needs, in one call: the valid ones, and the errors, by key."""
    texts, damaged = {}, {}
    for key, (text, crc) in zip(keys, await read_fields(redis, keys, ("text", "text_crc")), strict=True):
        try:
            texts[key] = _text(text, crc)
        except ValueError as error:
            damaged[key] = f"{_damage(key)}{error}"
    return texts, damaged


def _text(text: bytes | None, crc: bytes | None) -> str:
    if text is None or crc is None or not crc.isdigit() or int(crc) != _crc(text):
        raise ValueError("no valid text")
    return text.decode()
