"""A judge's budget is shared by all replicas of a run, and never exceeded by what they take."""

import asyncio

import pytest

from services.streams.keys import RunKeys
from services.streams.state.rewards.judge_budget import SharedBudget


@pytest.fixture
def budget(redis, run_id):
    return lambda process, reward="judge", **most: SharedBudget(redis, RunKeys(run_id), process, reward, **most)


async def test_replicas_share_what_is_left(budget):
    first, second = (budget(name, max_requests=3, max_tokens=1000) for name in ("v1", "v2"))
    assert [await first.take(1, 100), await second.take(1, 100), await first.take(1, 100)] == [True] * 3
    assert not await second.take(1, 100)
    assert not await first.take(1, 0)


async def test_what_was_estimated_too_high_is_given_back(budget):
    judge = budget("v1", max_tokens=1000)
    assert await judge.take(1, 900)
    assert not await judge.take(1, 200)
    await judge.settle(0, -800)
    assert await judge.take(1, 900)
    await judge.settle(0, 500)  # used more than estimated: it counts, although nothing is left
    assert not await judge.take(0, 1)


async def test_judges_do_not_share_a_budget(budget):
    assert await budget("v1", "one", max_requests=1).take(1, 0)
    assert await budget("v1", "other", max_requests=1).take(1, 0)


async def test_a_new_process_does_not_get_the_budget_again(budget):
    assert await budget("v1", max_requests=1).take(1, 0)
    assert not await budget("v2", max_requests=1).take(1, 0)


async def test_many_at_once_take_no_more_than_there_is(budget):
    replicas = [budget(f"v{number}", max_requests=10) for number in range(4)]
    taken = await asyncio.gather(*(replica.take(1, 1) for replica in replicas for _ in range(10)))
    assert sum(taken) == 10
