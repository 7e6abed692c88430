"""Payloads on a real server: a read returns them as written, or names them as damaged."""

import re
from dataclasses import replace

import numpy as np
import pytest

from services.contracts import Lane
from services.streams.delivery.nucleus import Nuclei
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


NUCLEI = Nuclei(np.array([8, 3, 9], np.int32), np.array([0, 2, 3], np.int32))
DRAWN = replace(BODY, nuclei=NUCLEI)
"""Token 8 was drawn from 8 and 3, token 9 was the only one."""


async def test_nuclei_survive_the_round_trip_and_are_optional(redis, keys):
    """A payload without them has the fields that earlier releases wrote."""
    assert pack(DRAWN).keys() - pack(BODY).keys() == {"nucleus_ids", "nucleus_offsets"}
    names = [keys.payload("g0", 0), keys.payload("g0", 1)]
    for name, body in zip(names, (BODY, DRAWN), strict=True):
        await redis.hset(name, mapping=pack(body))
    whole, _ = await fetch(redis, names)
    assert whole[names[0]].nuclei is None
    np.testing.assert_array_equal(whole[names[1]].nuclei.ids, [8, 3, 9])
    np.testing.assert_array_equal(whole[names[1]].nuclei.offsets, [0, 2, 3])


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        ([8, 9], [0, 2], "nuclei: 1 are not valid: expected 2, one per response token"),
        ([8, 9], [0, 0, 2], "nuclei: these offsets are not valid: expected 2 ids, at least 1 per token"),
        ([8, 9], [0, 1, 3], "nuclei: these offsets are not valid: expected 2 ids"),
        ([8, 9], [1, 1, 2], "nuclei: these offsets are not valid: expected 2 ids"),
        ([8, -1, 9], [0, 2, 3], "nuclei: the id -1 is not valid: expected a token id"),
        ([8, 3, 7], [0, 2, 3], "nuclei: that of token 1 is not valid: expected the drawn token in it, once"),
        ([8, 8, 9], [0, 2, 3], "nuclei: that of token 0 is not valid: expected the drawn token in it, once"),
    ],
)
def test_nuclei_that_contradict_their_response_are_refused(ids, offsets, message):
    wrong = replace(BODY, nuclei=Nuclei(np.array(ids, np.int32), np.array(offsets, np.int32)))
    with pytest.raises(ValueError, match=re.escape(message)):
        pack(wrong)
    with pytest.MonkeyPatch.context() as unchecked:
        unchecked.setattr(Nuclei, "check", lambda *_: None)
        packed = pack(wrong)
    with pytest.raises(PayloadMissingError, match=re.escape(message)):
        unpack("p", {name.encode(): value for name, value in packed.items()})


@pytest.mark.parametrize("field", pack(DRAWN))
async def test_a_payload_that_lost_a_bit_or_a_field_is_detected(redis, keys, field):
    key, packed = keys.payload("g0", 0), pack(DRAWN)
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
