"""Owns the scores of a held-out set: avg@k, pass@k, maj@k, mean scores, and standard errors over questions.

Must not do I/O, or import anything but the standard library.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

MOST_REWARDS = 32
"""Named rewards that are shown: rows may name any number of them."""


@dataclass(frozen=True)
class Response:
    """One judged response: right, wrong or unknown (None), and its answer, '' if it has none."""

    correct: bool | None
    answer: str = ""


@dataclass(frozen=True)
class Score:
    """A mean over questions and its standard error, which is 0 for a single question."""

    value: float
    standard_error: float


def average(responses: Sequence[Response]) -> float | None:
    """The share of right responses among the known ones of one question; None if none is known."""
    known = [response.correct for response in responses if response.correct is not None]
    return fmean(known) if known else None


def pass_at(drawn: int, correct: int, wanted: int) -> float:
    """The chance that at least one of `wanted` responses is right: 1 - C(n - c, k) / C(n, k).

    Unbiased from n = `drawn` responses of which c = `correct` are right (Chen et al., arXiv 2107.03374, Eq. 1).
    Raises ValueError unless 0 <= correct <= drawn and 1 <= wanted <= drawn.
    """
    if not 0 <= correct <= drawn or not 1 <= wanted <= drawn:
        raise ValueError(
            f"correct = {correct}, wanted = {wanted} of drawn = {drawn} is not valid:"
            " expected 0 <= correct <= drawn and 1 <= wanted <= drawn"
        )
    return 1.0 - math.comb(drawn - correct, wanted) / math.comb(drawn, wanted)


def passes(responses: Sequence[Response], wanted: int) -> float | None:
    """pass@`wanted` of one question; None if no response is known.

    With fewer known responses than `wanted`, it is pass@k for all the known ones, a lower bound.
    """
    known = [response.correct for response in responses if response.correct is not None]
    return pass_at(len(known), sum(known), min(wanted, len(known))) if known else None


def majority(responses: Sequence[Response]) -> float | None:
    """maj@k of one question: whether the most frequent answer is right; None if no response is known.

    Unknown responses and those without an answer do not vote; without votes the result is 0. If several answers have
    the most votes, it is the expected value of a random choice among them. If a verifier judged the same answer both
    right and wrong, the answer counts by its share of right verdicts.
    """
    known = [response for response in responses if response.correct is not None]
    if not known:
        return None
    votes: dict[str, list[bool]] = defaultdict(list)
    for response in known:
        if response.answer:
            votes[response.answer].append(bool(response.correct))
    most = max(map(len, votes.values()), default=0)
    return fmean([fmean(verdicts) for verdicts in votes.values() if len(verdicts) == most] or [0.0])


def by_name(rewards: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each named reward over those of the `rewards` that have it, of the MOST_REWARDS that most have."""
    found: dict[str, list[float]] = defaultdict(list)
    for named in rewards:
        for name, score in named.items():
            found[name].append(score)
    most = sorted(found, key=lambda name: (-len(found[name]), name))[:MOST_REWARDS]
    return {name: fmean(found[name]) for name in sorted(most)}


def over_questions(values: Sequence[float | None]) -> Score | None:
    """The mean of one value per question without unknown ones, and s / sqrt(n) (s over n - 1); None without values."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Score(fmean(known), stdev(known) / math.sqrt(len(known)) if len(known) > 1 else 0.0)


def sizes(samples: int) -> tuple[int, ...]:
    """The k for which pass@k is reported with `samples` responses: the powers of two below it, and itself."""
    return (*(2**power for power in range((samples - 1).bit_length())), samples)
