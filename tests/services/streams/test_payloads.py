"""Payloads on a real server: a read returns them as written, or names them as damaged."""

from dataclasses import replace

import numpy as np
import pytest

from services.contracts import Lane
from services.streams.delivery.payloads import PayloadMissingError, fetch, fetch_texts, pack, unpack
from services.streams.keys import RunKeys
from services.streams.state.group_state import Effect
from tests.services.driven import BODY, DrivenRun, sample_of


@pytest.fixture
def keys(run_id):
    return RunKeys(run_id)


async def test_payload_survives_the_round_trip(redis, keys):
    key = keys.payload("g0", 0)
    await redis.hset(key, mapping=pack(BODY))
    whole, damaged = await fetch(redis, [key, "no-such-key"])
    assert list(whole) == [key]
    texts, unreadable = await fetch_texts(redis, [key, "no-such-key"])
    assert whole[key].text == texts[key] == "zwölf"
    assert list(texts) == [key]
    assert "payload no-such-key is missing" in unreadable["no-such-key"]
    assert whole[key].spans == BODY.spans
    np.testing.assert_array_equal(whole[key].response_ids, [8, 9])
    np.testing.assert_array_equal(whole[key].behaviour_logprobs, np.array([-0.5, -1.25], np.float32))
    assert "payload no-such-key is missing" in damaged["no-such-key"]


async def test_samples_published_together_keep_their_payloads(redis, keys):
    run = await DrivenRun.open(redis, keys)
    task = await run.dispatched("g0", 3)
    bodies = {index: replace(BODY, text=f"text {index}", finish_reason="length") for index in range(3)}
    samples = [(sample_of(keys, "g0", index), bodies[index]) for index in (2, 0, 1)]
    assert await run.transitions.publish_samples(Lane.TRAIN, task.lease, 3, samples) == [Effect.FRESH] * 3
    whole, damaged = await fetch(redis, [keys.payload("g0", index) for index in range(3)])
    assert [payload.text for payload in whole.values()] == ["text 0", "text 1", "text 2"]
    assert not damaged


@pytest.mark.parametrize("field", pack(BODY))
async def test_a_payload_that_lost_a_bit_or_a_field_is_detected(redis, keys, field):
    key, packed = keys.payload("g0", 0), pack(BODY)
    for fields in (packed | {field: bytes([packed[field][0] ^ 1]) + packed[field][1:]}, packed | {field: b""}):
        stored = {name.encode(): value for name, value in fields.items()}
        await redis.hset(key, mapping=stored)
        if field == "text_crc":
            unpack(key, stored)
        else:
            with pytest.raises(PayloadMissingError, match=f"payload {key} is missing or damaged"):
                unpack(key, stored)
        if field.startswith("text"):
            texts, unreadable = await fetch_texts(redis, [key])
            assert not texts
            assert unreadable[key].startswith(f"payload {key} is missing or damaged")


async def test_few_payloads_are_fetched_at_once(redis, keys):
    """Redis holds each reply in memory until it is read, for all ranks of a learner at the same time."""
    executed = []

    class Counted:
        def pipeline(self, **options):
            pipe = redis.pipeline(**options)
            execute = pipe.execute

            async def counted(*arguments, **named):
                executed.append(len(pipe.command_stack))
                return await execute(*arguments, **named)

            pipe.execute = counted
            return pipe

    names = [keys.payload("g0", number) for number in range(20)]
    for name in names:
        await redis.hset(name, mapping=pack(BODY))
    whole, damaged = await fetch(Counted(), names)
    assert (list(whole), damaged) == (names, {})
    assert executed == [8, 8, 4]
