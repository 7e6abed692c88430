"""Dead letters on a real server: each is written once, and users see them in pages, whatever an entry holds."""

import json

import pytest

from services.contracts import Cause, DeadLetter, Lane
from services.streams.connection.functions import FencedError
from services.streams.delivery.consumer import discard_entry
from services.streams.delivery.validation import Malformed, Source
from services.streams.keys import RunKeys
from services.streams.state.events import letters
from services.streams.state.ownership import become_owner


@pytest.fixture
def keys(run_id):
    return RunKeys(run_id)


async def add_letter(redis, keys, body, cause=Cause.INVALID):
    """Adds the letter of a message; returns it with its entry."""
    stream = keys.lane(Lane.TRAIN).verdicts
    letter = DeadLetter(stream=stream, entry="1-0", reason="test", deliveries=1, cause=cause, body=body, size=len(body))
    return (await redis.xadd(keys.dead, {"m": letter.model_dump_json()})).decode(), letter


@pytest.mark.parametrize("body", [b"", b"\xff\xfe", b"[]", b'{"kind": "dead"}', b'{"kind": "task", "group": 3}'])
async def test_an_entry_that_is_not_a_letter_is_listed_as_such(redis, keys, body):
    await redis.xadd(keys.dead, {"m": body})
    await redis.xadd(keys.dead, {"other": "field"})
    good = await add_letter(redis, keys, "{}", Cause.DELIVERIES)
    (_, broken), (_, empty), last = await letters(redis, keys)
    assert "not a valid DeadLetter" in broken.reason
    assert "not a valid DeadLetter" in empty.reason
    assert last == good


async def test_letters_come_in_pages(redis, keys):
    added = [await add_letter(redis, keys, json.dumps(number)) for number in range(5)]
    first = await letters(redis, keys, count=3)
    rest = await letters(redis, keys, first[-1][0])
    assert (len(first), [*first, *rest]) == (3, added)


@pytest.mark.parametrize("consumer_group", ["", "sampler"])
async def test_an_entry_is_discarded_once(redis, keys, consumer_group):
    stream = keys.lane(Lane.TRAIN).verdicts
    entry, other = [(await redis.xadd(stream, {"m": "{}"})).decode() for _ in range(2)]
    await redis.xgroup_create(stream, "sampler", "0")
    await redis.xreadgroup("sampler", "c", {stream: ">"})
    letter = Malformed("no verdict").letter(Source(stream, entry, b"{}"))
    for _ in range(2):
        await discard_entry(redis, keys, stream, entry, letter, consumer_group=consumer_group)
        assert await redis.xlen(keys.dead) == 1
    left = [name.decode() for name, _ in await redis.xrange(stream)]
    leased = [found["message_id"].decode() for found in await redis.xpending_range(stream, "sampler", "-", "+", 9)]
    assert (left, leased) == (([entry, other], [other]) if consumer_group else ([other], [entry, other]))


async def test_a_previous_owner_discards_nothing(redis, keys):
    entry = (await redis.xadd(keys.batches, {"m": "{}"})).decode()
    fence = await become_owner(redis, keys, "learner")
    await become_owner(redis, keys, "learner")
    letter = Malformed("no batch").letter(Source(keys.batches, entry, b"{}"))
    owner = {"epoch_key": keys.epoch("learner"), "fence": fence.token}
    with pytest.raises(FencedError):
        await discard_entry(redis, keys, keys.batches, entry, letter, **owner)
    assert (await redis.xlen(keys.batches), await redis.xlen(keys.dead)) == (1, 0)
