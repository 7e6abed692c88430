"""Owns the reward of a response: +1 / -1 by its verdict or its score, and the soft overlong punishment.

Must not depend on other responses of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from services.contracts import Outcome

SIGNS = {Outcome.CORRECT: 1.0, Outcome.WRONG: -1.0}


def of_verdict(outcome: Outcome, score: float) -> float | None:
    """+1 for a correct response, -1 for a wrong one (DAPO Eq. 7)."""
    return SIGNS.get(outcome)


def of_score(outcome: Outcome, score: float) -> float | None:
    """2 s - 1: a score s of 0 or 1 earns what the paper's wrong or correct response does, 0.3 earns -0.4."""
    return None if outcome is Outcome.UNKNOWN else 2.0 * score - 1.0


REWARDS: Mapping[str, Callable[[Outcome, float], float | None]] = {"verdict": of_verdict, "score": of_score}
"""By algorithm.reward: (outcome, score in [0, 1]) -> a reward in [-1, 1]; None for an unknown outcome."""


class Ramp(NamedTuple):
    """Where the punishment of long responses applies: the last `cache` of `longest` tokens, down to -`factor`."""

    longest: int
    cache: int
    factor: float


def paper(tokens: int, ramp: Ramp) -> float:
    """DAPO Eq. 13: 0 up to `longest - cache` tokens, then linear down to -1 at `longest`, -1 beyond; no factor."""
    expected = ramp.longest - ramp.cache
    if tokens <= expected:
        return 0.0
    if tokens <= ramp.longest:
        return (expected - tokens) / ramp.cache
    return -1.0


def published(tokens: int, ramp: Ramp) -> float:
    """The published code's formula, min(-exceed / cache x factor, 0), limited to -factor beyond `longest`.

    The published code needs no limit, because its generation ends at `longest`.
    """
    exceed = tokens - (ramp.longest - ramp.cache)
    return max(-ramp.factor, min(-exceed / ramp.cache * ramp.factor, 0.0))


PUNISHMENTS: dict[str, Callable[[int, Ramp], float]] = {"paper": paper, "published": published}
"""By algorithm.overlong.shape: (response tokens, ramp) -> a punishment <= 0."""


def reward(rule: str, outcome: Outcome, score: float, tokens: int, punishment: tuple[str, Ramp] | None) -> float | None:
    """The reward of a response of `tokens`: that of `rule`, an entry of REWARDS, plus the punishment, if any.

    `punishment`: an entry of PUNISHMENTS, and its ramp. None for an unknown outcome, which is never trained as wrong.
    """
    earned = REWARDS[rule](outcome, score)
    if earned is None or punishment is None:
        return earned
    shape, ramp = punishment
    return earned + PUNISHMENTS[shape](tokens, ramp)
