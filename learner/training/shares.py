"""Owns how the responses of a mini-batch are distributed over ranks, so that every rank has about the same work.

Must not read payloads: all ranks compute the same shares from the batch message, without communication.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class PlannedSample:
    """One response to train on. `weight` applies to each token, already divided by the mini-batch's normaliser.

    `replica`: the rollout replica that sampled it.
    """

    payload: str
    group: str
    tokens: int
    advantage: float
    weight: float
    replica: str = ""


Share = tuple[PlannedSample, ...]


class Distribution(NamedTuple):
    """The share of each rank, and its work in input tokens."""

    shares: tuple[Share, ...]
    tokens: tuple[int, ...]

    @property
    def balance(self) -> float:
        """The mean work of a rank divided by the largest, in (0, 1]; 1 without work."""
        return sum(self.tokens) / len(self.tokens) / max(self.tokens) if any(self.tokens) else 1.0


def row_length(prompt_tokens: int, samples: Iterable[PlannedSample]) -> int:
    """The number of input tokens of a row. The last token of a response is no input: it predicts no trained token."""
    return prompt_tokens + sum(sample.tokens - 1 for sample in samples)


def distribute(
    groups: Mapping[str, Sequence[PlannedSample]], prompt_tokens: Mapping[str, int], ranks: int, row_tokens: int
) -> Distribution:
    """Distribute the responses of each group over ranks: the longest first, each to the rank with the fewest tokens.

    Responses that fit into one row of at most `row_tokens` tokens share their prompt and stay together, unless there
    are fewer rows than ranks. With 0, no rows are shared. The work of a row is its length, `row_length`. The groups of
    older releases, whose prompts have 0 tokens, stay together, as they did there.
    """
    rows = [
        (prompt_tokens[name], row)
        for name, members in groups.items()
        for row in _rows(members, prompt_tokens[name], row_tokens if prompt_tokens[name] else sys.maxsize)
    ]
    parts = -(-ranks // max(len(rows), 1))
    pieces = [(row_length(prompt, piece), piece) for prompt, row in rows for piece in _split(row, parts)]
    pieces.sort(key=lambda piece: -piece[0])
    shares: list[list[PlannedSample]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for length, piece in pieces:
        load, rank = heapq.heappop(loads)
        shares[rank] += piece
        heapq.heappush(loads, (load + length, rank))
    tokens = tuple(load for load, _ in sorted(loads, key=lambda pair: pair[1]))
    return Distribution(tuple(tuple(share) for share in shares), tokens)


def _rows(members: Iterable[PlannedSample], prompt_tokens: int, row_tokens: int) -> list[list[PlannedSample]]:
    """Cut a group as `micro_batches` does: consecutive responses share a row as long as they fit."""
    rows: list[list[PlannedSample]] = []
    length = 0
    for sample in members:
        length += sample.tokens - 1
        if rows and length <= row_tokens:
            rows[-1].append(sample)
        else:
            rows.append([sample])
            length = row_length(prompt_tokens, [sample])
    return rows


def _split(row: list[PlannedSample], parts: int) -> list[list[PlannedSample]]:
    parts = min(parts, len(row))
    return [row[index::parts] for index in range(parts)]
