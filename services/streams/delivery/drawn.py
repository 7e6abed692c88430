"""Owns response tokens as an engine draws them: parts of one response, joined and cut.

Must not import Redis' client: tests on GPUs import the engine without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.contracts import VersionSpan
from services.streams.delivery.nucleus import Nuclei, joined


@dataclass(frozen=True)
class DrawnTokens:
    """Response tokens that the engine has drawn, from a response's first one on or from a later one.

    response_ids: int32 [T]; behaviour_logprobs: float32 [T], as in a payload; spans cover [0, T); nuclei: None without
    top-k.
    """

    response_ids: NDArray[np.int32]
    behaviour_logprobs: NDArray[np.float32]
    spans: tuple[VersionSpan, ...]
    nuclei: Nuclei | None = None

    def __len__(self) -> int:
        return len(self.response_ids)

    def check(self) -> None:
        """Raise ValueError unless every token has a finite log-prob, a version and, with top-k, its nucleus."""
        tokens = len(self)
        if self.behaviour_logprobs.shape != (tokens,) or not np.isfinite(self.behaviour_logprobs).all():
            raise ValueError(f"behaviour_logprobs: not valid: expected {tokens} finite ones, one per token")
        ends = [0, *(span.end for span in self.spans)]
        if ends[-1] != tokens or any(
            span.start != end or span.end <= end for span, end in zip(self.spans, ends, strict=False)
        ):
            raise ValueError(f"spans: {self.spans} are not valid: expected spans that cover {tokens} tokens")
        if self.nuclei is not None:
            self.nuclei.check(self.response_ids)


def joined_tokens(parts: Sequence[DrawnTokens]) -> DrawnTokens:
    """Consecutive parts of one response as one; adjoining spans of one version become one.

    Raises ValueError if some of the parts have nuclei and others have none.
    """
    if len({part.nuclei is None for part in parts}) > 1:
        raise ValueError("nuclei: only some of these tokens have one")
    spans: list[VersionSpan] = []
    start = 0
    for part in parts:
        for span in part.spans:
            first, end = start + span.start, start + span.end
            if spans and spans[-1].version == span.version:
                first = spans.pop().start
            spans.append(VersionSpan(version=span.version, start=first, end=end))
        start += len(part)
    nuclei = [part.nuclei for part in parts if part.nuclei is not None]
    return DrawnTokens(
        np.concatenate([np.zeros(0, np.int32), *(part.response_ids for part in parts)]),
        np.concatenate([np.zeros(0, np.float32), *(part.behaviour_logprobs for part in parts)]),
        tuple(spans),
        joined(nuclei) if nuclei else None,
    )


def tokens_from(tokens: DrawnTokens, start: int) -> DrawnTokens:
    """The tokens from `start` on."""
    nuclei = tokens.nuclei
    return DrawnTokens(
        tokens.response_ids[start:],
        tokens.behaviour_logprobs[start:],
        spans_within(tokens.spans, start, len(tokens)),
        nuclei and Nuclei(nuclei.ids[nuclei.offsets[start] :], nuclei.offsets[start:] - nuclei.offsets[start]),
    )


def spans_within(spans: Sequence[VersionSpan], start: int, end: int) -> tuple[VersionSpan, ...]:
    """The spans of the tokens [start, end), counted from `start`."""
    return tuple(
        VersionSpan(version=span.version, start=max(span.start, start) - start, end=min(span.end, end) - start)
        for span in spans
        if span.start < end and span.end > start
    )
