"""Owns the half-drawn responses of a replica: what is new of each, and the loop that keeps it in Redis.

Must not generate, nor publish a sample; rollout/tasks.py does both.

A replica may end at any moment. What its responses have so far is kept under the lease of their task, about once a
second and at once when the replica is asked to end; the replica that gets the task next goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rollout.engine import RolloutEngine
from rollout.nuclei import WideNucleusError
from services.streams.delivery.drawn import joined_tokens, tokens_from
from services.streams.delivery.partials import NEVER, NotKeptError, Partial, Piece

log = logging.getLogger(__name__)

KEEP_EVERY_S = 1.0
"""A replica that is killed loses what it drew in this time: on average half of it."""
KEEP_TOKENS = 16
"""The fewest new tokens of a response that are kept while it goes on: a piece costs about a hundred bytes more."""


@dataclass
class HalfDrawn:
    """One attempt at a response. `kept`: what a previous replica drew; `saved`: how many tokens Redis has, with those.

    `engine_name`: of its request to the engine, which draws what follows `kept`.
    """

    engine: RolloutEngine
    engine_name: str
    started_at: float
    kept: Partial | None = None
    saved: int = field(init=False)
    attempt: str = field(default_factory=lambda: secrets.token_hex(6))

    def __post_init__(self) -> None:
        self.saved = self.base

    @property
    def base(self) -> int:
        """How many tokens previous replicas drew."""
        return len(self.kept.tokens) if self.kept else 0

    def unsaved(self, least: int) -> Partial | None:
        """The tokens that Redis does not have; None if they are fewer than `least`."""
        before = self.base
        try:
            drawn = self.engine.drawn(self.engine_name, max(0, self.saved - before))
        except WideNucleusError:  # the response will be drawn again
            return None
        parts = [tokens_from(self.kept.tokens, self.saved)] if self.kept and self.saved < before else []
        tokens = joined_tokens([*parts, drawn] if drawn else parts)
        return Partial(tokens, self.started_at) if len(tokens) >= least else None


KeepPieces = Callable[[list[Piece]], Awaitable[list[int]]]
"""Keeps pieces of one task's responses; returns how many tokens of each are kept now, or NEVER."""


class _Refusals:
    """Whether pieces are kept now, of all tasks of a replica: a change is logged, not each of many refusals."""

    def __init__(self) -> None:
        self._refused = False

    def note(self, refused: NotKeptError | None) -> None:
        if refused and not self._refused:
            log.warning("half-drawn responses are not kept for now: %s", refused)
        elif self._refused and not refused:
            log.info("half-drawn responses are kept again")
        self._refused = refused is not None


class WatchedTask:
    """The responses of one task: `names` by sample index."""

    def __init__(
        self,
        half_drawn: Mapping[str, HalfDrawn],
        names: Mapping[int, str],
        keep: KeepPieces,
        refusals: _Refusals,
    ) -> None:
        self._refusals = refusals
        self._half_drawn = half_drawn
        self._names = dict(names)
        self._keep_pieces = keep
        self._keeping = asyncio.Lock()

    async def keep(self, least: int = 1) -> None:
        """Keep what is new of the responses that have at least `least` new tokens.

        A Redis that begins to be full or away is logged: what is not kept now is kept later, or drawn again.
        """
        async with self._keeping:
            await self._keep(least)

    async def _keep(self, least: int) -> None:
        halves, pieces = [], []
        for index, name in self._names.items():
            half = self._half_drawn.get(name)
            if half and (partial := half.unsaved(least)):
                halves.append(half)
                pieces.append(Piece(index, half.attempt, half.base, half.saved, partial))
        if not pieces:
            return
        try:
            kept = await self._keep_pieces(pieces)
        except NotKeptError as error:
            self._refusals.note(error)
            return
        self._refusals.note(None)
        for piece, half, tokens in zip(pieces, halves, kept, strict=True):
            if tokens == NEVER:
                self._names.pop(piece.index, None)
            else:
                half.saved = tokens


class Keeper:
    """Keeps what a replica's responses have so far. `half_drawn`: the current attempt at each response, by its name."""

    def __init__(self, half_drawn: Mapping[str, HalfDrawn]) -> None:
        self._half_drawn = half_drawn
        self._watched: set[WatchedTask] = set()
        self._refusals = _Refusals()

    @contextmanager
    def watching(self, names: Mapping[int, str], keep: KeepPieces) -> Iterator[WatchedTask]:
        """Keep these responses of a task, by sample index, while the body runs."""
        watched = WatchedTask(self._half_drawn, names, keep, self._refusals)
        self._watched.add(watched)
        try:
            yield watched
        finally:
            self._watched.remove(watched)

    async def run(self) -> None:
        """Keep what is new, every KEEP_EVERY_S seconds, until cancelled."""
        while True:
            await asyncio.sleep(KEEP_EVERY_S)
            await asyncio.gather(*(watched.keep(KEEP_TOKENS) for watched in list(self._watched)))
