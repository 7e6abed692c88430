"""Owns the budget of a judge model: what its requests may cost in all.

Must not send anything.
"""

from __future__ import annotations

import math
from typing import Protocol

CHARACTERS_PER_TOKEN = 3
"""Fewer than a token of English has: an estimate that is too high is given back."""


class Budget(Protocol):
    """Requests and tokens that are left; replicas of a run share one. It must be atomic.

    An implementation may raise; the error then reaches the caller of `judge_all` in an ExceptionGroup.
    """

    async def take(self, requests: int, tokens: int) -> bool:
        """Take both if both are left, else neither; returns whether they were taken. Both are 0 or more."""

    async def settle(self, requests: int, tokens: int) -> None:
        """Account for what was used beyond what was taken, even if nothing is left; negative numbers give back."""


class UnlimitedBudget:
    """A budget that is never spent."""

    async def take(self, requests: int, tokens: int) -> bool:
        """Always True."""
        return True

    async def settle(self, requests: int, tokens: int) -> None:
        """Nothing to account for."""


class LocalBudget:
    """A budget of this process alone; None: no limit."""

    def __init__(self, max_requests: int | None = None, max_tokens: int | None = None) -> None:
        self.requests: float = math.inf if max_requests is None else max_requests
        self.tokens: float = math.inf if max_tokens is None else max_tokens

    async def take(self, requests: int, tokens: int) -> bool:
        """Take both if both are left."""
        if requests > self.requests or tokens > self.tokens:
            return False
        await self.settle(requests, tokens)
        return True

    async def settle(self, requests: int, tokens: int) -> None:
        """Account for both; what is left may fall below 0."""
        self.requests -= requests
        self.tokens -= tokens


class BudgetSpentError(Exception):
    """A request may not be sent. The text names the budget."""


class RequestMeter:
    """The cost of one request with all its attempts: one request and `tokens` estimated tokens for each attempt.

    `spent`: what to add to an error's text by the budget's name, for example its size.
    """

    def __init__(self, budget: Budget, tokens: int, host: str, limits: tuple[int | None, int | None]) -> None:
        self._budget = budget
        self._tokens = tokens
        self._host = host
        self._limits = limits

    async def reserve(self) -> None:
        """Take one attempt's cost. Raises BudgetSpentError; apart from each other, so that it can say which."""
        if not await self._budget.take(1, 0):
            raise BudgetSpentError(self._text("max_requests", self._limits[0], "requests"))
        if not await self._budget.take(0, self._tokens):
            await self._budget.settle(-1, 0)
            raise BudgetSpentError(self._text("max_tokens", self._limits[1], "tokens"))

    async def unspent(self) -> None:
        """Give the tokens of an attempt back: the service did not work for it. Its request counts."""
        await self._budget.settle(0, -self._tokens)

    async def used(self, tokens: int | None) -> None:
        """Account for the tokens that the service reports; None: it did not, and the estimate stays."""
        if tokens is not None:
            await self._budget.settle(0, tokens - self._tokens)

    def _text(self, field: str, limit: int | None, unit: str) -> str:
        size = "" if limit is None else f" of {limit:,}"
        return f"{self._host}: not asked: the run's budget{size} {unit} (judge.{field}) is spent"


def estimated_tokens(characters: int, answer_tokens: int) -> int:
    """The tokens of a request with so many characters, and of its answer."""
    return math.ceil(characters / CHARACTERS_PER_TOKEN) + answer_tokens
