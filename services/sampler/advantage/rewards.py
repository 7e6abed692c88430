"""Owns the reward of a response: +1 / -1 by its verdict, and the soft overlong punishment.

Must not depend on other responses of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from services.contracts import Outcome

REWARDS = {Outcome.CORRECT: 1.0, Outcome.WRONG: -1.0}


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


def reward(outcome: Outcome, tokens: int, punishment: tuple[str, Ramp] | None) -> float | None:
    """The reward of a response of `tokens`: +1 or -1, plus the punishment (entry of PUNISHMENTS, ramp), if any.

    None for an unknown outcome, which is never trained as wrong.
    """
    earned = REWARDS.get(outcome)
    if earned is None or punishment is None:
        return earned
    shape, ramp = punishment
    return earned + PUNISHMENTS[shape](tokens, ramp)
