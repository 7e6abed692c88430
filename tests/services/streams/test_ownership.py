"""Who owns a role: the newest epoch, and within an epoch the owner that Redis names."""

import pytest

from services.contracts import UNOWNED, Fence
from services.streams.connection.functions import FencedError
from services.streams.keys import RunKeys
from services.streams.state.ownership import become_owner, newest_owner
from services.streams.state.policy_history import History
from tests.services.driven import contents

ROLE = "learner"


@pytest.fixture
def keys(run_id):
    return RunKeys(run_id)


@pytest.fixture
def history(redis, keys):
    """The learner's side for a fence."""
    return lambda fence: History(redis, keys, ROLE, fence)


async def test_each_owner_gets_the_next_epoch(redis, keys):
    assert await newest_owner(redis, keys, ROLE) == UNOWNED
    first, second = [await become_owner(redis, keys, ROLE) for _ in range(2)]
    assert (first.epoch, second.epoch) == (1, 2)
    assert first.owner != second.owner
    assert await newest_owner(redis, keys, ROLE) == second


async def test_an_owner_that_repeats_its_call_keeps_its_epoch(redis, keys):
    fences = [await become_owner(redis, keys, ROLE, owner) for owner in ("learner-1", "learner-1", "learner-2")]
    assert fences == [Fence(1, "learner-1"), Fence(1, "learner-1"), Fence(2, "learner-2")]
    assert await redis.get(keys.epoch(ROLE)) == b"2 learner-2"


async def test_another_owner_of_the_same_epoch_is_rejected(redis, keys, history):
    first = await become_owner(redis, keys, ROLE, "learner-1")
    await redis.set(keys.epoch(ROLE), "0 learner-0")  # a failover lost the first call
    second = await become_owner(redis, keys, ROLE, "learner-2")
    assert first.epoch == second.epoch
    with pytest.raises(FencedError, match=r"newer owner.*: 1 learner-2"):
        await history(first).announce(0, "w0", 1)
    assert await history(second).announce(0, "w0", 1) == 0


async def test_an_owner_starts_above_an_epoch_that_the_server_lost(redis, keys):
    await redis.set(keys.epoch(ROLE), "3 learner-0")
    fences = [await become_owner(redis, keys, ROLE, f"learner-{above}", above) for above in (2, 3, 9)]
    assert [fence.epoch for fence in fences] == [4, 5, 10]
    assert await become_owner(redis, keys, ROLE, "learner-9", 9) == fences[2], "a repeated call changes nothing"


@pytest.mark.parametrize("stored", ["6 learner-0", "6", "7"], ids=["older", "older, bare", "bare"])
async def test_an_epoch_that_the_server_lost_is_restored(redis, keys, history, stored):
    fence = Fence(7, "learner-1")
    await redis.set(keys.epoch(ROLE), stored)
    assert await history(fence).announce(0, "w0", 1) == 0
    assert await newest_owner(redis, keys, ROLE) == fence


async def test_a_higher_epoch_takes_the_role_back_after_a_double_loss(redis, keys, history):
    """A failover lost two epochs, so that an owner that started after it has the lower one."""
    _, second = [await become_owner(redis, keys, ROLE) for _ in range(2)]
    await redis.set(keys.epoch(ROLE), "0 learner-0")
    third = await become_owner(redis, keys, ROLE)
    assert (second.epoch, third.epoch) == (2, 1)
    await history(third).announce(0, "w0", 1)
    await history(second).announce(0, "w0", 1)
    with pytest.raises(FencedError, match=f"newer owner.*: {second.token}"):
        await history(third).announce(0, "w0", 1)
    again = await become_owner(redis, keys, ROLE)
    with pytest.raises(FencedError, match=f"newer owner.*: {again.token}"):
        await history(second).announce(0, "w0", 1)


async def test_an_epoch_of_the_previous_format_is_continued(redis, keys, history):
    await redis.set(keys.epoch(ROLE), "7")
    assert await newest_owner(redis, keys, ROLE) == Fence(7, "")
    fence = await become_owner(redis, keys, ROLE, "learner-1")
    assert fence.epoch == 8
    with pytest.raises(FencedError, match="newer owner"):
        await history(Fence(7, "learner-0")).announce(0, "w0", 1)


async def test_an_owner_writes_nothing_into_an_empty_redis(redis, keys, history):
    fence = await become_owner(redis, keys, ROLE)
    await redis.delete(keys.epoch(ROLE))
    before = await contents(redis, keys)
    with pytest.raises(FencedError, match="Redis no longer has the state of this run"):
        await history(fence).announce(0, "w0", 1)
    assert await contents(redis, keys) == before


async def test_a_caller_that_owns_nothing_is_rejected(redis, keys, history):
    await become_owner(redis, keys, ROLE)
    with pytest.raises(FencedError):
        await history(UNOWNED).announce(0, "w0", 1)
