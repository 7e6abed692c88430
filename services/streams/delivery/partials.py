"""Owns what is kept of half-drawn responses: their tokens in pieces, one hash per group, until they are published.

Must not draw a response, nor decide whether what was kept is still worth going on from.

Fields of the hash: `entry`, the task's; per sample `tokens:INDEX`, how many are kept, `attempt:INDEX`, by which
attempt, and the pieces `INDEX:START`; `forgiven`, the deliveries of the task that are not counted; `most_published`
and `most_tokens`, how far the task ever was. A piece is
little-endian: its CRC-32, which also covers the prompt's ids; a header; per version span three int64; the token ids
(int32) and log-probs (float32); with top-k the sizes of the nuclei and their ids (int32).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from redis.exceptions import RedisError

from services.contracts import VersionSpan
from services.streams.connection.client import Redis
from services.streams.connection.functions import call, call_for_each
from services.streams.delivery.drawn import DrawnTokens, joined_tokens
from services.streams.delivery.leases import Lease
from services.streams.delivery.nucleus import Nuclei
from services.streams.keys import RunKeys

KEPT_S = 24 * 3600
"""How long Redis keeps a partial that nothing is added to, in seconds."""
FORGIVEN = 2
"""For each of limits.max_deliveries: how many deliveries that brought their task further are not counted."""
NEVER = -1
"""In place of a number of kept tokens: nothing of this sample is kept under this lease any more."""
NO_NUCLEI = 2**32 - 1
_CRC = struct.Struct("<I")
_HEADER = struct.Struct("<dIII")
"""When the response was started (Unix seconds), and how many tokens, spans and nucleus ids follow."""


class NotKeptError(RuntimeError):
    """Redis is full or away; the text says why. Nothing depends on what was not kept."""


@dataclass(frozen=True)
class Partial:
    """A half-drawn response: what was drawn of it, and when that was started (Unix seconds)."""

    tokens: DrawnTokens
    started_at: float


@dataclass(frozen=True)
class Piece:
    """Tokens of a half-drawn response that are to be kept: those of sample `index` from token `start` on.

    `attempt`: a name of its own for each attempt at the response; `base`: with how many kept tokens it began.
    """

    index: int
    attempt: str
    base: int
    start: int
    partial: Partial

    @property
    def end(self) -> int:
        """The token after its last one."""
        return self.start + len(self.partial.tokens)


def packed_piece(partial: Partial, prompt_ids: NDArray[np.int32]) -> bytes:
    """A piece as it is stored, for the response to this prompt."""
    tokens = partial.tokens
    nuclei = tokens.nuclei
    parts = [
        _HEADER.pack(
            partial.started_at, len(tokens), len(tokens.spans), NO_NUCLEI if nuclei is None else len(nuclei.ids)
        ),
        np.array([[span.version, span.start, span.end] for span in tokens.spans], "<i8").tobytes(),
        np.asarray(tokens.response_ids, "<i4").tobytes(),
        np.asarray(tokens.behaviour_logprobs, "<f4").tobytes(),
    ]
    if nuclei is not None:
        parts += [np.diff(nuclei.offsets).astype("<i4").tobytes(), np.asarray(nuclei.ids, "<i4").tobytes()]
    body = b"".join(parts)
    return _CRC.pack(_crc(body, prompt_ids)) + body


def unpacked_piece(stored: bytes, prompt_ids: NDArray[np.int32]) -> Partial:
    """The reverse of `packed_piece`. Raises ValueError for one that was changed, or is of another prompt."""
    body = stored[_CRC.size :]
    if len(stored) < _CRC.size + _HEADER.size or _CRC.unpack_from(stored)[0] != _crc(body, prompt_ids):
        raise ValueError("a piece's checksum does not match")
    started_at, tokens, spans, ids = _HEADER.unpack_from(body)
    at = _HEADER.size

    def take(kind: str, count: int) -> NDArray[np.generic]:
        nonlocal at
        found = np.frombuffer(body, kind, count, at)
        at += found.nbytes
        return found

    rows = take("<i8", 3 * spans).reshape(spans, 3).tolist()
    drawn = DrawnTokens(
        take("<i4", tokens).astype(np.int32),
        take("<f4", tokens).astype(np.float32),
        tuple(VersionSpan(version=version, start=start, end=end) for version, start, end in rows),
        _nuclei(take("<i4", tokens), take("<i4", ids)) if ids != NO_NUCLEI else None,
    )
    drawn.check()
    return Partial(drawn, started_at)


def _nuclei(sizes: NDArray[np.generic], ids: NDArray[np.generic]) -> Nuclei:
    return Nuclei(ids.astype(np.int32), np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))


def _crc(body: bytes, prompt_ids: NDArray[np.int32]) -> int:
    return zlib.crc32(body, zlib.crc32(np.asarray(prompt_ids, "<i4").tobytes()))


async def keep_partials(
    redis: Redis,
    keys: RunKeys,
    lease: Lease,
    group: str,
    pieces: Sequence[Piece],
    prompt_ids: NDArray[np.int32],
    max_deliveries: int,
) -> list[int]:
    """Keep pieces of a group's responses, under the lease on its task. Returns how many tokens of each are kept now.

    NEVER: the sample was published, its group has ended, or the lease was lost. A piece that does not start where those
    of its attempt end is not kept: 0 if they must all be sent again. Raises NotKeptError.
    """
    try:
        return await call_for_each(
            redis,
            "keep_partials",
            group_key=keys.group(group),
            partials_key=keys.partials(group),
            tasks_key=lease.stream,
            consumer_group=lease.consumer_group,
            consumer=lease.consumer,
            task_entry=lease.entry,
            kept_s=KEPT_S,
            most_forgiven=FORGIVEN * max_deliveries,
            index_list=[piece.index for piece in pieces],
            attempt_list=[piece.attempt for piece in pieces],
            base_list=[piece.base for piece in pieces],
            start_list=[piece.start for piece in pieces],
            end_list=[piece.end for piece in pieces],
            piece_list=[packed_piece(piece.partial, prompt_ids) for piece in pieces],
        )
    except (RedisError, OSError) as error:
        raise NotKeptError(str(error)) from error


async def forget_partials(redis: Redis, keys: RunKeys, lease: Lease, group: str, indices: Sequence[int]) -> None:
    """Forget what is kept of these samples for the task of `lease`; a full Redis does so too."""
    await call(
        redis,
        "forget_partials",
        partials_key=keys.partials(group),
        task_entry=lease.entry,
        index_list=list(indices),
    )


async def read_partials(
    redis: Redis, keys: RunKeys, group: str, entry: str, prompt_ids: NDArray[np.int32]
) -> tuple[dict[int, Partial], dict[int, str]]:
    """What is kept of a group's half-drawn responses for the task of this entry; and the damage. Both by sample."""
    fields = await redis.hgetall(keys.partials(group))
    if fields.get(b"entry") != entry.encode():
        return {}, {}
    whole, damaged = {}, {}
    for name in fields:
        if not name.startswith(b"tokens:"):
            continue
        index = int(name.removeprefix(b"tokens:"))
        try:
            whole[index] = _whole(fields, index, int(fields[name]), prompt_ids)
        except ValueError as error:
            damaged[index] = f"what is kept of sample {index} of group {group} is damaged: {error}"
    return whole, damaged


def _whole(fields: Mapping[bytes, bytes], index: int, tokens: int, prompt_ids: NDArray[np.int32]) -> Partial:
    """All that is kept of one response. Raises ValueError unless that is `tokens` tokens from the first one on."""
    parts: list[Partial] = []
    end = 0
    while end < tokens:
        stored = fields.get(f"{index}:{end}".encode())
        if stored is None:
            raise ValueError(f"the piece from token {end} on is missing")
        parts.append(unpacked_piece(stored, prompt_ids))
        if not len(parts[-1].tokens):
            raise ValueError(f"the piece from token {end} on is empty")
        end += len(parts[-1].tokens)
    if end != tokens or not parts:
        raise ValueError(f"{end} tokens are not valid: expected {tokens}")
    return Partial(joined_tokens([part.tokens for part in parts]), parts[0].started_at)
