"""Owns a response's reward: the verdict's +1 / -1 and the soft overlong punishment.

Must not see other responses of the group.
"""

from __future__ import annotations

from services.contracts import Outcome

REWARDS = {Outcome.CORRECT: 1.0, Outcome.WRONG: -1.0}


def soft_overlong_punishment(tokens: int, longest: int, cache: int) -> float:
    """Paper Eq. 13: 0 up to `longest - cache` tokens, then linear down to -1 at `longest`, -1 beyond."""
    expected = longest - cache
    if tokens <= expected:
        return 0.0
    if tokens <= longest:
        return (expected - tokens) / cache
    return -1.0


def reward(outcome: Outcome, tokens: int, longest: int, overlong_cache: int | None) -> float | None:
    """What a response earns, in [-2, 1]; None for an unknown outcome, which is never trained as wrong.

    `overlong_cache` in tokens, None when the punishment is off.
    """
    earned = REWARDS.get(outcome)
    if earned is None:
        return None
    if overlong_cache is None:
        return earned
    return earned + soft_overlong_punishment(tokens, longest, overlong_cache)
