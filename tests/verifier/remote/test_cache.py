"""The bounds of the cache of grades, and of a budget."""

from __future__ import annotations

import pytest

from verifier.remote.budget import LocalBudget, UnlimitedBudget, estimated_tokens
from verifier.remote.cache import ENTRY_BYTES, Grade, GradeCache


async def asked_for(cache: GradeCache, *names: bytes, reason: str = "") -> list[bytes]:
    """Which of these questions were asked."""
    asked: list[bytes] = []
    for name in names:

        async def ask(name: bytes = name) -> Grade:
            asked.append(name)
            return Grade(1.0, reason)

        await cache.grade(name, ask)
    return asked


async def test_the_least_recently_used_grade_is_dropped() -> None:
    cache = GradeCache(entries=2)
    assert await asked_for(cache, b"a", b"b", b"a", b"c") == [b"a", b"b", b"c"]
    assert await asked_for(cache, b"a", b"c", b"b") == [b"b"]


async def test_long_reasons_leave_room_for_fewer() -> None:
    cache = GradeCache(size=3 * (ENTRY_BYTES + 1000))
    assert await asked_for(cache, b"a", b"b", b"c", b"d", b"b", reason="x" * 1000) == [b"a", b"b", b"c", b"d"]
    assert await asked_for(cache, b"a", reason="x" * 1000) == [b"a"]


async def test_an_error_reaches_all_and_is_not_kept() -> None:
    cache = GradeCache()

    async def fail() -> Grade:
        raise OSError("away")

    for _ in range(2):
        with pytest.raises(OSError, match="away"):
            await cache.grade(b"a", fail)
    assert await asked_for(cache, b"a") == [b"a"]


async def test_a_budget_takes_both_or_neither() -> None:
    budget = LocalBudget(max_requests=2, max_tokens=10)
    assert not await budget.take(1, 11)
    assert await budget.take(1, 10)
    assert not await budget.take(1, 1)
    await budget.settle(0, -4)
    assert await budget.take(1, 4)
    assert not await budget.take(1, 0)
    await budget.settle(0, 5)
    assert (budget.requests, budget.tokens) == (0, -5)
    assert await UnlimitedBudget().take(10**9, 10**12)
    assert await LocalBudget().take(10**9, 10**12)


def test_an_estimate_is_rounded_up() -> None:
    assert [estimated_tokens(characters, 10) for characters in (0, 1, 3, 4)] == [10, 11, 11, 12]
