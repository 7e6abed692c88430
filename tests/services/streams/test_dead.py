"""Dead letters on a real server, as users see them: in pages, and whatever an entry holds."""

import json

import pytest

from services.contracts import Cause, DeadLetter, Lane
from services.streams.keys import RunKeys
from services.streams.state.dead_letters import letters


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
